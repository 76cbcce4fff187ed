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

    ``edits`` are those of the recurrence, an address edit as ε read at the key γε; ``gate`` ``[1, T, H, K]`` is b, or β for every
    channel; ``lam`` ``[H]`` is λ, ``gamma`` ``[1, T, H]`` γ, where the mixer has them. ``source`` ``[1, T, H, K]`` is the vector
    that d is made of, the query or the fixed z_h, None where it is not known. ``ends`` bound the prompts and ``prompts`` number
    them among all; ``initial_state`` is ``[N, H, K, V]``. ``output`` ``[1, T, H, V]`` is scale · Sᵀq as the model's own kernel
    returned it, to within ``tolerance``.
    """

    index: int
    mixer: Mixer
    edits: Edits
    gate: Tensor
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
        gate=_gate(ready.q, tokens.b, None if tokens.beta is None else tokens.beta[..., -1]),
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
    mixer = MIXERS[ds.attrs["mixer"]]
    dims = ("token", "head", "edit", "key", "value")

    def get(name: str) -> Tensor | None:
        return (
            torch.from_numpy(ds[name].transpose(*(dim for dim in dims if dim in ds[name].dims)).values)[None]
            if name in ds
            else None
        )

    q, g, k, a, u, output = (_there(get(name), name) for name in ("q", "g", "k", "a", "u", "o"))
    M = k.shape[-2]
    address = None if mixer.address is None else M - 1 if mixer.address_last else 0
    main = M - 1 if address is None else 1 - address
    k, a = turn_address(k, a, address)
    gate = _gate(q, get("b"), get("beta"))
    ready = Edits(q=q, g=g, k=k, a=a, u=u, main=main, base=gate * k[..., main, :], d=get("d"), address=address)
    random = mixer.direction is not None and mixer.direction.source == "random"
    state = torch.from_numpy(ds["initial_state"].values) if "initial_state" in ds else None
    return LayerInputs(
        index=int(ds["layer"]),
        mixer=mixer,
        edits=ready,
        gate=gate,
        lam=None if mixer.direction is None else lam,
        gamma=get("gamma"),
        source=None if random else q,
        ends=tuple(ends),
        prompts=tuple(prompts),
        initial_state=state,
        output=output,
        scale=float(ds.attrs["scale"]),
        tolerance=TOLERANCE[getattr(torch, ds.attrs["dtype"])],
    )


def _gate(q: Tensor, b: Tensor | None, beta: Tensor | None) -> Tensor:
    if b is not None:
        return b
    return torch.zeros_like(q) if beta is None else beta[..., None].expand_as(q)


def _there(x: Tensor | None, name: str) -> Tensor:
    if x is None:
        raise InputError(f"expected inputs with {name}, found none")
    return x
