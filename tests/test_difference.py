"""Two runs held against each other: hand-made differences are found where they were put, in numbers, in the figure, on screen."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import qed_probe as qp
from qed_probe.analyses import difference
from qed_probe.cli import main
from qed_probe.errors import InputError, StoreError
from qed_probe.figures import draw_difference
from tests.synthetic_store import TEXT, synthetic_store


def stores() -> tuple[xr.Dataset, xr.Dataset]:
    ds = synthetic_store(3, 2, 2)
    tokens = np.arange(ds.sizes["token"], dtype=np.int32) % 256
    both = [ds.assign_coords(token_id=("token", tokens)).copy(deep=True) for _ in range(2)]
    return both[0], both[1]


def test_runs_that_are_the_same_do_not_part() -> None:
    first, second = stores()
    first["rho"][1, 3, 0] = second["rho"][1, 3, 0] = np.nan
    found = difference(first, second)
    assert (found["largest"] == 0).all()
    assert (found["beyond"] == 0).all()
    assert (found["first_at"] == -1).all()
    assert (found["largest_at"] == -1).all()
    assert int(found["compared"]) == first.sizes["token"] * first.sizes["head"]


def test_differences_are_found_where_they_are() -> None:
    first, second = stores()
    length = len(TEXT)
    first["rho"][:] = second["rho"][:] = 0.5
    first["rho"][1, 0, 0] = second["rho"][1, 0, 0] = -2
    second["rho"][1, 9, 1] += 0.01
    second["rho"][1, length + 4, 0] -= 0.4
    second["rho"][2, 7, 0] += 1e-5
    found = difference(first, second).sel(record="rho")
    np.testing.assert_allclose(found["scale"], [0.5, 2, 0.5])
    np.testing.assert_allclose(found["largest"], [0, 0.2, 2e-5], rtol=1e-2)
    assert found["beyond"].values.tolist() == [0, 2, 0]
    assert found["first_at"].values.tolist() == [[-1, -1], [9, 1], [-1, -1]]
    assert found["largest_at"].values.tolist() == [[-1, -1], [length + 4, 0], [7, 0]]
    at = np.searchsorted(found["bin_start"].values, 4, side="right") - 1
    assert found["by_position"].values[1, at] == pytest.approx(0.2)


def test_what_is_finite_in_one_run_alone_differs_infinitely() -> None:
    first, second = stores()
    second["read_norm"][0, 5, 1] = np.nan
    first["read_norm"][2, 6, 0] = np.inf
    found = difference(first, second).sel(record="read_norm")
    assert np.isinf(found["largest"].values).tolist() == [True, False, True]
    assert np.isfinite(found["scale"]).all()


def test_only_what_both_have_is_compared() -> None:
    first, second = stores()
    complete = np.arange(first.sizes["token"]) < 20
    second = second.isel(layer=[2, 0]).drop_vars("rho").assign_coords(complete=("token", complete))
    second["eigenvalue"][:, 30:] = np.nan
    found = difference(first, second)
    assert found["layer"].values.tolist() == [0, 2]
    assert "rho" not in found["record"]
    assert int(found["beyond"].sum()) == 0
    assert found.attrs["tokens"] == 20
    with pytest.raises(StoreError, match="complete in both runs, found none"):
        difference(first, second.assign_coords(complete=("token", ~complete & complete)))


def test_no_tolerance_asks_for_the_same_bits_and_cosines_stay_out_of_the_positions() -> None:
    first, second = (ds.drop_vars("correction_cosine", errors="ignore").rename(eigenvalue="correction_cosine") for ds in stores())
    assert int(difference(first, first, 0)["beyond"].sum()) == 0
    second["correction_cosine"][0, 3, 0] += 1e-3
    found = difference(first, second, 0)
    assert found["beyond"].sel(record="correction_cosine").values.tolist()[0] >= 1
    assert not found["by_position"].values[0].any()


def test_runs_that_cannot_be_compared_are_refused() -> None:
    first, second = stores()
    with pytest.raises(InputError, match="tolerance: expected a number from 0, found -1"):
        difference(first, second, -1)
    with pytest.raises(StoreError, match="same tokens, found token_id of"):
        difference(first, second.isel(token=slice(0, 9)))
    second["token_id"][5] = -1  # not generated yet
    difference(first, second)
    second["token_id"][7] = 999
    with pytest.raises(StoreError, match="token_id to differ first at 7"):
        difference(first, second)
    first, second = stores()
    with pytest.raises(StoreError, match="a record and a layer in common, found none"):
        difference(first, second.assign_coords(layer=[7, 8, 9]))


def test_the_figure_says_how_many_values_part() -> None:
    first, second = stores()
    second["rho"][1, 9, 1] += 0.5
    found = difference(first, second)
    figure = draw_difference(found)
    values = int(found["compared"]) * found["largest"].size
    assert any(f"1 of {values:,} values are beyond 0.001." in text.get_text() for text in figure.texts)


def test_the_command_says_where_runs_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["qed-probe", "diff", *words])
        return main()

    prompts = [qp.Prompt(np.frombuffer(b"the grass is green " * 5, np.uint8).astype(np.int64))]
    for name, strength in (("a", 1.0), ("b", 1.0), ("c", 0.5)):
        qp.trace(None, prompts, tmp_path / f"{name}.zarr", strength=strength)
    a, b, c, figures = (str(tmp_path / name) for name in ("a.zarr", "b.zarr", "c.zarr", "figures"))
    assert run(a, b, "-o", figures) == 0
    assert "The runs agree to 0.001." in capsys.readouterr().out
    assert run(a, c, "-o", figures, "--tolerance", "0.01") == 1
    said = capsys.readouterr().out
    assert "values are beyond 0.01." in said
    (line,) = [line.split() for line in said.splitlines() if line.strip().startswith("correction_norm")]
    found = difference(qp.open(a), qp.open(c), 0.01).sel(record="correction_norm")
    assert line[1:5] == ["0", "0", *(str(int(x)) for x in found["first_at"].values[0])]
    assert line[-1] == f"{int(found['beyond'].sum()):,}"
    assert {path.name for path in Path(figures).iterdir()} == {"difference.png", "difference.svg"}
    assert run(a, str(tmp_path / "none.zarr"), "-o", figures) == 2
    assert capsys.readouterr().err.count("\n") == 1
