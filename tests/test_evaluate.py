"""Evaluation: every answer is what decoding alone would write, and the same samples are put to every checkpoint and strength."""

import json
import resource
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import qed_probe as qp
from qed_probe.cli import main
from qed_probe.errors import CheckpointError, InputError
from qed_probe.evaluation import evaluate, read_answers, read_losses
from qed_probe.models.intervention import Intervention
from qed_probe.models.language import LanguageModel
from qed_probe.store.outcomes import check_free, check_outcomes, open_outcomes
from tests.foreign_models import tiny
from tests.test_harness import completion, needles, write
from tests.test_tracing import make_checkpoint

HOME = sys.modules[evaluate.__module__]
BUNDLED = Path(qp.__file__).parent / "data" / "qed-tiny"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models by mixer."""
    folder = tmp_path_factory.mktemp("models")
    found = {mixer: make_checkpoint(folder / mixer, mixer) for mixer in ("qed", "gdn2", "eda")}
    return found | {"qed-tiny": BUNDLED}


def token_by_token(model: LanguageModel, prompt: torch.Tensor, count: int) -> list[int]:
    """Greedy decoding that reads everything again for every token."""
    ids = prompt[None]
    for _ in range(count):
        with torch.no_grad():
            likeliest = torch.log_softmax(model.logits(model(ids))[0, -1].double(), -1).argmax()
        ids = torch.cat([ids, likeliest[None, None]], 1)
    return [int(x) for x in ids[0, len(prompt) :]]


@pytest.mark.parametrize("name", ["qed", "gdn2", "eda", "qed-tiny"])
@pytest.mark.parametrize("answer", [1, 7])
def test_answers_are_those_of_decoding_token_by_token(checkpoints: dict[str, Path], name: str, answer: int) -> None:
    model = qp.load_model(checkpoints[name])
    tokens = torch.from_numpy(np.stack([p.tokens for p in qp.niah_prompts(400, 3, seed=5)]))
    tokens[2, 360:380] = ord("?")  # no question, so that a trained model errs too
    written, nll = read_answers(model, tokens, answer)
    assert written.tolist() == [token_by_token(model, row[:-answer], answer) for row in tokens]
    with torch.no_grad():
        p = torch.log_softmax(model.logits(model(tokens)).double(), -1)
    expected = -p[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(nll.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read_losses(model, tokens), nll, rtol=1e-4, atol=1e-4)


def test_outcomes_are_an_independent_count(checkpoints: dict[str, Path]) -> None:
    ds = evaluate([BUNDLED, checkpoints["gdn2"]], lengths=[1024, 512], samples=3, seed=2)
    check_outcomes(ds)
    model = qp.load_model(BUNDLED)
    for length in (512, 1024):
        rows = ds.isel(sample=(ds["length"].values == length) & (ds["model"].values == "qed-tiny"))
        for prompt, row in zip(qp.niah_prompts(length, 3, 2), range(3), strict=True):
            one = rows.isel(sample=row)
            answer = bytes(prompt.tokens[-7:].tolist()).decode()
            written = token_by_token(model, torch.from_numpy(prompt.tokens[:-7]), 7)
            assert one["answer"].item() == answer
            assert one["correct"].item() == (bytes(written) == answer.encode())
            assert one["fingerprint"].item() == prompt.fingerprint
            assert one["depth"].item() == prompt.details["depth"]
            nll = read_losses(model, torch.from_numpy(prompt.tokens[None]))[0]
            assert one["loss"].item() == pytest.approx(float(nll.mean()), rel=1e-4)
            assert one["answer_loss"].item() == pytest.approx(float(nll[-7:].mean()), rel=1e-2, abs=1e-5)
    known = ds.isel(sample=0)
    assert [known[name].item() for name in ("model", "arm", "seed", "lambda_max")] == ["qed-tiny", "qed", 0, 0.25]
    assert [known[name].item() for name in ("task", "trained_length", "learned_at", "strength")] == ["niah", 512, -1, 1]
    other = ds.isel(sample=-1)
    assert [other[name].item() for name in ("model", "arm", "seed", "trained_length", "learned_at")] == [
        "gdn2",
        "gdn2",
        -1,
        0,
        -1,
    ]
    assert np.isnan(other["lambda_max"].item())
    assert not ds["correct"].values[6:].any()


def test_every_checkpoint_and_strength_gets_the_same_samples(checkpoints: dict[str, Path]) -> None:
    paths = [checkpoints["qed"], BUNDLED]
    ds = evaluate(paths, lengths=[400, 365], samples=2, changes=[Intervention(s) for s in (2.0, 1.0, -1.0)])
    assert ds.sizes["sample"] == 2 * 3 * 2 * 2
    for _, part in ds.groupby("model"):
        for _, one in part.groupby("strength"):
            for name in ("fingerprint", "depth", "answer", "length", "index"):
                assert one[name].values.tolist() == ds[name].values[:4].tolist()
    plain = evaluate(paths, lengths=[400, 365], samples=2)
    xr.testing.assert_identical(plain, ds.isel(sample=ds["strength"].values == 1))
    assert len(np.unique(ds["loss"].values)) == 24


@pytest.mark.parametrize("strength", [-1.0, 0.0, 0.5, 2.0])
def test_a_strength_is_that_of_trace(strength: float, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    ds = evaluate([checkpoints["qed"]], lengths=[400], samples=2, changes=[Intervention(strength)])
    traced = qp.trace(checkpoints["qed"], qp.niah_prompts(400, 2, 0), tmp_path / "run.zarr", strength=strength)
    nll = traced["nll"].values.reshape(2, 400)[:, 1:]
    np.testing.assert_allclose(ds["loss"].values, nll.mean(1), rtol=1e-4)
    np.testing.assert_allclose(ds["answer_loss"].values, nll[:, -7:].mean(1), rtol=1e-3)
    assert ds["correct"].values.tolist() == traced["correct"].values.astype(bool).tolist()


def test_the_size_of_a_batch_changes_no_answer(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for together in (1, 900, 1 << 20):
        monkeypatch.setattr(HOME, "TOGETHER_ELSEWHERE", together)
        found.append(evaluate([BUNDLED], lengths=[400], samples=5))
    for other in found[1:]:
        xr.testing.assert_identical(other.drop_vars(["loss", "answer_loss"]), found[0].drop_vars(["loss", "answer_loss"]))
        np.testing.assert_allclose(other["loss"], found[0]["loss"], rtol=1e-4)


@pytest.mark.parametrize("task", ["niah-2", "niah-3", "reassignment"])
def test_every_task_is_asked(task: str) -> None:
    ds = evaluate([BUNDLED], task=task, lengths=[600], samples=1)
    (prompt,) = qp.task_prompts(task, 600, 1, 0)
    assert ds["answer"].item() == bytes(prompt.tokens[prompt.answer].tolist()).decode()
    assert (ds["task"].item(), ds["learned_at"].item(), ds["prediction"].item() == ds["answer"].item()) == (
        task,
        -1,
        ds["correct"].item(),
    )


def test_when_it_learned_is_known_of_the_task_that_it_was_trained_on(tmp_path: Path) -> None:
    model = qp.load_model(make_checkpoint(tmp_path / "model", "eda"))
    qp.save_model(model, tmp_path / "model", {"seed": 4, "learned_at": 70, "recipe": {"task": "niah", "length": 512}})
    for task, learned_at in (("niah", 70), ("niah-2", -1)):
        ds = evaluate([tmp_path / "model"], task=task, lengths=[600], samples=1)
        assert (ds["seed"].item(), ds["trained_length"].item(), ds["learned_at"].item()) == (4, 512, learned_at)


@pytest.mark.parametrize(
    "provenance", [{"seed": None, "recipe": "mine"}, {"seed": -7, "learned_at": "soon"}, {"seed": 1 << 80}, {"seed": True}]
)
def test_a_provenance_that_means_something_else_is_unknown(provenance: dict[str, Any], tmp_path: Path) -> None:
    qp.save_model(qp.load_model(make_checkpoint(tmp_path / "model", "eda")), tmp_path / "model", provenance)
    ds = evaluate([tmp_path / "model"], lengths=[365], samples=1)
    assert (ds["seed"].item(), ds["trained_length"].item(), ds["learned_at"].item()) == (-1, 0, -1)


def test_bfloat16_is_close(checkpoints: dict[str, Path]) -> None:
    exact, rounded = (evaluate([BUNDLED], lengths=[512], samples=2, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert rounded["correct"].all()
    np.testing.assert_allclose(rounded["loss"], exact["loss"], rtol=2e-2)
    assert (rounded["loss"] != exact["loss"]).all()


@pytest.mark.parametrize("rows", [np.arange(40) % 7, np.arange(80).reshape(2, 40) % 11], ids=["one row", "two rows"])
def test_losses_over_tokens(rows: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:  # noqa: ANN401
    np.save(tmp_path / "ids.npy", rows.astype(np.uint16))
    ds = evaluate([checkpoints["qed"], checkpoints["gdn2"]], tokens=tmp_path / "ids.npy")
    assert "correct" not in ds
    assert {*ds["task"].values} == {"tokens"}
    tokens = torch.from_numpy(np.atleast_2d(rows))
    for name, part in ds.groupby("model"):
        nll = read_losses(qp.load_model(checkpoints[str(name)]), tokens)
        np.testing.assert_allclose(part["loss"], nll.mean(1), rtol=1e-5)
        assert part["length"].values.tolist() == [40] * len(tokens)
    with pytest.raises(InputError, match="phase: expected all, as tokens have no answer, found answer"):
        evaluate([checkpoints["qed"]], tokens=tmp_path / "ids.npy", changes=[Intervention(0.0, phase="answer")])


def test_a_foreign_checkpoint_has_losses_and_no_answers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="4.57")
    model = tiny("qwen3_next")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=r"model: expected a model over bytes for the task 'niah', found one over other tokens"):
        evaluate([tmp_path / "model"], lengths=[400], samples=1, progress=never)
    tokens = torch.arange(60)[None] % 31
    np.save(tmp_path / "ids.npy", tokens.numpy())
    ds = evaluate([tmp_path / "model"], tokens=tmp_path / "ids.npy")
    p = torch.log_softmax(model(tokens).logits.double(), -1)[0, :-1].gather(-1, tokens[0, 1:, None])
    assert ds["loss"].item() == pytest.approx(-float(p.mean()), rel=1e-4)
    assert (ds["seed"].item(), ds["trained_length"].item(), np.isnan(ds["lambda_max"].item())) == (-1, 0, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "poetry"}, "task: expected one of niah.*found 'poetry'"),
        ({"lengths": []}, "lengths: .*found none"),
        ({"lengths": [400, 400]}, "lengths: .*found 400, 400"),
        ({"lengths": [400, -1]}, "length of at least 365 bytes.*found -1"),
        ({"samples": 0}, "at least one sample, found 0"),
        ({"seed": -1}, "seed of at least 0, found -1"),
        ({"changes": []}, "changes: expected some that differ, found 0"),
        ({"changes": [Intervention(), Intervention(float("nan"))]}, "strength: expected a finite number, found nan"),
        ({"changes": [Intervention(2.0), Intervention(2.0)]}, "changes: .*found 2 of which 1 do"),
        ({"changes": [Intervention(), Intervention(1.0, at=((0, 0),))]}, "at, phase: expected a strength, a direction or a mode"),
        ({"dtype": "float16"}, "dtype: .*found 'float16'"),
        ({"device": "abacus"}, "device: .*found 'abacus'"),
        ({"checkpoints": []}, "checkpoints: .*found none"),
        ({"checkpoints": ["qed", "qed"]}, "checkpoints: expected some that differ"),
        (
            {"checkpoints": ["qed", "gdn2"], "changes": [Intervention(), Intervention(2)]},
            "gdn2: expected a model that adds a direction",
        ),
        ({"tokens": np.array([3])}, "at least 2 tokens a row"),
        ({"tokens": np.array([3, 256])}, "from 0 to 255.*found 256"),
        ({"tokens": np.array([0.5, 1])}, "integer token ids"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_run_is_refused_before_it_is(
    options: dict[str, Any], words: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    names = options.pop("checkpoints", ["qed"])
    if "tokens" in options:
        np.save(tmp_path / "ids.npy", options["tokens"])
        options["tokens"] = tmp_path / "ids.npy"
    arguments: dict[str, Any] = {"lengths": [400], "samples": 1} | options
    with pytest.raises(InputError, match=words):
        evaluate([checkpoints[name] for name in names], progress=never, **arguments)


def never(*_: object) -> None:
    raise AssertionError("something was run")


def test_checkpoints_that_outcomes_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    one, other = (make_checkpoint(tmp_path / name / "qed", "qed") for name in ("one", "other"))
    for second in (other, one / ".." / "qed", f"{one}/."):
        with pytest.raises(InputError, match=r"that outcomes can tell apart, found .*one/qed and .*qed.*, both model qed"):
            evaluate([one, second], lengths=[400], samples=1, progress=never)
    for path, name in ((one, "a"), (other, "b")):
        qp.save_model(qp.load_model(path), tmp_path / name, {"seed": 3})
    with pytest.raises(InputError, match=r"found .*a and .*b, both arm qed, seed 3, lambda_max 0\.25"):
        evaluate([tmp_path / "a", tmp_path / "b"], lengths=[400], samples=1, progress=never)
    with pytest.raises(CheckpointError, match="nowhere"):
        evaluate([one, tmp_path / "nowhere"], lengths=[400], samples=1, progress=never)
    (other / "model.safetensors").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"other/qed: expected .*found no model\.safetensors"):
        evaluate([one, other], lengths=[400], samples=1, progress=never)
    qp.save_model(qp.load_model(one), other, {"seed": 5})
    assert {*evaluate([one, other], lengths=[400], samples=1)["seed"].values} == {-1, 5}


def test_samples_are_made_one_after_another(checkpoints: dict[str, Path]) -> None:
    tracemalloc.start()
    part = HOME._packed(qp.task_prompts("niah", 65536, 8, 0), 7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part.tokens.shape == (8, 65536)
    assert peak < 3 * part.tokens.nbytes + 100 * 65536


Call = Callable[..., int]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["qed-probe", *map(str, words)])
        return main()

    return run


def test_the_command_keeps_and_shows_what_it_found(
    call: Call, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, lines = tmp_path / "out.zarr", tmp_path / "out.jsonl"
    words = ("evaluate", BUNDLED, checkpoints["gdn2"], "--lengths", "512,400", "--samples", "2", "-o", store, "--export", lines)
    assert call(*words) == 0
    out = capsys.readouterr().out.splitlines()
    rows = {row[0]: row for row in (line.split() for line in out) if row}
    assert rows["qed-tiny"][:4] == ["qed-tiny", "qed", "0", "niah"]
    assert rows["qed-tiny"][4:] == ["100.0", "[16,", "100]", "100.0", "[16,", "100]", ">", "512", ">", "512", ">", "512"]
    assert rows["gdn2"][2:6] == ["–", "niah", "0.0", "[0,"]
    ds = open_outcomes(store)
    assert ds.attrs["created_by"].startswith("qed-probe evaluate ")
    assert [json.loads(line)["correct"] for line in lines.read_text().splitlines()] == ds["correct"].values.tolist()
    xr.testing.assert_equal(ds, evaluate([BUNDLED, checkpoints["gdn2"]], lengths=[512, 400], samples=2))
    assert call(*words) == 2
    assert "out.zarr: expected nothing there, found a store of outcomes" in capsys.readouterr().err
    assert call(*words, "--overwrite") == 0


def test_the_command_reads_what_the_harness_left(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", {"niah_single_1": needles(), "fda": [completion(n, n < 3) for n in range(4)]})
    store = tmp_path / "out.zarr"
    assert call("evaluate", "--harness", tmp_path / "run", "--arm", "qed", "--seed", "3", "-o", store) == 0
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    (fda,) = [row for row in rows if "fda" in row]
    assert fda[1:] == ["qed", "3", "fda", "75.0", "[19,", "99]", *"–" * 5]
    assert captured.err == ""
    ds = qp.analyses.accuracy(open_outcomes(store))
    assert ds["length"].values.tolist() == [0, 4096, 8192]
    qp.plot(store, tmp_path / "figures")
    assert {"accuracy.png", "tasks.png"} <= {path.name for path in (tmp_path / "figures").iterdir()}


def test_the_command_sweeps(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "sweep.zarr"
    assert call("sweep", BUNDLED, "--lengths", "400", "--samples", "3", "--strengths", "-1,1,2", "-o", store) == 0
    out = capsys.readouterr().out
    (row,) = [line.split() for line in out.splitlines() if line.strip().startswith("400")]
    ds = qp.analyses.strengths(open_outcomes(store))
    assert row[1] == f"{float(ds['accuracy'][0, 0, 0]):.1%}"
    assert row[2] == f"{int(ds['gained'][0, 0, 0])}/{int(ds['lost'][0, 0, 0])}"
    assert "is not a trained GDN-2" in out
    assert "does not show that λ_max binds" in out


def test_the_command_asks_changed_models_as_they_are_too(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, how = tmp_path / "out.zarr", ("--strength", "0", "--at", "1:0", "--at", "1:2", "--phase", "answer")
    assert call("evaluate", BUNDLED, "--lengths", "400", "--samples", "3", *how, "-o", store) == 0
    frame = open_outcomes(store).to_dataframe()
    assert frame.groupby(["strength", "at", "phase"]).size().to_dict() == {(0, "1:0,1:2", "answer"): 3, (1, "all", "all"): 3}
    out = capsys.readouterr().out
    assert "accuracy by length" in out
    (row,) = [line.split() for line in out.splitlines() if " 1:0,1:2 " in line]
    assert row[:7] == ["0", "own", "1:0,1:2", "answer", "100.0%", "100.0%", "0/0"]


def test_the_command_shows_the_loss_of_each_checkpoint(
    call: Call, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(60) % 13)
    same_name = tmp_path / "other" / "qed"
    qp.save_model(qp.load_model(checkpoints["qed"]), same_name, {"seed": 8})
    words = ("evaluate", checkpoints["qed"], same_name, "--tokens", tmp_path / "ids.npy", "-o", tmp_path / "out.zarr")
    assert call(*words) == 0
    rows = [row for line in capsys.readouterr().out.splitlines() if (row := line.split())[:1] == ["qed"]]
    assert [row[:3] for row in rows] == [["qed", "qed", "–"], ["qed", "qed", "8"]]
    assert rows[0][3] == rows[1][3] == f"{open_outcomes(tmp_path / 'out.zarr')['loss'].values[0]:.4f}"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("evaluate", "expected checkpoints, or --harness with --arm"),
        ("evaluate {qed} --harness {tmp}", "expected checkpoints, or --harness with --arm"),
        ("evaluate {qed} --arm qed", "expected checkpoints, or --harness with --arm"),
        ("evaluate --harness {tmp}/none --arm qed", "none"),
        ("evaluate {qed} --lengths 512,", "--lengths"),
        ("evaluate {qed} --lengths 1e3", "--lengths"),
        ("evaluate {qed} --samples 0", "at least one sample"),
        ("evaluate {qed} --at 0:1", "a strength, a direction or a mode to go with them"),
        ("evaluate {qed} --phase prompt", "a strength, a direction or a mode to go with them"),
        ("evaluate --harness {tmp} --arm qed --at 0:1", "expected answers of a model to a task"),
        ("evaluate --harness {tmp} --arm qed --strength 0", "expected answers of a model to a task"),
        ("evaluate {gdn2} --strength 0", "adds a direction"),
        ("evaluate {qed} -o {tmp}/missing/out.zarr", "missing/out.zarr: writing failed: No such file"),
        ("evaluate {qed} -o {tmp}/file", "expected nothing there, found a file"),
        ("evaluate {qed} -o {tmp}/file --overwrite", "expected a store of outcomes, found a file"),
        ("evaluate {qed} -o /proc/out.zarr", "/proc/out.zarr: writing failed"),
        ("evaluate {qed} --export {tmp}/missing/out.jsonl", "missing/out.jsonl: writing failed: No such file"),
        ("evaluate {qed} --export {tmp}", "expected the path of a file, found a directory"),
        ("evaluate {qed} -o {tmp}/a --export {tmp}/a", "at different paths"),
        ("sweep {gdn2}", "adds a direction"),
        ("sweep {qed} --strengths 0,2", "--strengths: expected 1"),
        ("sweep {qed} --strengths 1", "--strengths: expected 1"),
        ("sweep {qed} --strengths a,1", "--strengths: expected numbers"),
        ("sweep {qed} --strengths 1,inf", "strength: expected a finite number"),
        ("sweep {qed} -o {tmp}/file", "expected nothing there, found a file"),
    ],
)
def test_bad_input_is_one_line_before_the_work(
    words: str, named: str, call: Call, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("kept")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HOME, "open_model", never)
    assert call(*words.format(tmp=tmp_path, **checkpoints).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert named in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_full_disk_is_one_line(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        status = call("evaluate", BUNDLED, "--lengths", "400", "--samples", "1", "-o", tmp_path / "out.zarr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    assert "out.zarr: writing failed: File too large" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_checking_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("kept")
    check_free(tmp_path / "out.zarr", tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert (tmp_path / "out.jsonl").read_text() == "kept"
