"""What a checkpoint of another library holds, said without loading its weights."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from qed_probe.errors import CheckpointError, InputError
from qed_probe.models.checkpoint import CONFIG, read_json
from qed_probe.models.foreign.families import find_layers
from qed_probe.models.foreign.library import read_config, refuse_elsewhere, skeleton
from qed_probe.models.foreign.weights import INDEX, SINGLE, Weights, read_weights

ADAPTER = "adapter_config.json"
"""What peft leaves beside a model, and transformers loads with it."""


@dataclass(frozen=True)
class Description:
    """A checkpoint by its configuration: what the model that is built from it says of itself.

    ``library`` is the one that its layers with a memory come from; ``layers`` are their numbers, of ``depth``. ``heads`` are
    value heads, ``key_dim`` and ``value_dim`` the sizes of one head, ``gate_max`` the upper end of β's range. ``longest`` is the
    number of tokens that the model is made for, None if it does not say. ``remote`` says whether the checkpoint's own code
    builds it; it has ``elements`` parameters.
    """

    directory: Path
    library: str
    family: str
    model: str
    mixer: str
    layers: tuple[int, ...]
    depth: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    hidden: int
    vocab_size: int
    longest: int | None
    gate_max: float
    remote: bool
    elements: int
    config: Any = field(repr=False)
    lambda_max: float = 0.0

    @cached_property
    def weights(self) -> Weights:
        """The weight files; raises CheckpointError if they cannot be used as they are."""
        found = read_weights(self.directory)
        if (self.directory / ADAPTER).exists():
            raise CheckpointError(
                f"{self.directory}: expected a model alone, found an adapter beside it, {ADAPTER}: merge or move it"
            )
        named = getattr(self.config, "transformers_weights", None)
        if named is not None:
            raise CheckpointError(
                f"{self.directory}: expected weights in {SINGLE} or in shards with {INDEX}, "
                f"found others, {named!r}, as transformers_weights in {CONFIG} names them"
            )
        if self.elements > 1.5 * sum(found.elements.values()):
            raise CheckpointError(
                f"{self.directory}: expected the weights of the configuration's model, {self.elements:,} numbers, "
                f"found {sum(found.elements.values()):,}"
            )
        told = any(
            getattr(part, "quantization_config", None) is not None for part in (self.config, self.config.get_text_config())
        )
        seen = [f"{found.dtypes[name]} in {name}" for name in found.quantised]
        if told or seen:
            what = [f"quantization_config in {CONFIG}"] * told + seen[:1]
            raise CheckpointError(
                f"{self.directory}: expected plain weights, found quantised ones, whose scales are not applied: {', '.join(what)}"
            )
        return found


def describe(directory: Path, *, trust_remote_code: bool = False) -> Description:
    """Read the configuration and build the model without its weights.

    Raises CheckpointError where transformers is not there or does not know the model, where code of the checkpoint's own would
    have to run without ``trust_remote_code``, and where the model has no layer of a family that is known.
    """
    content = read_json(directory)
    model_type, code = str(content.get("model_type")), "auto_map" in content
    if trust_remote_code:
        refuse_elsewhere(content, directory)
    config = read_config(directory, model_type, code=code, trust_remote_code=trust_remote_code)
    remote = type(config).__module__.startswith("transformers_modules.")
    model = skeleton(config, directory, trust_remote_code=remote)
    try:
        layers = find_layers(model)
    except InputError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    sizes = {layer.sizes for layer in layers.values()}
    if len(sizes) > 1:
        raise CheckpointError(f"{directory}: expected layers of one size, found {' and '.join(map(str, sorted(sizes)))}")
    ((key_heads, heads, key_dim, value_dim),) = sizes
    if min(key_heads, heads, key_dim, value_dim) < 1:
        raise CheckpointError(f"{directory}: expected heads and sizes of at least 1, found {next(iter(sizes))}")
    family, text = next(iter(layers.values())).family, config.get_text_config()
    return Description(
        directory=directory,
        library=family.library,
        family=family.name,
        model=type(model).__name__,
        mixer=family.mixer.name,
        layers=tuple(sorted(layers)),
        depth=text.num_hidden_layers,
        key_heads=key_heads,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        hidden=text.hidden_size,
        vocab_size=text.vocab_size,
        longest=getattr(text, "max_position_embeddings", None),
        gate_max=max(layer.gate_max for layer in layers.values()),
        remote=remote,
        elements=sum(p.numel() for p in model.parameters()),
        config=config,
    )
