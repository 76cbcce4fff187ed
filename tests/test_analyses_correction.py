"""The correction's share against vectors, and against the worked example of the paper's algebra."""

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from qed_probe import analyses
from qed_probe.analyses.correction import fine_counts, median
from tests.synthetic_store import synthetic_store


def _angle_sine(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    unit_x, unit_y = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
    across = unit_x - unit_y * (unit_x * unit_y).sum(-1, keepdims=True)
    return np.asarray(np.linalg.norm(across, axis=-1))


def _records(
    read: NDArray[np.float64], without: NDArray[np.float64], rho: NDArray[np.float64], lam: float
) -> dict[str, ArrayLike]:
    """What a store holds of the read S̄ᵀd ``[T, V]`` and the output without the correction, by DESIGN's definitions."""
    correction = -rho[:, None] * read
    y = without + lam * correction
    size = np.linalg.norm
    cosine = (correction * without).sum(-1) / (size(correction, axis=-1) * size(without, axis=-1))
    found = {
        "rho": rho,
        "read_norm": size(read, axis=-1),
        "output_norm": size(y, axis=-1),
        "correction_norm": size(lam * correction, axis=-1),
        "correction_cosine": cosine,
    }
    return {name: x[None, :, None] for name, x in found.items()}


@pytest.mark.parametrize("lam", [0.25, -0.7])
def test_across_is_the_sine_of_the_angle_between_output_with_and_without(lam: float) -> None:
    rng = np.random.default_rng(3)
    read, without, rho = rng.normal(size=(7, 5)), rng.normal(size=(7, 5)), rng.uniform(-1, 1, 7)
    ds = synthetic_store(1, 1, 1, "abcdefg", strength=lam / 0.25, records=_records(read, without, rho, lam))
    found = analyses.correction_share(ds)
    correction = -lam * rho[:, None] * read
    sines = _angle_sine(without + correction, without)
    sizes = np.linalg.norm(correction, axis=-1) / np.linalg.norm(without + correction, axis=-1)
    assert found["across_mean"].item() == pytest.approx(sines.mean(), rel=1e-5)
    assert found["share_mean"].item() == pytest.approx(sizes.mean(), rel=1e-5)
    assert found["across_median"].item() == pytest.approx(np.median(sines), rel=4e-3)
    assert found["share_median"].item() == pytest.approx(np.median(sizes), rel=4e-3)
    assert found.attrs["per_unit_lambda"] == 0


def test_without_strength_both_are_rates_per_unit_of_it() -> None:
    rng = np.random.default_rng(4)
    read, y, rho = rng.normal(size=(7, 5)), rng.normal(size=(7, 5)), rng.uniform(-1, 1, 7)
    ds = synthetic_store(1, 1, 1, "abcdefg", strength=0, mixer="gdn2", records=_records(read, y, rho, 0))
    found = analyses.correction_share(ds)
    step = 1e-6
    rates = _angle_sine(y - step * rho[:, None] * read, y) / step
    assert found["across_mean"].item() == pytest.approx(rates.mean(), rel=1e-4)
    assert found.attrs["per_unit_lambda"] == 1


def test_the_worked_example_changes_the_output_only_in_size() -> None:
    # S̄ = (2, 3)ᵀ, q = (.6, .8), k = (1, 0), b = (.5, .5), λ = .2: y = 3.456 where GDN-2 has 3.6.
    records: dict[str, ArrayLike] = {
        "rho": 0.6,
        "read_norm": 1.2,
        "output_norm": 3.456,
        "correction_norm": 0.144,
        "correction_cosine": -1,
    }
    found = analyses.correction_share(synthetic_store(1, 1, 1, "a", records=records))
    assert found["share_mean"].item() == pytest.approx(0.144 / 3.456, rel=1e-6)
    assert found["across_mean"].item() == 0


def test_silent_outputs_and_bad_values_are_counted_apart() -> None:
    output = np.array([0, 2, np.nan, 4], np.float32)[None, :, None]
    records: dict[str, ArrayLike] = {"output_norm": output, "correction_norm": 1, "correction_cosine": 0}
    found = analyses.correction_share(synthetic_store(1, 1, 1, "abcd", records=records))
    assert (found["zero_output"].item(), found["n"].item()) == (1, 2)
    assert found["share_mean"].item() == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert int(found["nonfinite"].sel(source="output_norm").sum()) == 1
    nothing = analyses.correction_share(synthetic_store(1, 1, 1, "abcd", records={"output_norm": 0}))
    assert np.isnan(nothing["share_mean"].item())
    assert np.isnan(nothing["share_median"].item())


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1, 3e4])
def test_the_median_is_right_to_its_bin(scale: float) -> None:
    x = np.random.default_rng(5).lognormal(0, 0.3, (2, 101, 3)) * scale
    found = median(fine_counts(x, np.ones(x.shape, bool)))
    np.testing.assert_allclose(found, np.median(x, axis=1), rtol=4e-3)


def test_the_median_of_mostly_zeros_is_zero() -> None:
    x = np.array([0, 0, 0, 5, 6.0])[None, :, None]
    assert median(fine_counts(x, np.ones(x.shape, bool))).item() == 0
