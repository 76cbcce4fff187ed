"""Claims: what can be said, and what cannot."""

import math
from dataclasses import replace

import pytest
import torch

from qed_probe.eigen.claims import parse_claim, parse_claims
from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, erase
from tests.recurrences import make_tokens


@pytest.mark.parametrize(
    ("text", "quantity", "low", "high", "strict"),
    [
        ("abs<=1", "abs", -math.inf, 1, False),
        ("range=-0.25,1.25", "e", -0.25, 1.25, False),
        ("range = -1, 1", "e", -1, 1, False),
        ("projection-effect<1e-3:max", "projection-effect", -math.inf, 1e-3, True),
        ("norm<=1.01", "norm", -math.inf, 1.01, False),
        ("e>-1", "e", -1, math.inf, True),
        ("e >= 0", "e", 0, math.inf, False),
        ("theory", "theory", -math.inf, math.inf, False),
    ],
)
def test_what_a_claim_says(text: str, quantity: str, low: float, high: float, strict: bool) -> None:
    claim = parse_claim(text)
    assert (claim.quantity, claim.low, claim.high, claim.strict) == (quantity, low, high, strict)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "abs",
        "abs<=",
        "abs<=one",
        "abs<=nan",
        "abs<=inf",
        "speed<1",
        "range=1",
        "range=1,0",
        "range=0,1,2",
        "abs=1",
        "norm<1:mean",
    ],
)
def test_what_is_no_claim(text: str) -> None:
    with pytest.raises(InputError, match=r"^claim: expected theory, range=LOW,HIGH, or one of .*; found"):
        parse_claim(text)


def test_without_any_there_are_defaults_and_none_counts_twice() -> None:
    assert [claim.text for claim in parse_claims([])] == ["abs<=1", "theory"]
    assert [claim.text for claim in parse_claims(["abs<=1", "abs <= 1"])] == ["abs<=1"]


def test_the_norm_of_renormalised_keys_is_one_by_theory_where_the_gate_is_scalar() -> None:
    tokens = replace(make_tokens("eda", dtype=torch.bfloat16), beta=torch.full((1, 40, 2), 2.0))
    records = {name: x[0] for name, x in erase(MIXERS["eda"], tokens).items()}
    used, alone = parse_claim("norm<=1").values(MIXERS["eda"], records)
    assert (used > 1).any()
    assert (alone == 1).all()
    used, alone = parse_claim("norm<=1").values(MIXERS["qed"], records)
    assert used is alone
