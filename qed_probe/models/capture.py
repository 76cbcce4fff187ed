"""See what every memory of a model does while the model runs as it always does."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import Mixer, Observation
from qed_probe.models.language import LanguageModel
from qed_probe.models.mixer import DeltaMixer, Observer


@dataclass(frozen=True)
class Captured:
    """One pass of one layer.

    ``observation.records`` holds by name what the store's variables of that name hold, ``[B, T, H]`` (``read`` ``[B, T, H, V]``).
    ``output`` ``[B, T, H, V]`` is ``scale`` · Sᵀq in the model's dtype, before output norm and gate; ``initial_state``
    ``[B, H, K, V]`` is None where the memory started empty; ``cu_seqlens`` ``[N + 1]`` is None where the rows are the sequences.
    """

    layer: int
    mixer: Mixer
    observation: Observation = field(repr=False)
    output: Tensor = field(repr=False)
    scale: float
    initial_state: Tensor | None = field(repr=False)
    cu_seqlens: Tensor | None = field(repr=False)


@contextmanager
def capture(
    model: LanguageModel,
    sink: Callable[[Captured], None] | None = None,
    layers: Collection[int] | None = None,
    states_at: tuple[int, ...] = (),
) -> Iterator[list[Captured]]:
    """Record every pass of these layers, all of them if None, while the context lasts; the logits keep their bits.

    ``sink`` is called as each layer's pass ends; without one, the list that this yields fills. ``states_at`` are packed token
    indices whose states are kept. Raises InputError if the model has no such layer.
    """
    unknown = sorted(set(layers or ()) - set(model.mixers))
    if unknown:
        raise InputError(f"layers: expected some of {', '.join(map(str, model.mixers))}, found {', '.join(map(str, unknown))}")
    seen: list[Captured] = []
    watched = {layer: mixer for layer, mixer in model.mixers.items() if layers is None or layer in layers}
    before = {layer: (mixer.observer, mixer.states_at) for layer, mixer in watched.items()}
    try:
        for layer, mixer in watched.items():
            mixer.observer, mixer.states_at = _observer(layer, mixer, sink or seen.append), states_at
        yield seen
    finally:
        for layer, mixer in watched.items():
            mixer.observer, mixer.states_at = before[layer]


def _observer(layer: int, mixer: DeltaMixer, sink: Callable[[Captured], None]) -> Observer:
    def observe(seen: Observation, output: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
        sink(Captured(layer, mixer.kind, seen, output, mixer.scale, initial_state, cu_seqlens))

    return observe
