"""What docs/eigenvalue-claim.md says is algebra."""

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

PAGE = (Path(__file__).parents[1] / "docs" / "eigenvalue-claim.md").read_text(encoding="utf-8")


def _step(k: NDArray[np.float64], a: NDArray[np.float64], decay: NDArray[np.float64]) -> NDArray[np.float64]:
    return (np.eye(len(k)) - np.outer(k, a)) * decay


def _radius(step: NDArray[np.float64]) -> float:
    return float(np.abs(np.linalg.eigvals(step)).max())


def test_a_projected_direction_can_make_a_step_that_grows_when_repeated() -> None:
    k, b, q = np.array([0.6, 0.8]), np.array([0.05, 1]), np.array([0.0, 1])
    d = b * q - k * (k @ (b * q))
    a = b * k + 0.25 * d
    np.testing.assert_allclose(d, [-0.48, 0.36])
    np.testing.assert_allclose(a, [-0.09, 0.89])
    decay = np.array([1.0, 0])
    found = 1 - a @ k, 1 - (b * k) @ k, _radius(_step(k, a, decay)), _radius(_step(k, b * k, decay))
    np.testing.assert_allclose(found, [0.342, 0.342, 1.054, 0.982])


@pytest.mark.parametrize("gate_max", [1, 2])
def test_without_an_added_direction_no_step_grows_when_repeated(gate_max: float) -> None:
    rng = np.random.default_rng(0)
    norms = []
    for _ in range(500):
        k = rng.normal(size=4)
        k /= np.linalg.norm(k)
        b = rng.uniform(0, gate_max, 4)
        assert _radius(_step(k, b * k, rng.uniform(0, 1, 4))) < 1 + 1e-7
        norms.append(np.linalg.norm(_step(k, b * k, np.ones(4)), 2))
    assert min(norms) > 1


def test_the_table_of_prompts_follows_from_its_formula() -> None:
    counts, shares = (
        [float(x) for x in re.findall(r"[\d.]+", row)]
        for row in re.findall(r"^\| (?:prompts without|at most this share).*?\|(.*)\|$", PAGE, re.MULTILINE)
    )
    found = [100 * (1 - 0.05 ** (1 / n)) for n in counts]
    np.testing.assert_allclose(found, shares, rtol=0.02)
    assert 1 - 0.05 ** (1 / 59) < 0.05 < 1 - 0.05 ** (1 / 58)
