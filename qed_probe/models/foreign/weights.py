"""The weight files of a checkpoint, known by their headers: which there are, and what tensors they hold."""

import json
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qed_probe.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes of plain weights, by their names in a file."""
QUANTISED = ("F8_", "F6_", "F4", "I8", "U8", "I4", "U4")
"""How the names of dtypes begin that mean nothing without scales; wider integers are no weights."""


@dataclass(frozen=True)
class Weights:
    """Names of files, in order; of every tensor in them its dtype, as the file names it, its number of elements and its file."""

    files: tuple[str, ...]
    dtypes: dict[str, str] = field(repr=False)
    elements: dict[str, int] = field(repr=False)
    places: dict[str, Path] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """One tensor, read from its file."""
        with safe_open(self.places[name], framework="pt") as file:
            found: Tensor = file.get_tensor(name)
        return found

    @property
    def quantised(self) -> list[str]:
        """Names of tensors that need scales."""
        return [name for name, dtype in self.dtypes.items() if dtype.startswith(QUANTISED)]

    def stored(self, ending: str = "") -> str:
        """The dtypes of the plain weights whose names end so, the one that most elements have first: ``bfloat16, float32``."""
        count: Counter[str] = Counter()
        for name, dtype in self.dtypes.items():
            if name.endswith(ending) and dtype in DTYPES:
                count[DTYPES[dtype]] += self.elements[name]
        return ", ".join(name for name, _ in count.most_common()) or "none"


def read_weights(directory: Path) -> Weights:
    """Read the headers of all weight files; raises CheckpointError if there are none, or one is missing or damaged."""
    names = _files(directory)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        found = f"no {missing[0]}" + (f" and {len(missing) - 1} others missing" if len(missing) > 1 else "")
        raise CheckpointError(f"{directory}: expected {len(names)} weight files, as {INDEX} lists them, found {found}")
    dtypes, elements, places = {}, {}, {}
    for path in (directory / name for name in names):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dictionary
                    if name in dtypes:
                        raise CheckpointError(f"{path}: expected every tensor once, found {name} in another file too")
                    tensor = file.get_slice(name)
                    dtypes[name], elements[name], places[name] = tensor.get_dtype(), prod(tensor.get_shape()), path
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: expected a whole safetensors file, found one that cannot be read ({error})"
            ) from error
    return Weights(tuple(names), dtypes, elements, places)


def _files(directory: Path) -> list[str]:
    """One file, or the shards that an index lists, as transformers chooses."""
    if (directory / SINGLE).is_file():
        return [SINGLE]
    path = directory / INDEX
    if not path.is_file():
        others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for file in directory.glob(pattern))
        found = others[0] if others else "neither"
        raise CheckpointError(f"{directory}: expected weights in {SINGLE} or in shards with {INDEX}, found {found}")
    try:
        names = sorted({str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON with an object 'weight_map', found something else") from error
    beyond = [name for name in names if Path(name).name != name]
    if beyond or not names:
        raise CheckpointError(f"{path}: expected files of this directory in 'weight_map', found {(beyond or ['none'])[0]!r}")
    return names
