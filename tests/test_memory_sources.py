"""What reads are made of: against the memory walked through by the token, and what a run says of it."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray

import qed_probe as qp
from qed_probe import figures
from qed_probe.analyses.source_strip import farthest_head, source_strip
from qed_probe.errors import CheckFailed, InputError
from qed_probe.kernels import MIXERS, Tokens
from qed_probe.memory import inspect_memory, inspect_memory_store
from qed_probe.memory.run import _Run
from qed_probe.memory.sources import BLOCK, Probe, Sources, take_apart
from qed_probe.memory.subject import bin_of, lag_bins, subject_of
from qed_probe.replays.inputs import LayerInputs
from tests.drawn import texts
from tests.recurrences import make_tokens
from tests.replayed import ENDS, layer_of, make_layer

ROUNDING = 1e-5
"""Of the largest read: float32 sums of some dozens of numbers, in another order."""


def walk(layer: LayerInputs, prompt: int, head: int, token: int, probe: Probe) -> NDArray[np.float64]:
    """⟨c_j, r⟩ of every token: the memory with what one token writes alone, decayed and erased by all later ones."""
    e, begin = layer.edits, layer.ends[prompt]
    g, k, a, u = (x[0, begin:, head].double().numpy() for x in (e.g.expand_as(e.q), e.k, e.a, e.u))
    vectors = e.q if probe == "query" else e.d
    assert vectors is not None
    vector = vectors[0, begin + token, head].double().numpy()
    seen = k.shape[1] if probe == "query" else e.main
    reads = []
    for source in range(token + 1):
        memory = np.zeros((k.shape[-1], u.shape[-1]))
        for t in range(token + 1):
            memory = np.exp(g[t])[:, None] * memory
            for m in range(seen if t == token else k.shape[1]):
                written = u[t, m] if t == source else 0
                memory = memory + np.outer(k[t, m], written - memory.T @ a[t, m])
        reads.append(memory.T @ vector)
    parts: NDArray[np.float64] = np.array(reads) @ np.sum(reads, 0)
    return parts


@pytest.mark.parametrize("probe", ["query", "direction"])
@pytest.mark.parametrize("mixer", ["qed", "gdn2", "gdn", "eda", "eda-reversed", "eda-qed", "deltaproduct"])
def test_parts_are_what_each_token_alone_leaves(mixer: str, probe: Probe) -> None:
    layer = make_layer(mixer)
    for prompt, token in ((0, 0), (1, 13), (2, 7)):
        reads = take_apart(layer, prompt, torch.tensor([token]), probe)
        size = float(reads.read.square().sum(-1).max()) or 1.0
        for head in range(2):
            expected = walk(layer, prompt, head, token, probe)
            np.testing.assert_allclose(reads.parts[0, head].numpy(), expected, rtol=0, atol=ROUNDING * size)
        assert reads.parts[0].sum(-1).tolist() == pytest.approx(reads.read[0].square().sum(-1).tolist(), abs=ROUNDING * size)


def test_what_an_initial_state_still_gives() -> None:
    layer = make_layer("qed", ends=(0, 6))
    state = torch.randn(1, 2, 8, 6, generator=torch.Generator().manual_seed(0))
    before, now = (take_apart(x, 0, torch.tensor([5])) for x in (layer, replace(layer, initial_state=state)))
    torch.testing.assert_close(now.weights, before.weights)
    held = now.read - before.read
    assert held.abs().max() > 0.01
    torch.testing.assert_close(now.initial, (held * now.read).sum(-1))


def test_one_association_and_orthogonal_keys() -> None:
    """Keys that share nothing, no decay, β = 1: a query at one of them reads that value alone."""
    eye = torch.eye(4).view(1, 4, 1, 4)
    v = torch.arange(1.0, 13).view(1, 4, 1, 3)
    tokens = Tokens(q=eye[:, [2, 2, 2, 1]], k=eye, v=v, beta=torch.ones(1, 4, 1))
    reads = take_apart(layer_of("deltanet", tokens), 0, torch.arange(4))
    assert reads.weights[:, 0, :, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]]
    assert reads.read[3, 0].tolist() == [4, 5, 6]


def test_lags_lie_in_their_bins() -> None:
    bins = lag_bins(9)
    assert bins.tolist() == [0, 1, 2, 4, 8]
    assert bin_of(torch.arange(10)).tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4]
    assert lag_bins(0).tolist() == [0]


def table_of(mixer: str = "qed") -> tuple[LayerInputs, xr.Dataset]:
    layer = make_layer(mixer)
    roles = [np.array(["needle"] * 2 + ["noise"] * 3), None, np.array(["noise"] * 6 + ["answer"] * 5)]
    lengths = np.diff(ENDS).tolist()
    subject = subject_of(MIXERS[mixer], (0,), 2, zip(lengths, roles, strict=True))
    assert subject.chosen == (4, 13, 5)
    part = Sources(subject)
    part.add(layer)
    return layer, part.table()


def test_a_table_pools_reads_by_role_and_lag() -> None:
    layer, ds = table_of()
    assert ds["role"].values.tolist() == ["needle", "noise", "text", "answer"]
    assert (ds["reads"] == 3).all()
    probes: tuple[Probe, ...] = get_args(Probe)
    for i, probe in enumerate(probes):
        parts = [take_apart(layer, n, torch.tensor([t]), probe) for n, t in enumerate((4, 13, 5))]
        energy = sum(x.read.square().sum(-1)[0] for x in parts)
        needle = parts[0].parts[0, :, :2].sum(-1) / energy
        np.testing.assert_allclose(ds["share_role"][i, 0].sel(role="needle"), needle, rtol=1e-5)
        nearest = sum(x.parts[0, :, -1] for x in parts) / energy
        np.testing.assert_allclose(ds["share_lag"][i, 0].sel(lag=0), nearest, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(ds["share_role"][i].sum("role"), 1, rtol=1e-6)
        np.testing.assert_allclose(ds["share_lag"][i].sum("lag"), 1, rtol=1e-6)
        np.testing.assert_allclose(ds["share_map"][i, 0, :, 4].sum("source_block"), 1, rtol=1e-5)
        np.testing.assert_allclose(ds["share_map"][i, 0, :, 4], ds["share_token"][i, 0], rtol=1e-5, atol=1e-7)


def test_what_overflows_later_leaves_the_map_of_earlier_reads_alone() -> None:
    """A product of what a later block writes and of an earlier read is beyond float32; the read has nothing of it."""
    tokens = make_tokens("qed", T=400)
    maps = []
    for size in (1.0, 1e36):
        v = 100 * tokens.v
        v[:, 300] *= size
        layer = layer_of("qed", replace(tokens, v=v), (0, 400))
        part = Sources(subject_of(MIXERS["qed"], (0,), 2, [(400, None)]))
        part.add(layer)
        assert part.map is not None
        maps.append(part.map[:, 0, :, : BLOCK // part.side])
    assert np.isfinite(maps[0][:, :, 1:]).all()
    np.testing.assert_array_equal(maps[1], maps[0])


def test_a_first_token_by_its_direction_reads_nothing() -> None:
    """Its memory is empty: no shares, and counted as no read."""
    layer = make_layer("qed", ends=(0, 1))
    part = Sources(subject_of(MIXERS["qed"], (0,), 2, [(1, None)]))
    part.add(layer)
    ds = part.table()
    assert ds["reads"].sel(probe="direction").values.tolist() == [[0, 0]]
    assert np.isnan(ds["share_role"].sel(probe="direction")).all()
    np.testing.assert_allclose(ds["share_role"].sel(probe="query"), 1, rtol=1e-6)


def test_sources_that_do_not_add_up_stop_the_run() -> None:
    layer = make_layer("qed")
    part = Sources(subject_of(MIXERS["qed"], (0,), 2, [(n, None) for n in np.diff(ENDS).tolist()]))
    with pytest.raises(CheckFailed, match=r"sum over tokens within .*, found .* at layer 0, head \d, prompt 1, token 4$"):
        part.add(replace(layer, output=layer.output + 0.1))
    output = layer.output.clone()
    output[0, ENDS[1] + 13, 1] += 1
    with pytest.raises(CheckFailed, match=r"at layer 0, head 1, prompt 2, token 13$"):
        part.add(replace(layer, output=output))


def test_what_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(InputError, match="probe: expected one of query, direction, found 'key'"):
        take_apart(make_layer("qed"), 0, torch.tensor([0]), "key")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="mixer linear: expected a delta edit"):
        take_apart(make_layer("linear"), 0, torch.tensor([0]), "direction")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "run.zarr"
    qp.trace(None, qp.niah_prompts(400, 3, seed=0), path, save_inputs=True, vectors="none")
    return path


def test_a_trace_says_what_its_model_says(run: Path) -> None:
    live, kept = (
        inspect_memory(None, qp.niah_prompts(400, 3, seed=0), only=["sources"]),
        inspect_memory_store(run, only=["sources"]),
    )
    assert live.sizes == kept.sizes
    assert kept.attrs["prompts"] == 3
    for name, x in live.data_vars.items():
        np.testing.assert_allclose(kept[name], x, rtol=1e-4, atol=1e-5, err_msg=str(name))


def test_the_answer_is_read_from_the_needle(run: Path) -> None:
    """The bundled model retrieves, so some head's read that predicts the answer must come from the needle."""
    ds = inspect_memory_store(run, only=["sources"])
    assert float(ds["share_role"].sel(probe="query", role="needle").max()) > 0.8


def test_prompts_that_are_not_finite_are_left_out_and_counted() -> None:
    layer = make_layer("qed")
    layer.edits.u[0, 7, 1, 0, 2] = torch.nan
    subject = subject_of(MIXERS["qed"], (0,), 2, [(n, None) for n in np.diff(ENDS).tolist()])
    found = _Run(subject, ["sources"], [Sources(subject)])
    found.add(layer)
    ds = found.dataset({})
    assert ds["nonfinite"].values.tolist() == [1]
    assert (ds["reads"].sel(probe="query") == 2).all()
    assert np.isfinite(ds["share_role"].sel(probe="query")).all()


def with_prompts_left_out(spoilt: dict[int, tuple[int, ...]]) -> xr.Dataset:
    """Of two layers, in which these tokens of the pack are not finite."""
    subject = subject_of(MIXERS["qed"], (0, 1), 2, [(n, None) for n in np.diff(ENDS).tolist()], list("abcde"))
    found = _Run(subject, ["sources"], [Sources(subject)])
    for index in (0, 1):
        layer = replace(make_layer("qed", seed=index), index=index)
        layer.edits.u[0, spoilt.get(index, ())] = torch.nan
        found.add(layer)
    return found.dataset({"mixer": "qed", "prompts": 3, "tokens": 30, "tokens_incomplete": 0})


def test_a_first_prompt_that_is_not_finite_is_neither_mapped_nor_called_empty() -> None:
    """Its map is of a layer in which it is finite, whatever the other prompts read there, and says so if there is none."""
    ds = with_prompts_left_out({0: (2,)})
    ds["share_lag"] = ds["share_lag"].where(ds["layer"] == 0, -1)
    assert farthest_head(ds)[0] == 1
    assert np.isfinite(source_strip(ds)["value"]).all()
    none = with_prompts_left_out({0: (2,), 1: (2,)})
    figure = figures.draw_read_map(none, *farthest_head(none))
    assert texts(figure).count("not finite") == 3  # both panels and the note
    assert "the memory was empty" not in texts(figure)
    assert source_strip(none).attrs["nonfinite"] == 5


def test_a_layer_without_a_finite_prompt_is_no_layer_that_reads_nothing() -> None:
    figure = figures.draw_sources(with_prompts_left_out({0: (2, 7, 20)}))
    assert texts(figure).count("no finite prompt") == 4  # heads and probes
    assert "nothing read" not in texts(figure)
    assert "Left out: up to 3 prompts a layer" in texts(figure)


def test_of_a_long_text_a_strip_has_room_for_some() -> None:
    """The end of a text without roles, of which the last token reads."""
    n = 4000
    place = (np.zeros((1, 1, 1, n)), ("probe", "layer", "head", "source"))
    ds = xr.Dataset(
        {"share_token": (place[1], place[0]), "nonfinite": ("layer", [0]), "share_lag": ((*place[1][:3], "lag"), [[[[1.0]]]])},
        {"probe": ["query"], "layer": [0], "head": [0], "lag": [16], "source_text": ("source", np.full(n, "a"))},
        {"subject": "Mixer qed", "prompts": 1, "first_prompt_tokens": n},
    ).assign_coords(source_role=("source", np.full(n, "text")))
    strip = source_strip(ds)
    assert strip.sizes["token"] == 3000
    assert strip["skipped"].values.tolist() == [1000, *[0] * 2999]
    assert strip.attrs["prompt_tokens"] == n
    assert strip.attrs["where"] == "layer 0, head 0, at the last token"
    before = source_strip(ds.assign_attrs(first_prompt_tokens=n + 1))
    assert before.attrs["where"] == "layer 0, head 0, at the token that predicts the answer"
