"""Look at the kernels' calls of a model that runs as it always does: its own kernels make its outputs."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.models.foreign.call import Call, not_pads, pack, read_call
from qed_probe.models.foreign.families import Layer

Observer = Callable[[Layer, Call, Tensor], None]
"""Called after a kernel's call with what was read of it and the kernel's own output ``[B, T, H, V]``, which have no pads: where
the layer was given a mask, its rows are packed into one."""


@contextmanager
def intercept(layers: Collection[Layer], observer: Observer) -> Iterator[None]:
    """Show every call of these layers' kernels to the observer while the context lasts, and restore everything on exit.

    Where contexts are nested, a layer's calls go to the inner one. A layer that is run again for its gradient is not shown again.
    Raises InputError on exit if a layer's kernel was never called, or not in every pass.
    """
    watches = [_Watch(layer, observer) for layer in layers]
    with ExitStack() as undo:
        undo.callback(_leave, watches)
        for watch in watches:
            for namespace, name in watch.layer.kernels:
                undo.callback(_release, namespace, name, _stand_in(namespace, name))
            undo.enter_context(watch.layer.module.register_forward_pre_hook(watch.begin, with_kwargs=True))
            # The hook that was registered last comes first, so that passes end in the reverse of their order.
            undo.enter_context(watch.layer.module.register_forward_hook(watch.end, prepend=True, always_call=True))
        yield
    silent = [watch.layer for watch in watches if watch.silent or not watch.reached]
    if silent:
        kernels = " or ".join(name for _, name in silent[0].kernels)
        raise InputError(
            f"capture: expected a call of {kernels} in every pass, found passes without, or no pass at all, in layers "
            f"{', '.join(str(layer.index) for layer in silent)}: was the model run, and not compiled or with a hub's layers?"
        )


class _Watch:
    """One layer that is looked at."""

    def __init__(self, layer: Layer, observer: Observer) -> None:
        self.layer, self.observer = layer, observer
        self.reached, self.silent, self.over = False, False, False

    def __deepcopy__(self, memo: object) -> "_Watch":
        # Hooks are copied with the model that they watch.
        return self

    def begin(self, module: torch.nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
        # Inside a backward pass a layer runs again only because its activations were not kept.
        if not self.over and torch._C._current_graph_task_id() == -1:
            mask = kwargs.get("attention_mask")
            padded = isinstance(mask, Tensor) and mask.ndim == 2 and not mask.all()
            _passes().append(_Pass(self, mask if padded else None))

    def end(self, module: torch.nn.Module, args: object, output: object) -> None:
        if _passes() and _passes()[-1].watch is self:
            done = _passes().pop()
            self.reached |= done.called
            # Without an output, the layer failed before its kernel.
            self.silent |= output is not None and not done.called

    def see(self, call: Call, output: Tensor) -> None:
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            self.observer(self.layer, call, output.detach())


@dataclass
class _Pass:
    watch: _Watch
    mask: Tensor | None
    called: bool = False


class _Recorder:
    """Stands in for a kernel, which it calls, and shows the call to whoever looks at the layer that is running."""

    def __init__(self, kernel: Callable[..., Any], name: str) -> None:
        self.kernel, self.name, self.users = kernel, name, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the kernel's own arguments and results
        if not _passes():
            return self.run(*args, **kwargs)
        # Layers do not contain each other: these are all passes of one layer, one for each context.
        for each in _passes():
            each.called = True
        watch, mask = _passes()[-1].watch, _passes()[-1].mask
        call = read_call(self.name, args, kwargs, watch.layer)
        result = self.run(*args, **kwargs)
        output = call.of_tokens(result[0])
        if mask is None or call.cu_seqlens is not None:
            watch.see(call, output)
            return result
        # With a cache, the mask also covers the tokens before this call.
        keep = not_pads(call, mask[:, -output.shape[1] :].to(output.device, torch.bool))
        if keep.all():
            watch.see(call, output)
        elif keep.any():
            watch.see(pack(call, keep), output[keep][None])
        return result

    def run(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as above
        return _runnable(self.kernel, args, kwargs)(*args, **kwargs)


def _runnable(kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The kernel; on a CPU, of a function of transformers, what it wraps, which needs no other library.

    Where flash-linear-attention is installed, the function calls that one's kernel, which runs on no CPU. What it wraps takes
    packed sequences for one, so these are left to the function, which refuses them.
    """
    cpu = any(isinstance(x, Tensor) and x.device.type == "cpu" for x in (*args, *kwargs.values()))
    # Where it was defined, not what it says: a wrapper by anyone else takes its name and module from what it wraps.
    home = getattr(kernel, "__globals__", {}).get("__name__", "")
    own = home.startswith("transformers.") and kwargs.get("cu_seqlens") is None
    return inspect.unwrap(kernel) if cpu and own else kernel


# One recorder serves all contexts and models at once: a module's functions belong to every model of its class.
_changing = Lock()
_running = local()


def _passes() -> list[_Pass]:
    """The passes of looked-at layers that this thread is in, the innermost last."""
    if not hasattr(_running, "passes"):
        _running.passes = []
    passes: list[_Pass] = _running.passes
    return passes


def _leave(watches: list[_Watch]) -> None:
    for watch in watches:
        watch.over = True  # a copy of the model keeps the hooks
    # An interrupt that is no Exception ends a pass without its hooks.
    _passes()[:] = [each for each in _passes() if each.watch not in watches]


def _stand_in(namespace: dict[str, Any], name: str) -> _Recorder:
    with _changing:
        found = namespace[name]
        recorder = found if isinstance(found, _Recorder) else _Recorder(found, name)
        recorder.users += 1
        namespace[name] = recorder
    return recorder


def _release(namespace: dict[str, Any], name: str, recorder: _Recorder) -> None:
    with _changing:
        recorder.users -= 1
        if not recorder.users and namespace[name] is recorder:
            namespace[name] = recorder.kernel
