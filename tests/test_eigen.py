"""What is tallied, against the records themselves; what it comes to; and that parts come to the same."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import ArrayLike

import qed_probe as qp
from qed_probe.eigen.claims import parse_claims
from qed_probe.eigen.counts import Counts, Subject, _keys
from qed_probe.eigen.parts import labelled
from qed_probe.eigen.run import tally_trace
from qed_probe.eigen.sample import Sample, step_sizes
from qed_probe.eigen.table import QUANTILES
from qed_probe.eigen.tally import Tally
from qed_probe.errors import InputError, StoreError
from qed_probe.kernels import MIXERS, edits, run
from qed_probe.models.capture import Captured
from qed_probe.replays.inputs import stored_edits
from qed_probe.store import schema
from qed_probe.tracing.inputs import inputs
from tests.recurrences import make_tokens
from tests.synthetic_store import TEXT, synthetic_store

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


def made(records: Mapping[str, ArrayLike] | None = None, edit: ArrayLike | None = None, **how: Any) -> xr.Dataset:  # noqa: ANN401
    """A trace whose records are given, and where they are not, a mixer's that leaves e at 0.5."""
    plain = dict.fromkeys(("eigenvalue", "eigenvalue_unit", "eigenvalue_projected"), 0.5)
    plain |= dict.fromkeys(("key_norm", "operator_norm", "operator_norm_base"), 1.0)
    ds = synthetic_store(records={**plain, **(records or {})}, **how)
    if edit is not None:
        ds["edit_eigenvalue"] = (("layer", "token", "head", "edit"), np.asarray(edit, np.float32))
    return ds


def judged(ds: xr.Dataset, *claims: str, rate: float = 0.05) -> list[str]:
    return [x.verdict for x in qp.verdicts(qp.compare_eigen({"run": tally_trace(ds, claims=claims)}), rate)]


def identical(one: xr.Dataset, other: xr.Dataset) -> None:
    """Every number the same, to the bit."""
    assert set(one.variables) == set(other.variables)
    for name in one.variables:
        x, y = one[name].values, other[name].values
        assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name


def test_everything_that_is_tallied_is_what_the_records_say() -> None:
    rng = np.random.default_rng(0)
    shape = (2, 444, 3)
    e, unit, projected = rng.normal(0.5, 0.5, (3, *shape)).astype(np.float32)
    e[0, :7, 0], unit[0, 3, 1] = [0, 1, -1, 5, -5, 0.25, -0.0], np.nan
    norm = 1 + rng.lognormal(-4, 2, shape).astype(np.float32)
    records = {"eigenvalue": e, "eigenvalue_unit": unit, "eigenvalue_projected": projected, "operator_norm": norm}
    ds = qp.compare_eigen({"run": tally_trace(made(records))}).isel(run=0)
    values = {"eigenvalue": e, "eigenvalue_unit": unit, "projection_effect": np.abs(e - projected), "norm_excess": norm - 1}
    for name, x in values.items():
        at, finite = ds.sel(quantity=name), np.isfinite(x)
        assert np.array_equal(at["n"], finite.sum(1))
        assert np.array_equal(at["nonfinite"], (~finite).sum(1))
        assert np.array_equal(at["minimum"], np.nanmin(x, 1))
        assert np.array_equal(at["maximum"], np.nanmax(x, 1))
        np.testing.assert_allclose(at["mean"], np.nanmean(x.astype(np.float64), 1), rtol=1e-14)
        np.testing.assert_allclose(at["mean_all"], np.nanmean(x.astype(np.float64)), rtol=1e-14)
        signed = name.startswith("eigenvalue")
        for count, where in (("below_zero", x < 0), ("above_one", x > 1), ("beyond_one", np.abs(x) > 1)):
            assert np.array_equal(at[count], where.sum(1) * signed)
        low, high = ds["low"].values[:, None], ds["high"].values[:, None]
        assert np.array_equal(at["outside"], ((x < low) | (x > high)).sum(1) * signed)
        for margin in ds["margin"].values:
            assert np.array_equal(at["above"].sel(margin=margin), (x > np.float32(margin)).sum(1) * (not signed))
        edges = at["bin_edges"].values
        side = "left" if signed else "right"
        for layer in range(2):
            inside = np.sort(x[layer][finite[layer]]).astype(np.float64)
            ends = np.searchsorted(inside, edges[1:-1], "right" if signed else "left")
            expected = np.diff(np.concatenate([[0], ends, [inside.size]]))
            assert np.array_equal(at["counts"].values[layer], expected), side
            middle = at["quantiles"].sel(layer=layer).values
            assert np.abs(middle - np.quantile(inside, QUANTILES)).max() < max(0.01, 0.1 * inside.max())
    assert ds["first_nonfinite"].values.tolist() == [0, 3, 1]


def test_the_worst_are_the_worst_and_of_equals_the_first() -> None:
    e = np.full((2, 444, 3), 0.5, np.float32)
    e[1, 300, 2], e[0, 10, 0], e[1, 9, 1] = 1.5, -1.25, 1.0
    unit = e.copy()
    unit[1, 300, 2] = 1.125
    ds = qp.compare_eigen({"run": tally_trace(made({"eigenvalue": e, "eigenvalue_unit": unit}))}).sel(run="run", claim="abs<=1")
    found = {
        name: ds[f"worst_{name}"].values for name in ("layer", "prompt", "position", "head", "edit", "value", "unit", "excess")
    }
    rows = [tuple(x[i].item() for x in found.values()) for i in range(20)]
    assert rows[0] == (0, 0, 10, 0, 0, 1.25, 1.25, 0.25)  # what lasts of the excess decides
    assert rows[1] == (1, 1, 300 - 222, 2, 0, 1.5, 1.125, 0.125)
    assert rows[2] == (1, 0, 9, 1, 0, 1.0, 1.0, 0.0)
    assert [row[:4] for row in rows[3:]] == list(
        itertools.islice(((la, 0, t, h) for t in range(5) for la in (0, 1) for h in range(3)), 17)
    )
    assert ds["worst_token_text"].values[0] == TEXT[10]


@pytest.mark.parametrize("sign", [-1, 1])
def test_what_is_no_number_is_none_of_the_worst(sign: int) -> None:
    """Whatever its sign, which differs between a CPU's vectors, what is left over of them, and a GPU."""
    bounds = np.array([0, 40])
    subject = Subject(MIXERS["qed"], 1, 1.0, (0,), np.zeros((1, 1)), bounds, parse_claims(["abs<=1"]))
    excess = torch.full((1, 40, 1, 1), -0.5, dtype=torch.float64)
    excess[0, :30], excess[0, 35] = torch.tensor(torch.nan, dtype=torch.float64).copysign(torch.tensor(sign)), 0.5
    rows = Counts(subject, (0,))._worst(_keys(excess), (excess, excess), torch.arange(40))
    assert rows[0, :11].tolist() == [0.5, *[-0.5] * 9, -torch.inf]
    assert rows[3, :11].tolist() == [35, *range(30, 35), *range(36, 40), 0]


@pytest.mark.parametrize("name", ["key_norm", "eigenvalue_unit", "operator_norm_base"])
def test_no_verdict_rests_on_a_record_that_is_not_finite(name: str) -> None:
    ds = made(prompts=60)
    ds[name] = ds[name].copy(deep=True)
    ds[name].values[1, 7, 2] = np.nan
    with pytest.raises(InputError, match="values that are NaN or infinite, first at layer 1, token 7, head 2"):
        judged(ds)


def test_an_other_edit_whose_renormalised_record_is_not_finite_has_no_verdict_either() -> None:
    ds = made(mixer="eda", edit=np.full((2, 444, 3, 2), 0.5))
    unit = np.full((2, 444, 3, 2), 0.5, np.float32)
    unit[0, 5, 1] = np.nan
    ds["edit_eigenvalue_unit"] = (("layer", "token", "head", "edit"), unit)
    with pytest.raises(InputError, match="first at layer 0, token 5, head 1"):
        judged(ds)


def test_one_violation_in_a_million_fails() -> None:
    e = np.full((2, 760 * 222, 3), 0.5, np.float32)
    e[1, 123_456, 2] = np.nextafter(np.float32(1), np.float32(2))
    ds = made({"eigenvalue": e, "eigenvalue_unit": e}, prompts=760)
    table = qp.compare_eigen({"run": tally_trace(ds)})
    found = qp.verdicts(table)
    assert int(table["n"].sel(quantity="eigenvalue").sum()) > 1_000_000
    assert [(x.claim, x.verdict, x.violations, x.real, x.violating, x.heads) for x in found] == [
        ("abs<=1", "fails", 1, 1, 1, 1),
        ("theory", "fails", 1, 1, 1, 1),
    ]
    e[1, 123_456, 2] = 1
    assert judged(made({"eigenvalue": e, "eigenvalue_unit": e}, prompts=760)) == ["holds", "holds"]


def test_rounding_alone_does_not_fail_and_is_told() -> None:
    e = np.full((2, 60 * 222, 3), 0.5, np.float32)
    e[0, ::2, 1] = -1 - 2.0**-10
    (found,) = qp.verdicts(qp.compare_eigen({"run": tally_trace(made({"eigenvalue": e}, prompts=60), claims=["abs<=1"])}))
    assert (found.verdict, found.violations, found.real, found.rounding) == ("holds", 60 * 111, 0, 2.0**-10)


@pytest.mark.parametrize(("prompts", "verdict"), [(58, "cannot be told"), (59, "holds")])
def test_prompts_not_tokens_are_what_a_verdict_rests_on(prompts: int, verdict: str) -> None:
    assert judged(made(prompts=prompts, text="ab"), "abs<=1") == [verdict]
    assert judged(made(prompts=prompts, text="ab"), "abs<=1", rate=0.5) == ["holds"]


def test_no_verdict_on_what_is_not_finite_nor_on_nothing() -> None:
    e = np.full((2, 444, 3), 0.5, np.float32)
    e[1, 300, 2] = np.nan
    with pytest.raises(InputError, match=r"^run: expected finite records, found 2 values .* first at layer 1, token 300, head 2"):
        judged(made({"eigenvalue": e}))
    with pytest.raises(StoreError, match="expected at least one complete token"):
        judged(made(complete=False))
    with pytest.raises(StoreError, match="without operator_norm_base"):
        judged(made().drop_vars("operator_norm_base"))
    with pytest.raises(InputError, match="rate: expected a chance between 0 and 1, found 1"):
        judged(made(), rate=1.0)
    with pytest.raises(InputError, match="expected at least one run"):
        qp.compare_eigen({})


def test_tokens_that_are_not_complete_are_left_out_and_their_prompt_does_not_count() -> None:
    e = np.full((2, 444, 3), 0.5, np.float32)
    e[:, 400:] = np.nan
    table = qp.compare_eigen({"run": tally_trace(made({"eigenvalue": e}, complete=np.arange(444) < 400))})
    assert (table["tokens"].item(), table["prompts"].item(), table["nonfinite"].sum().item()) == (400, 1, 0)


def test_a_first_edit_violates_where_the_last_does_not() -> None:
    edit = np.full((2, 60 * 222, 3, 2), 0.5, np.float32)
    edit[1, 77, 0, 0] = -1.5
    ds = made(edit=edit, mixer="deltaproduct", prompts=60)
    table = qp.compare_eigen({"run": tally_trace(ds, claims=["abs<=1", "theory", "range=-2,1"])})
    assert [x.verdict for x in qp.verdicts(table)] == ["fails", "holds", "holds"]
    assert table["worst_edit"].sel(claim="abs<=1").values.ravel()[0] == 0
    assert int(table["beyond_one"].sel(quantity="edit 1").sum()) == 1


def test_each_head_is_held_against_the_theory_of_its_own_strength() -> None:
    e = np.full((2, 60 * 222, 3), 0.5, np.float32)
    ds = made(mixer="qed-nogate-noproj", prompts=60)
    lam = ds["lambda"].values
    e[:, 5] = 1 + 0.9 * lam  # beyond 1 + λ of the smallest alone
    found = qp.compare_eigen(
        {"run": tally_trace(made({"eigenvalue": e, "eigenvalue_unit": e}, mixer="qed-nogate-noproj", prompts=60))}
    )
    assert int(found["real_violations"].sel(claim="theory").sum()) == 0
    e[:, 5] = 1 + lam * 1.001
    found = qp.compare_eigen(
        {"run": tally_trace(made({"eigenvalue": e, "eigenvalue_unit": e}, mixer="qed-nogate-noproj", prompts=60))}
    )
    assert int(found["real_violations"].sel(claim="theory").sum()) == 6


def test_the_steps_of_a_sample() -> None:
    tokens = make_tokens("eda-qed", T=6, H=2, K=5, dtype=torch.float64)
    ready = edits(MIXERS["eda-qed"], tokens)
    k, a, base, g = (x[0].flatten(0, 1) for x in (ready.k, ready.a, ready.base, ready.g))
    found = step_sizes(k, a, base, g, main=ready.main)
    for i in range(12):
        for rows, reads in (((0, 2), a[i, 1]), ((1, 3), base[i])):
            eye = torch.eye(5, dtype=torch.float64)
            step = (eye - torch.outer(k[i, 1], reads)) @ (eye - torch.outer(k[i, 0], a[i, 0])) @ torch.diag(g[i].exp())
            torch.testing.assert_close(found[rows[0], i], torch.linalg.svdvals(step)[0] - 1)
            torch.testing.assert_close(found[rows[1], i], torch.linalg.eigvals(step).abs().max())


def test_a_run_that_is_not_finite_is_counted_to_its_end(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qp.LanguageModel(qp.ModelConfig("qed", 16, 2, 2, 8, 4, 16, 256, "bytes"))
    with torch.no_grad():
        model.mixers[0].o_proj.weight.fill_(3e38)  # what the second layer sees overflows
    qp.save_model(model, tmp_path)
    ds = qp.tally_eigen(tmp_path, qp.text_prompts(["an erase"], qp.ByteTokenizer()))
    assert ds["nonfinite"].sel(layer=0).sum() == 0 < ds["nonfinite"].sel(layer=1).sum()
    assert set(ds["sample_layer"].values[np.isnan(ds["step_norm"])]) == {1}
    with pytest.raises(InputError, match=r"^run: expected finite records, found .* first at layer 1, "):
        qp.verdicts(qp.compare_eigen({"run": ds}))


@pytest.mark.parametrize("K", [5, 9, 33])
def test_no_bit_of_a_step_hangs_on_those_that_are_measured_with_it(K: int) -> None:
    rng = torch.Generator().manual_seed(0)
    k, a = (torch.randn(40, 2, K, generator=rng, dtype=torch.float64) / K for _ in range(2))
    base, g = a[:, 0] + k[:, 1], -torch.rand(40, K, generator=rng, dtype=torch.float64)
    whole, order = step_sizes(k, a, base, g, main=0), torch.randperm(40, generator=rng)
    for size in (1, 7):
        for at in torch.split(order, size):
            assert torch.equal(step_sizes(k[at], a[at], base[at], g[at], main=0), whole[:, at])


def test_layers_that_are_counted_apart_and_tokens_in_pieces_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    shape, bounds = (2, 444, 3), np.array([0, 222, 444])
    names = ("eigenvalue", "eigenvalue_unit", "eigenvalue_projected", "operator_norm", "operator_norm_base")
    records = {name: torch.from_numpy(rng.choice([-1.5, 0.25, 1.0, 1.5], shape).astype(np.float32)) for name in names}
    subject = Subject(MIXERS["qed"], 1, 1.0, (4, 7), np.full((2, 3), 0.1), bounds, parse_claims([]))

    def tallied(*pieces: tuple[list[int], slice]) -> xr.Dataset:
        tally = Tally(subject)
        for layers, at in pieces:
            part = {name: x[layers, at] for name, x in records.items()}
            tally.add(tuple(subject.layers[i] for i in layers), torch.arange(444)[at], part)
        return labelled(tally, Sample((4, 7), 444, 3), lambda at: (at, [""] * len(at)), {"mixer": "qed"})

    whole = tallied(([0, 1], slice(None)))
    identical(tallied(([1], slice(300, None)), ([0], slice(None)), ([1], slice(300))), whole)
    monkeypatch.setattr("qed_probe.eigen.tally.AT_ONCE", 100)
    identical(tallied(([0, 1], slice(None))), whole)


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_edits_of_any_mixer_come_back_from_a_store(mixer: str) -> None:
    tokens = make_tokens(mixer, T=6)
    ready, seen = edits(MIXERS[mixer], tokens), run(MIXERS[mixer], tokens, backend="torch")
    kept = inputs(Captured(0, MIXERS[mixer], seen, seen.y, 1.0, None, None))
    rows = {key: schema.variable(key, edit_inputs=tokens.v.ndim == 5) for key in kept}
    columns = {row.name: (row.dims[1:], kept[key][0].numpy()) for key, row in rows.items()}
    found = stored_edits(xr.Dataset(columns, attrs={"mixer": mixer}))
    assert found.main == ready.main
    for name in ("k", "a", "base"):
        assert torch.equal(getattr(found, name), getattr(ready, name)), name


def test_a_tally_says_which_heads_were_changed() -> None:
    assert tally_trace(made().assign_attrs(direction="noproj", at="0:1")).attrs["at"] == "0:1"


@pytest.mark.parametrize("mixer", ["linear", "deltaproduct"])
def test_a_trace_without_channel_gates_comes_to_the_same_as_a_stream(mixer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    qp.save_model(qp.LanguageModel(qp.ModelConfig(mixer, 16, 1, 2, 8, 4, 16, 256, "bytes", gate_max=2.0)), tmp_path / "model")
    few = qp.text_prompts(["an", "erase", "x"], qp.ByteTokenizer())
    qp.trace(tmp_path / "model", few, tmp_path / "run.zarr", save_inputs=True, vectors="none")
    identical(qp.tally_eigen_store(tmp_path / "run.zarr"), qp.tally_eigen(tmp_path / "model", few))


def test_a_claim_that_a_run_was_not_counted_for_has_no_verdict() -> None:
    e = np.full((2, 60 * 222, 3), 0.5, np.float32)
    e[0, 0, 0] = 1.5
    one = tally_trace(made({"eigenvalue": e, "eigenvalue_unit": e}, prompts=60), claims=["abs<=2"])
    other = tally_trace(made(prompts=60), claims=["abs<=1", "theory"])
    table = qp.compare_eigen({"one": one, "other": other})
    found = [(x.run, x.claim, x.verdict) for x in qp.verdicts(table)]
    assert found == [("one", "abs<=2", "holds"), ("other", "abs<=1", "holds"), ("other", "theory", "holds")]
    assert table["judged"].values.tolist() == [[True, False, False], [False, True, True]]


def test_what_a_projection_leaves_is_rounding_and_what_it_would_remove_is_not() -> None:
    size = np.full((2, 60 * 222, 3), 1.0, np.float32)
    size[0, 7] = 1.25
    effect = np.where(size > 1, 1e-3, 0).astype(np.float32)  # with the key renormalised it is 8e-4 without a projection
    records = {"eigenvalue": 0.5 + effect, "key_norm": size}
    for mixer, bound, real in (("qed", "5e-4", 0), ("qed-nogate-noproj", "9e-4", 0), ("qed-nogate-noproj", "7e-4", 3)):
        ds = made(records, mixer=mixer, prompts=60)
        (found,) = qp.verdicts(qp.compare_eigen({"run": tally_trace(ds, claims=[f"projection-effect<{bound}"])}))
        assert (found.verdict, found.violations, found.real) == ("fails" if real else "holds", 3, real)


@pytest.fixture(scope="module")
def prompts() -> Any:  # noqa: ANN401
    return qp.niah_prompts(400, 64, 0)


@pytest.fixture(scope="module")
def whole(prompts: Any) -> xr.Dataset:  # noqa: ANN401
    return qp.tally_eigen(None, prompts)


def test_the_bundled_model_holds(whole: xr.Dataset) -> None:
    table = qp.compare_eigen({"qed-tiny": whole})
    assert [x.verdict for x in qp.verdicts(table)] == ["holds", "holds"]
    assert float(table["maximum"].sel(quantity="projection_effect").max()) < 1e-6
    assert np.isfinite(table["step_norm"].values).all()
    assert float(table["step_radius_base"].max()) < 1 + 1e-6


def test_a_trace_comes_to_the_same_as_a_stream(whole: xr.Dataset, prompts: Any, tmp_path: Path) -> None:  # noqa: ANN401
    qp.trace(None, prompts, tmp_path / "run.zarr", save_inputs=True, vectors="none")
    identical(qp.tally_eigen_store(tmp_path / "run.zarr"), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", [None, "eda-tiny"])
def test_a_trace_comes_to_the_same_as_a_stream_on_a_gpu(model: str | None, prompts: Any, tmp_path: Path) -> None:  # noqa: ANN401
    how: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
    qp.trace(model, prompts, tmp_path / "run.zarr", vectors="none", save_inputs=True, **how)
    identical(qp.tally_eigen_store(tmp_path / "run.zarr"), qp.tally_eigen(model, prompts, **how))


def test_parts_come_to_the_same_as_the_whole(whole: xr.Dataset, prompts: Any, tmp_path: Path) -> None:  # noqa: ANN401
    parts = [qp.tally_eigen(None, prompts, part=(i, 5)) for i in range(1, 6)]  # three packs: two parts have none
    for i, part in enumerate(parts):
        qp.save_eigen(part, tmp_path / f"{i}.zarr")
    kept = [qp.open_eigen(tmp_path / f"{i}.zarr") for i in range(5)]
    for order in (kept, kept[::-1], [kept[2], qp.merge_eigen([kept[4], kept[0]]), kept[1], kept[3]]):
        identical(qp.merge_eigen(order), whole)
    with pytest.raises(InputError, match="found prompt 1 in two of them"):
        qp.merge_eigen([kept[0], kept[0]])
    other = qp.tally_eigen(None, prompts, part=(2, 5), claims=["abs<=2"])
    with pytest.raises(InputError, match="found the claims abs<=1, theory and abs<=2"):
        qp.merge_eigen([kept[0], other])
    with pytest.raises(InputError, match="found at None and 0:1"):
        qp.merge_eigen([kept[0], kept[1].assign_attrs(at="0:1")])
    with pytest.raises(InputError, match="found prompts_digest"):
        qp.merge_eigen([kept[0], qp.tally_eigen(None, prompts[:3])])


def test_a_trained_model_without_gate_and_projection(prompts: Any) -> None:  # noqa: ANN401
    tally = qp.tally_eigen(
        CHECKPOINTS / "qed-nogate-noproj-seed0", prompts, claims=["abs<=1", "theory", "projection-effect<1e-3"]
    )
    table = qp.compare_eigen({"noproj": tally})
    e = table.sel(quantity="eigenvalue")
    within = bool((np.maximum(abs(e["minimum"]), abs(e["maximum"])) <= 1).all())
    assert [x.verdict for x in qp.verdicts(table)] == ["holds" if within else "fails", "holds", "fails"]
    assert (table["steps"].item(), table["seed"].item()) == (2000, 0)


def test_negative_eigenvalues_of_rounded_keys_are_rounding(tmp_path: Path, prompts: Any) -> None:  # noqa: ANN401
    config = qp.ModelConfig("gdn", 32, 1, 2, 24, 16, 32, 256, "bytes", gate_max=2.0)
    torch.manual_seed(0)
    model = qp.LanguageModel(config)
    with torch.no_grad():
        model.mixers[0].beta_proj.weight.mul_(1e4)  # all gates shut or at 2
    qp.save_model(model, tmp_path)
    tally = qp.tally_eigen(tmp_path, prompts, dtype="bfloat16", claims=["abs<=1", "theory", "norm<=1"])
    found = qp.verdicts(qp.compare_eigen({"negative": tally}))
    assert [(x.verdict, x.real) for x in found] == [("holds", 0)] * 3
    assert all(x.violations > 1000 and 1e-4 < x.rounding < 2e-2 for x in found)


def test_runs_of_different_shapes_stand_side_by_side(whole: xr.Dataset, prompts: Any) -> None:  # noqa: ANN401
    eda = qp.tally_eigen("eda-tiny", prompts[:2])
    table = qp.compare_eigen({"qed": whole, "eda": eda})
    assert table["run"].values.tolist() == ["qed", "eda"]
    assert table["quantity"].values.tolist()[:2] == ["eigenvalue", "eigenvalue_unit"]
    assert int(table["n"].sel(run="qed", quantity="address edit").sum()) == 0
    assert np.isnan(table["minimum"].sel(run="qed", quantity="address edit")).all()
    identical(
        table.sel(run=["eda"], quantity=list(eda["quantity"].values))[["n", "counts", "minimum"]],
        qp.compare_eigen({"eda": eda})[["n", "counts", "minimum"]],
    )
    assert [x.verdict for x in qp.verdicts(table)] == ["holds", "holds", "cannot be told", "cannot be told"]
