"""What is claimed of the erase factors, declared before anything is run, and the numbers that it is judged by."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import Mixer

DEFAULTS = ("abs<=1", "theory")
QUANTITIES = ("e", "abs", "projection-effect", "norm")
FORMS = f"theory, range=LOW,HIGH, or one of {', '.join(QUANTITIES)} with <=, <, >= or > and a number"
_BOUND = re.compile(rf"({'|'.join(QUANTITIES)})(<=|<|>=|>)([^:]+)(?::max)?")


@dataclass(frozen=True)
class Claim:
    """A claim that of every token and head a quantity lies from ``low`` to ``high``; where ``strict``, at neither of the two.

    The quantities: ``e``, that of every edit; ``abs``, |e| of every edit; ``projection-effect``, |e − e_projected|; ``norm``,
    ‖M‖₂ of the main edit; ``theory``, e of the main edit, whose ends are theory's for the mixer, its gates and each head's λ.
    """

    text: str
    quantity: str
    low: float
    high: float
    strict: bool

    def values(self, mixer: Mixer, records: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The quantity as it was used and with the key renormalised, ``[…, T, H, edits]``, one edit where it is the main one's.

        A projected direction is orthogonal to a unit key, and an unprojected one loses ‖k‖ once, as every mixer that adds one
        normalises its keys. ‖M‖₂ of a renormalised key is known where theory gives it, max(1, |e|) for a scalar gate and no
        added direction; that of another mixer is judged as it was used alone.
        """
        main = [records[name][..., None] for name in ("eigenvalue", "eigenvalue_unit")]
        every = [records.get(f"edit_{name}", x) for name, x in zip(("eigenvalue", "eigenvalue_unit"), main, strict=True)]
        if self.quantity == "theory":
            return main[0], main[1]
        if self.quantity == "e":
            return every[0], every[1]
        if self.quantity == "abs":
            return every[0].abs(), every[1].abs()
        if self.quantity == "norm":
            norm = records["operator_norm"][..., None]
            plain = mixer.gate == "scalar" and mixer.direction is None
            return norm, main[1].abs().clamp(min=1) if plain else norm
        effect = (main[0] - records["eigenvalue_projected"][..., None]).abs()
        if mixer.direction is None or mixer.direction.projected:
            return effect, torch.zeros_like(effect)
        size = records["key_norm"][..., None]
        return effect, effect / size.where(size > 0, 1)


def parse_claim(text: str) -> Claim:
    """The claim that a text makes; raises InputError for one that makes none."""
    words = "".join(text.split())
    bounds, found = words.removeprefix("range="), _BOUND.fullmatch(words)
    if words == "theory":
        return Claim(words, "theory", -math.inf, math.inf, strict=False)
    if bounds != words:
        ends = [_number(end, text) for end in bounds.split(",")]
        if len(ends) != 2 or not ends[0] <= ends[1]:
            raise _refused(text)
        return Claim(words, "e", ends[0], ends[1], strict=False)
    if found is None:
        raise _refused(text)
    quantity, relation, end = found[1], found[2], _number(found[3], text)
    low, high = (-math.inf, end) if relation[0] == "<" else (end, math.inf)
    return Claim(words, quantity, low, high, strict="=" not in relation)


def parse_claims(texts: Sequence[str]) -> tuple[Claim, ...]:
    """Each claim once, the defaults where there is none."""
    claims = tuple(parse_claim(text) for text in texts or DEFAULTS)
    return tuple({claim.text: claim for claim in claims}.values())


def _number(text: str, claim: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _refused(claim) from None
    if not math.isfinite(value):
        raise _refused(claim)
    return value


def _refused(text: str) -> InputError:
    return InputError(f"claim: expected {FORMS}; found {text!r}")
