"""See what every memory of a model does while the model runs as it always does."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from qed_probe.errors import InputError
from qed_probe.kernels import Mixer, Observation, Tokens, run
from qed_probe.models.foreign.call import Call
from qed_probe.models.foreign.families import Layer, find_layers
from qed_probe.models.foreign.intercept import Observer as ForeignObserver
from qed_probe.models.foreign.intercept import intercept
from qed_probe.models.language import LanguageModel
from qed_probe.models.mixer import DeltaMixer, Observer
from qed_probe.models.model import Model


@dataclass(frozen=True)
class Captured:
    """One pass of one layer.

    ``observation.records`` holds by name what the store's variables of that name hold, ``[B, T, H]`` (``read`` ``[B, T, H, V]``).
    ``output`` ``[B, T, H, V]`` is ``scale`` · Sᵀq in the model's dtype, before output norm and gate: what the model's own kernel
    returned. ``initial_state`` ``[B, H, K, V]`` is None where the memory started empty; ``cu_seqlens`` ``[N + 1]``, on the CPU,
    is None where the rows are the sequences. Of a padded batch of another library's model the pads at either end of a row are
    left out, unless the memory passes through them: the rows are packed into one, with ``cu_seqlens``, in which ``states_at``
    counts too. The observation's last states are those after each row's last token; the model's own cache passes through the
    pads after it too.
    """

    layer: int
    mixer: Mixer
    observation: Observation = field(repr=False)
    output: Tensor = field(repr=False)
    scale: float
    initial_state: Tensor | None = field(repr=False)
    cu_seqlens: Tensor | None = field(repr=False)


Sink = Callable[[Captured], None]
TokenSink = Callable[[int, Mixer, Tokens], None]
"""Called with the layer, its mixer and what it feeds its memory."""
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

    def native(layer: int, mixer: DeltaMixer) -> Observer:
        def observe(seen: Observation, output: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
            keep(Captured(layer, mixer.acting, seen, output, mixer.scale, initial_state, cu_seqlens))

        return observe

    def foreign(layer: Layer, call: Call, output: Tensor) -> None:
        kind, state = layer.family.mixer, call.initial_state
        bounds = None if call.cu_seqlens is None else call.cu_seqlens.cpu()
        found = run(kind, call.tokens, record=True, initial_state=state, cu_seqlens=bounds, states_at=states_at)
        keep(Captured(layer.index, kind, found, output, call.scale, state, bounds))

    with _watch(model, layers, native, foreign, states_at):
        yield seen


@contextmanager
def capture_tokens(model: Model | nn.Module, sink: TokenSink, layers: Collection[int] | None = None) -> Iterator[None]:
    """Show what these layers feed their memories, pass by pass, without recording what the memories do; else as ``capture``."""

    def native(layer: int, mixer: DeltaMixer) -> Observer:
        return lambda seen, *_: sink(layer, mixer.acting, seen.tokens)

    with _watch(model, layers, native, lambda layer, call, _: sink(layer.index, layer.family.mixer, call.tokens), None):
        yield


@contextmanager
def _watch(
    model: Model | nn.Module,
    layers: Collection[int] | None,
    native: Callable[[int, DeltaMixer], Observer],
    foreign: ForeignObserver,
    states_at: tuple[int, ...] | None,
) -> Iterator[None]:
    """Let one of two observers, that of the model's kind, see these layers."""
    if not isinstance(model, nn.Module):
        raise InputError(f"capture: expected a model, which is a torch.nn.Module, found {type(model).__name__}")
    # What torch.compile and the like return is a module around the model.
    models = [module for module in model.modules() if isinstance(module, LanguageModel)]
    if len(models) > 1:
        raise InputError(f"capture: expected one model, found {len(models)} in a {type(model).__name__}")
    with ExitStack() as undo:
        if not models:
            undo.enter_context(intercept(_chosen(find_layers(model), layers).values(), foreign))
        for layer, mixer in _chosen(models[0].mixers, layers).items() if models else ():
            watching = native(layer, mixer), states_at
            mixer.observers.append(watching)
            undo.callback(mixer.observers.remove, watching)
        yield


def _chosen(found: dict[int, Found], layers: Collection[int] | None) -> dict[int, Found]:
    unknown = sorted(set(layers or ()) - set(found))
    if unknown:
        raise InputError(f"layers: expected some of {', '.join(map(str, found))}, found {', '.join(map(str, unknown))}")
    return {layer: mixer for layer, mixer in found.items() if layers is None or layer in layers}
