"""Change what an added direction, or an erase address, does in a model while it runs: how strongly, which, and where."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, Direction, Mixer
from qed_probe.models.config import ModelConfig
from qed_probe.models.language import LanguageModel

DIRECTIONS: dict[str, dict[str, Any]] = {
    "full": {"direction": Direction()},
    "nogate": {"direction": Direction(gated=False)},
    "noproj": {"direction": Direction(projected=False)},
    "nogate-noproj": {"direction": Direction(gated=False, projected=False)},
    "rand": {"direction": Direction(source="random")},
}
"""What QED's arms add (arXiv 2608.13668, Table 1), by the ends of their names."""
ADDRESSES: dict[str, dict[str, Any]] = {
    "same": {"address": "key"},
    "rand": {"address": "random"},
    "reversed": {"address_last": True},
}
"""EDA's erase at other addresses, or after the delta edit."""
PHASES = ("all", "prompt", "answer")
MODES = {"full": (True, True), "immediate": (False, True), "lasting": (True, False), "none": (False, False)}
"""Where an added direction acts: on what the memory keeps, and on the output of the token that it is added at."""


@dataclass(frozen=True)
class Intervention:
    """λ, or γ of an erase address, times ``strength``; the direction or address of another arm, "own" for none; where, and when.

    ``at`` are (layer, head), everywhere if there are none; ``phase`` is "all", "prompt" or "answer", the tokens for which it
    holds where both can be told apart. ``mode`` says what an added direction does, S and S⁰ being the memory with λ and without,
    y and y⁰ what is read of them: "full", y; "immediate", y⁰ − λρS̄⁰ᵀd of S⁰, which no step has changed; "lasting", y + λρS̄ᵀd of
    S, without what the token's own step does; "none", y⁰, which is strength 0. Layers see what the changed ones before them
    give, so the effects of the modes on a model do not add up.
    """

    strength: float = 1.0
    direction: str = "own"
    at: tuple[tuple[int, int], ...] = ()
    phase: str = "all"
    mode: str = "full"

    @property
    def changes(self) -> bool:
        """Whether anything is another."""
        return self.strength != 1 or self.direction != "own" or self.mode != "full"

    @property
    def place(self) -> str:
        """``at`` as text: "0:2,1:0", or "all"."""
        return ",".join(f"{layer}:{head}" for layer, head in self.at) or "all"

    def during(self, phase: str) -> "Intervention":
        """What holds in this phase."""
        return self if self.phase in ("all", phase) else Intervention()


UNCHANGED = Intervention()


def intervene(model: LanguageModel, change: Intervention, seed: int = 0) -> None:
    """Let every pass from now on run with this change and no other; ``Intervention()`` undoes any.

    The phase is for the caller to heed. Where a random vector is needed, one is drawn for each head by ``seed``. Raises
    InputError as ``check_change`` does.
    """
    config, own = model.config, MIXERS[model.config.mixer]
    check_change(config, change)
    acting = other_arm(own, change.direction)
    for layer, mixer in model.mixers.items():
        device = mixer.q_proj.weight.device
        heads = [not change.at or (layer, head) in change.at for head in range(config.heads)]
        chosen = torch.tensor(heads, device=device)
        kept, given = (torch.where(chosen, change.strength * acts, 1.0) for acts in MODES[change.mode])
        mixer.strength, mixer.step = kept, None if torch.equal(kept, given) else given
        mixer.acting = acting if any(heads) else own
        mixer.acting_at = None if all(heads) or acting is own else chosen
        generator = torch.Generator().manual_seed(1_000_003 * seed + layer)
        mixer.drawn = F.normalize(torch.randn(config.heads, config.key_dim, generator=generator), dim=-1).to(device)


def check_change(config: ModelConfig, change: Intervention) -> None:
    """Raise InputError for what cannot be changed in such a model.

    That is one with neither a direction nor an address, a strength that is not finite, a direction that does not fit, an unknown
    phase or mode, a mode where no direction is added, a head that is not there, and a place or a phase of nothing that is
    changed.
    """
    own = MIXERS[config.mixer]
    if not change.changes and change != UNCHANGED:
        raise InputError("at, phase: expected a strength, a direction or a mode to go with them, found none")
    if change.mode not in MODES:
        raise InputError(f"mode: expected one of {', '.join(MODES)}, found {change.mode!r}")
    if change.mode != "full" and own.direction is None:
        raise InputError(f"mode: expected full for {own.name}, which adds no direction that could act now or later")
    if change.changes and own.direction is None and own.address is None:
        raise InputError(f"expected a model that adds a direction or erases at an address of its own, found one of {own.name}")
    if not math.isfinite(change.strength):
        raise InputError(f"strength: expected a finite number, found {change.strength}")
    if change.phase not in PHASES:
        raise InputError(f"phase: expected one of {', '.join(PHASES)}, found {change.phase!r}")
    for layer, head in change.at:
        if not (0 <= layer < config.layers and 0 <= head < config.heads):
            expected = f"layer:head of layers 0 to {config.layers - 1} and heads 0 to {config.heads - 1}"
            raise InputError(f"at: expected {expected}, found {layer}:{head}")
    other_arm(own, change.direction)


def other_arm(own: Mixer, direction: str) -> Mixer:
    """The arm of the same family that a mixer becomes with another direction or address; raises InputError."""
    changes = DIRECTIONS if own.address is None and own.direction is not None else ADDRESSES if own.address else {}
    if direction == "own":
        return own
    if direction not in changes:
        raise InputError(f"direction: expected own, {', '.join(changes)} for {own.name}, found {direction!r}")
    wanted = replace(own, **changes[direction])
    found = next((mixer for mixer in MIXERS.values() if replace(mixer, name=own.name) == wanted), None)
    if found is None:
        raise InputError(f"direction: expected one that makes another arm of {own.name}, found {direction!r}")
    return found
