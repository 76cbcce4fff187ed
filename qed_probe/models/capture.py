"""See what every memory of a model does while the model runs as it always does."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from qed_probe.errors import InputError
from qed_probe.kernels import Mixer, Observation
from qed_probe.models.foreign.call import Call
from qed_probe.models.foreign.families import Layer, find_layers
from qed_probe.models.foreign.intercept import intercept
from qed_probe.models.language import LanguageModel
from qed_probe.models.mixer import DeltaMixer, Observer
from qed_probe.models.model import Model


@dataclass(frozen=True)
class Captured:
    """One pass of one layer.

    ``observation.records`` holds by name what the store's variables of that name hold, ``[B, T, H]`` (``read`` ``[B, T, H, V]``).
    ``output`` ``[B, T, H, V]`` is ``scale`` · Sᵀq in the model's dtype, before output norm and gate: what the model's own kernel
    returned. ``initial_state`` ``[B, H, K, V]`` is None where the memory started empty; ``cu_seqlens`` ``[N + 1]`` is None where
    the rows are the sequences. Of a padded batch of another library's model the pads at either end of a row are left out, unless
    the memory passes through them: the rows are packed into one, with ``cu_seqlens``, in which ``states_at`` counts too. The
    observation's last states are those after each row's last token; the model's own cache passes through the pads after it too.
    """

    layer: int
    mixer: Mixer
    observation: Observation = field(repr=False)
    output: Tensor = field(repr=False)
    scale: float
    initial_state: Tensor | None = field(repr=False)
    cu_seqlens: Tensor | None = field(repr=False)


Sink = Callable[[Captured], None]
Found = TypeVar("Found", DeltaMixer, Layer)


@contextmanager
def capture(
    model: Model | nn.Module,
    sink: Sink | None = None,
    layers: Collection[int] | None = None,
    states_at: tuple[int, ...] = (),
) -> Iterator[list[Captured]]:
    """Record every pass of these layers, all of them if None, while the context lasts; the logits keep their bits.

    The model is one of this package or one with the layers of ``models.foreign.families``. ``sink`` is called as
    each layer's pass ends; without one, the list that this yields fills. ``states_at`` are packed token indices whose states are
    kept. Padded rows come packed, without their pads, their bounds in ``cu_seqlens``. Of contexts one inside the other, the inner
    one sees the layers that both watch. Raises InputError if the model has no such layer, if a layer calls its kernel with a flag
    that is not understood, or, on exit, if a layer's kernel was not seen.
    """
    seen: list[Captured] = []
    keep = sink or seen.append
    if not isinstance(model, nn.Module):
        raise InputError(f"capture: expected a model, which is a torch.nn.Module, found {type(model).__name__}")
    # What torch.compile and the like return is a module around the model.
    native = [module for module in model.modules() if isinstance(module, LanguageModel)]
    if len(native) > 1:
        raise InputError(f"capture: expected one model, found {len(native)} in a {type(model).__name__}")
    with _native(native[0], keep, layers, states_at) if native else _foreign(model, keep, layers, states_at):
        yield seen


@contextmanager
def _native(model: LanguageModel, sink: Sink, layers: Collection[int] | None, states_at: tuple[int, ...]) -> Iterator[None]:
    with ExitStack() as undo:
        for layer, mixer in _chosen(model.mixers, layers).items():
            watching = _observer(layer, mixer, sink), states_at
            mixer.observers.append(watching)
            undo.callback(mixer.observers.remove, watching)
        yield


def _observer(layer: int, mixer: DeltaMixer, sink: Sink) -> Observer:
    def observe(seen: Observation, output: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
        sink(Captured(layer, mixer.acting, seen, output, mixer.scale, initial_state, cu_seqlens))

    return observe


@contextmanager
def _foreign(model: nn.Module, sink: Sink, layers: Collection[int] | None, states_at: tuple[int, ...]) -> Iterator[None]:
    def observe(layer: Layer, call: Call, seen: Observation, output: Tensor) -> None:
        sink(Captured(layer.index, layer.family.mixer, seen, output, call.scale, call.initial_state, call.cu_seqlens))

    with intercept(_chosen(find_layers(model), layers).values(), observe, states_at):
        yield


def _chosen(found: dict[int, Found], layers: Collection[int] | None) -> dict[int, Found]:
    unknown = sorted(set(layers or ()) - set(found))
    if unknown:
        raise InputError(f"layers: expected some of {', '.join(map(str, found))}, found {', '.join(map(str, unknown))}")
    return {layer: mixer for layer, mixer in found.items() if layers is None or layer in layers}
