"""What all tokens of one layer come to: kept on disk until all are there, so that medians are exact and memory is bounded."""

import tempfile
from collections import defaultdict
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.replays.layer import QUANTITIES, Key

Array = NDArray[np.float64]


class Tally:
    """The quantities of one layer, pass after pass, by match, regime and direction; a context that removes what it kept."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the context
        self._parts: defaultdict[Key, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, measures: dict[Key, Tensor]) -> None:
        """Keep measures ``[draws, QUANTITIES, T, H]``."""
        for key, x in measures.items():
            self._parts[key].append((self._file.tell(), tuple(x.shape)))
            self._file.write(x.cpu().numpy().tobytes())

    def summary(self, key: Key) -> dict[str, float]:
        """Of one direction what ``store.replays.VARIABLES`` says of a layer, but for what compares it with another."""
        parts = []
        for offset, shape in self._parts[key]:
            self._file.seek(offset)
            part = np.frombuffer(self._file.read(4 * int(np.prod(shape))), np.float32).reshape(shape)
            parts.append(part.swapaxes(0, 1).reshape(len(QUANTITIES), -1))
        self._file.seek(0, 2)
        return summarise(np.concatenate(parts, 1).astype(np.float64))


def summarise(quantities: Array) -> dict[str, float]:
    """Means, medians and counts over the values ``[QUANTITIES, n]`` of one direction in one layer, NaN where there is none."""
    finite = np.isfinite(quantities).all(0)
    gate, overlap, read, before, shift, output = quantities
    good, moved = finite & (before > 0), finite & (output > 0)
    change = gate[good] * overlap[good] * read[good]
    perturbation, drift = change / before[good], shift[moved] / output[moved]
    found = {
        "n": int(good.sum()),
        "undefined": int((finite & ~good).sum()),
        "nonfinite": int((~finite).sum()),
        "mean": _mean(perturbation),
        "median": _median(perturbation),
        "sum_ratio": float(change.sum() / before[good].sum()) if good.any() else np.nan,
        "drift_n": int(moved.sum()),
        "drift_mean": _mean(drift),
        "drift_median": _median(drift),
    }
    factors = {"gate": gate, "overlap": overlap, "read": read, "before": before}
    return found | {name: _mean(x[good]) for name, x in factors.items()}


def _mean(x: Array) -> float:
    return float(x.mean()) if x.size else np.nan


def _median(x: Array) -> float:
    return float(np.median(x)) if x.size else np.nan
