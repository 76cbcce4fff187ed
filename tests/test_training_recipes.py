"""The schedule at known points, and the presets against the numbers they are named for."""

from dataclasses import replace
from typing import Any

import pytest

from qed_probe.errors import InputError
from qed_probe.training import RECIPES, wsd


def test_the_schedule_rises_stays_and_falls() -> None:
    rates = [wsd(step, steps=20, warmup=4, decay=0.25) for step in range(20)]
    assert rates == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 13 + [0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(("warmup", "decay"), [(1, 0.0), (100, 1.0), (7, 0.1)])
def test_no_step_is_wasted_and_none_exceeds_the_peak(warmup: int, decay: float) -> None:
    assert all(0 < wsd(step, steps=10, warmup=warmup, decay=decay) <= 1 for step in range(10))


def test_the_340m_recipe_is_the_papers() -> None:
    paper = RECIPES["340m"]
    assert paper.batch * paper.length == 524_288
    assert paper.length == 2048
    assert paper.rate == 3e-4
    assert paper.precision == "bfloat16"
    tokens = paper.steps * 524_288
    assert 15e9 - 524_288 < tokens <= 15e9
    falling = next(step for step in range(paper.steps) if step > paper.warmup and wsd_of(step) < 1)
    assert falling * 524_288 == pytest.approx(13.5e9, rel=1e-4)


def wsd_of(step: int) -> float:
    paper = RECIPES["340m"]
    return wsd(step, steps=paper.steps, warmup=paper.warmup, decay=paper.decay)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps: expected a whole number of at least 1, found 0"),
        ({"batch": 2.0}, "batch: .*found 2.0"),
        ({"rate": float("nan")}, "rate: expected a finite number.*found nan"),
        ({"rate": "fast"}, "rate: .*found 'fast'"),
        ({"weight_decay": -0.1}, "weight_decay: .*found -0.1"),
        ({"micro_batch": 5}, "micro_batch: expected a divisor of the batch, 64, found 5"),
        ({"save_every": 15}, "save_every: expected a multiple of log_every, 10, found 15"),
        ({"decay": 1.5}, "decay: .*found 1.5"),
        ({"clip": 0.0}, "clip: .*found 0.0"),
        ({"length": 1}, "length: .*found 1"),
        ({"task": "poetry"}, "task: expected one of niah, niah-2, niah-3, reassignment, tokens, found 'poetry'"),
        ({"precision": "float16"}, "precision: expected one of float32, bfloat16, found 'float16'"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(RECIPES["tiny"], **changes)
