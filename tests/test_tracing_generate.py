"""Tokens that a native model goes on with: traced through its cache, they are what one pass over all tokens would record."""

import itertools
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import qed_probe as qp
from qed_probe.models.capture import capture
from qed_probe.models.selfcheck import Past, check_heads, check_layer
from qed_probe.store import schema
from tests.recurrences import error
from tests.test_store_kill import contents
from tests.test_tracing import make_checkpoint
from tests.test_tracing_cli import call

CLOSE = 2e-5
"""Float32 in another order: a call over many tokens against a call a token, layer after layer."""
SMALL = "import sys; from qed_probe.cli import main; from qed_probe.store import schema; schema.MAX_BLOCK = 32; sys.exit(main())"


def whole_prompts(ds: xr.Dataset) -> list[qp.Prompt]:
    """Each prompt and what followed it, as one prompt."""
    ids = ds["token_id"].values.astype(np.int64)
    return [qp.Prompt(ids[begin:end]) for begin, end in itertools.pairwise(ds["cu_seqlens"].values)]


def check_equal(found: xr.Dataset, expected: xr.Dataset) -> None:
    """Labels but for the roles the same, and every variable close."""
    for name in set(expected.coords) - {"role"}:
        np.testing.assert_array_equal(found[name].values, expected[name].values, err_msg=str(name))
    assert set(found.data_vars) == set(expected.data_vars)
    for name, x in expected.data_vars.items():
        np.testing.assert_array_equal(np.isnan(found[name].values), np.isnan(x.values), err_msg=str(name))
        one, other = (torch.from_numpy(np.nan_to_num(values)) for values in (found[name].values, x.values))
        assert error(one, other) <= CLOSE, name


@pytest.mark.parametrize("mixer", ["gdn2", "qed", "eda"])
def test_prefill_and_decoding_are_one_full_pass(mixer: str, tmp_path: Path) -> None:
    where, rng = make_checkpoint(tmp_path / "model", mixer), np.random.default_rng(0)
    prompts = [qp.Prompt(rng.integers(0, 256, n), roles) for n, roles in ((1, None), (60, np.full(60, "noise")), (64, None))]
    paths = tmp_path / "made.zarr", tmp_path / "full.zarr"
    ds = qp.trace(where, prompts, paths[0], generate=9, save_inputs=True, vectors="float32", state_at=[0, 62, 64])
    full = qp.trace(where, whole_prompts(ds), paths[1], save_inputs=True, vectors="float32", state_at=[0, 62, 64])
    for opened in (qp.open, qp.open_inputs, qp.open_states):
        check_equal(*(opened(path).load() for path in paths))
    assert ds["mark_token"].values.tolist() == [9, 73, 78, 142, 151]
    assert ds["role"].values.tolist() == [
        *[""] + ["generated"] * 9,
        *["noise"] * 60 + ["generated"] * 9,
        *[""] * 64 + ["generated"] * 9,
    ]
    assert (ds.attrs["generated"], full.attrs["generated"]) == (9, 0)
    model = qp.load_model(where)
    for prompt, whole in zip(prompts, whole_prompts(ds), strict=True):
        with torch.no_grad():
            likeliest = model.logits(model(torch.from_numpy(whole.tokens)[None]))[0].argmax(-1).numpy()
        given = len(prompt.tokens)
        assert whole.tokens[:given].tolist() == prompt.tokens.tolist()
        assert whole.tokens[given:].tolist() == likeliest[given - 1 : -1].tolist()


def test_after_a_prompt_that_holds_its_answer(tmp_path: Path) -> None:
    ds = qp.trace(None, qp.niah_prompts(512, 1, seed=7), tmp_path / "run.zarr", generate=3, layers=[0])
    assert ds["correct"].values.tolist() == [1]
    assert ds["role"].values[-10:].tolist() == ["answer"] * 7 + ["generated"] * 3


def test_a_memory_that_is_lost_between_calls_is_found(tmp_path: Path) -> None:
    model, ids = qp.load_model(make_checkpoint(tmp_path / "model", "qed")), torch.arange(20)[None]
    cache, past, lost = model.new_cache(1), Past(), Past()
    with torch.no_grad(), capture(model, layers=[1]) as seen:
        for part in (ids[:, :12], ids[:, 12:13]):
            model(part, cache=cache)
        model(ids[:, 12:13])
    first, following, alone = seen
    for captured, token in ((first, 0), (following, 12)):
        check_heads(captured, 0, token, past)
        check_layer(captured, token, past)
    check_layer(first, 0, lost)
    with pytest.raises(qp.CheckFailed, match=r"layer 1, head \d, token 12"):
        check_layer(alone, 12, lost)


def test_a_killed_trace_is_resumed_in_the_middle_of_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "model", "qed")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 256, (3, 30)))
    command = "trace ../model --tokens ../ids.npy --generate 35 --save-inputs --state-at 29,64 --resume"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setattr(schema, "MAX_BLOCK", 32)
    for name in ("still", "stopped"):
        (tmp_path / name).mkdir()
    store = tmp_path / "stopped" / "run.zarr"
    with subprocess.Popen(
        [sys.executable, "-c", SMALL, *command.split()], cwd=store.parent, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and len(list(store.glob("done/c*"))) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qp.IncompleteStoreWarning)
        left = qp.open(store).load()
    assert 0 < int(left["complete"].sum()) < 195
    for name in ("stopped", "still"):
        monkeypatch.chdir(tmp_path / name)
        assert call(monkeypatch, command) == 0
    assert contents(tmp_path / "stopped") == contents(tmp_path / "still")
    ids = qp.open(store)["token_id"].values
    known = left["token_id"].values >= 0
    assert known[left["complete"].values].all()
    assert not known.all()
    np.testing.assert_array_equal(left["token_id"].values[known], ids[known])


def test_the_number_of_tokens_is_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "model", "gdn2")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "trace model --text hi --text y --generate 7 --dry-run") == 0
    assert capsys.readouterr().out.startswith("17 tokens, ")
    assert not Path("run.zarr").exists()
    assert call(monkeypatch, "trace model --text hi --generate 2") == 0
    assert call(monkeypatch, "trace model --text hi --generate 3 --resume") == 2
    assert "generated (expected 3, found 2)" in capsys.readouterr().err
