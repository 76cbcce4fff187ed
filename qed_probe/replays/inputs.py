"""What a layer fed its memory, as a replay takes it: from a pass that was captured, or from a store's inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xarray as xr
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, Edits, Mixer, edits
from qed_probe.kernels.mixers import canonical, checked
from qed_probe.models.capture import Captured
from qed_probe.models.selfcheck import TOLERANCE
from qed_probe.tracing.inputs import turn_address


@dataclass(frozen=True)
class LayerInputs:
    """One layer's inputs over whole prompts, packed in one row, float32 (float64 if given float64).

    ``edits`` are those of the recurrence, an address edit as ε read at the key γε; ``gate`` ``[1, T, H, K]`` is b, or the main
    edit's β for every channel; ``value`` ``[1, T, H, V]`` is v before any gate, of several delta edits the last one's; ``lam``
    ``[H]`` is λ, ``gamma`` ``[1, T, H]`` γ, where the mixer has them. ``source`` ``[1, T, H, K]`` is the vector that d is made
    of, the query or the fixed z_h, None where it is not known. ``ends`` bound the prompts and ``prompts`` number them among all;
    ``initial_state`` is ``[N, H, K, V]``. ``output`` ``[1, T, H, V]`` is scale · Sᵀq as the model's own kernel returned it, to
    within ``tolerance``.
    """

    index: int
    mixer: Mixer
    edits: Edits
    gate: Tensor | None
    value: Tensor
    lam: Tensor | None
    gamma: Tensor | None
    source: Tensor | None
    ends: tuple[int, ...]
    prompts: tuple[int, ...]
    initial_state: Tensor | None
    output: Tensor
    scale: float
    tolerance: float

    @property
    def key(self) -> Tensor:
        """The main edit's key, ``[1, T, H, K]``."""
        return self.edits.k[..., self.edits.main, :]

    @property
    def address(self) -> Tensor:
        """ε, ``[1, T, H, K]``; raises InputError where there is none."""
        if self.edits.address is None:
            raise InputError(f"mixer {self.mixer.name}: expected one with an erase address, found none")
        return self.edits.a[..., self.edits.address, :]


def captured_inputs(captured: Captured, prompts: Sequence[int] | None = None) -> LayerInputs:
    """The inputs of a pass over packed prompts; ``prompts`` are their numbers, from 0 if None. Raises InputError for rows."""
    if captured.output.shape[0] != 1:
        raise InputError(f"expected prompts packed in one row, found {captured.output.shape[0]} rows")
    tokens = canonical(checked(captured.mixer, captured.observation.tokens))
    ready = edits(captured.mixer, captured.observation.tokens)
    ends = (0, captured.output.shape[1]) if captured.cu_seqlens is None else tuple(captured.cu_seqlens.tolist())
    return LayerInputs(
        index=captured.layer,
        mixer=captured.mixer,
        edits=ready,
        gate=_gate(ready.q, tokens.b, tokens.beta),
        value=tokens.v[..., -1, :],
        lam=tokens.lam,
        gamma=tokens.gamma,
        source=ready.q if tokens.direction is None else tokens.direction.expand_as(ready.q),
        ends=ends,
        prompts=tuple(range(len(ends) - 1) if prompts is None else prompts),
        initial_state=captured.initial_state,
        output=captured.output,
        scale=captured.scale,
        tolerance=TOLERANCE[captured.output.dtype],
    )


def stored_inputs(ds: xr.Dataset, lam: Tensor, ends: Sequence[int], prompts: Sequence[int]) -> LayerInputs:
    """The inputs of one layer's packed prompts from a store.

    ``ds`` is what ``open_inputs`` returns, at one layer and at the tokens (and, where there is ``initial_state``, prompts) that
    ``ends`` bound; ``lam`` ``[H]`` is the layer's λ.
    """
    mixer, ready = MIXERS[ds.attrs["mixer"]], stored_edits(ds)
    random = mixer.direction is not None and mixer.direction.source == "random"
    state = torch.from_numpy(ds["initial_state"].values) if "initial_state" in ds else None
    return LayerInputs(
        index=int(ds["layer"]),
        mixer=mixer,
        edits=ready,
        gate=_gate(ready.q, _stored(ds, "b"), _stored(ds, "beta")),
        value=_there(_stored(ds.isel(edit=-1, missing_dims="ignore"), "v"), "v"),
        lam=None if mixer.direction is None else lam,
        gamma=_stored(ds, "gamma"),
        source=None if random else ready.q,
        ends=tuple(ends),
        prompts=tuple(prompts),
        initial_state=state,
        output=_there(_stored(ds, "o"), "o"),
        scale=float(ds.attrs["scale"]),
        tolerance=TOLERANCE[getattr(torch, ds.attrs["dtype"])],
    )


def stored_edits(ds: xr.Dataset) -> Edits:
    """The edits of one layer's packed tokens from a store, of any mixer; ``ds`` is that of ``stored_inputs``."""
    mixer = MIXERS[ds.attrs["mixer"]]
    q, g, k, a, u = (_there(_stored(ds, name), name) for name in ("q", "g", "k", "a", "u"))
    last = k.shape[-2] - 1
    address = None if mixer.address is None else last if mixer.address_last else 0
    main = 0 if mixer.address_last or mixer.gate == "in-context" else last
    k, a = turn_address(k, a, address)
    base = a[..., main, :] if mixer.direction is None else _there(_stored(ds, "b"), "b") * k[..., main, :]
    return Edits(q=q, g=g, k=k, a=a, u=u, main=main, base=base, d=_stored(ds, "d"), address=address)


def _stored(ds: xr.Dataset, name: str) -> Tensor | None:
    """A variable as a tensor ``[1, token, head, ...]``, None if there is none."""
    if name not in ds:
        return None
    dims = ("token", "head", "edit", "key", "value")
    return torch.from_numpy(ds[name].transpose(*(dim for dim in dims if dim in ds[name].dims)).values)[None]


def _gate(q: Tensor, b: Tensor | None, beta: Tensor | None) -> Tensor | None:
    if b is not None or beta is None:
        return b
    main = beta if beta.ndim == q.ndim - 1 else beta[..., -1]
    return main[..., None].expand_as(q)


def _there(x: Tensor | None, name: str) -> Tensor:
    if x is None:
        raise InputError(f"expected inputs with {name}, found none")
    return x
