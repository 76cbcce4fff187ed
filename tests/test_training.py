"""Training: what a step minimises and moves, and that a run stopped anywhere ends with the same numbers."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qed_probe.errors import CheckFailed, InputError
from qed_probe.kernels.packing import chunk_table
from qed_probe.models import checkpoint
from qed_probe.models.checkpoint import read_provenance
from qed_probe.models.config import ModelConfig
from qed_probe.models.language import LanguageModel
from qed_probe.tasks import TASKS, Task, niah_prompts
from qed_probe.training import Recipe, evaluate_task, train
from qed_probe.training.objective import batch
from qed_probe.training.pull import Pull
from qed_probe.training.train import parameter_groups

CONFIG = ModelConfig(mixer="qed", hidden=16, layers=2, heads=2, key_dim=8, value_dim=8, ffn=24, vocab_size=256, tokenizer="bytes")
RECIPE = Recipe(
    steps=6, batch=4, length=380, rate=1e-2, micro_batch=4, task="niah", warmup=2, decay=0.5, log_every=1, save_every=2
)
PLAIN = replace(RECIPE, task="tokens", length=50)


def lines(output: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in found]


def state(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(output / "training.pt", weights_only=True)
    return found


def new_model(seed: int, config: ModelConfig = CONFIG) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(config)


def token_file(path: Path, ids: object) -> Path:
    np.save(path, np.asarray(ids))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(CONFIG, RECIPE, output, seed=3)
    return output


def assert_same_run(output: Path, other: Path) -> None:
    assert lines(output) == lines(other)
    assert (output / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    torch.testing.assert_close(state(output)["optimizer"], state(other)["optimizer"], rtol=0, atol=0)


def test_a_seed_fixes_every_number(undisturbed: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    train(CONFIG, RECIPE, tmp_path / "again", seed=3)
    assert_same_run(tmp_path / "again", undisturbed)
    train(CONFIG, replace(RECIPE, steps=1), tmp_path / "other", seed=4)
    assert lines(tmp_path / "other")[0]["loss"] != lines(undisturbed)[0]["loss"]


def test_training_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(CONFIG, replace(PLAIN, steps=1), tmp_path / "run", tokens=token_file(tmp_path / "a.npy", np.arange(200)))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("step", [1, 3, 4])
def test_ctrl_c_saves_and_resuming_gives_the_undisturbed_run(undisturbed: Path, tmp_path: Path, step: int) -> None:
    def interrupt(done: int, line: dict[str, Any]) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, RECIPE, tmp_path / "run", seed=3, progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler
    assert state(tmp_path / "run")["done"] == step
    assert checkpoint.load(tmp_path / "run").config == CONFIG
    train(CONFIG, RECIPE, tmp_path / "run", seed=3, resume=True)
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_killed_run_goes_on_from_its_last_save(undisturbed: Path, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(done: int, line: dict[str, Any]) -> None:
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        train(CONFIG, RECIPE, tmp_path / "run", seed=3, progress=kill)
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert state(tmp_path / "run")["done"] == 4
    train(CONFIG, RECIPE, tmp_path / "run", seed=3, resume=True)
    assert_same_run(tmp_path / "run", undisturbed)


def test_resuming_a_finished_run_changes_nothing(undisturbed: Path) -> None:
    names = ("config.json", "model.safetensors", "log.jsonl")
    before = [(undisturbed / name).read_bytes() for name in names]
    optimizer = state(undisturbed)["optimizer"]
    summary = train(CONFIG, RECIPE, undisturbed, seed=3, resume=True)
    assert [(undisturbed / name).read_bytes() for name in names] == before
    torch.testing.assert_close(state(undisturbed)["optimizer"], optimizer, rtol=0, atol=0)
    assert summary["steps"] == 6
    assert summary["tokens"] == 6 * 4 * 380


def test_the_output_is_a_checkpoint_that_says_where_it_came_from(undisturbed: Path) -> None:
    assert {path.name for path in undisturbed.iterdir()} == {"config.json", "model.safetensors", "training.pt", "log.jsonl"}
    model = checkpoint.load(undisturbed)
    torch.testing.assert_close(model.state_dict(), state(undisturbed)["model"], rtol=0, atol=0, check_device=False)
    provenance = json.loads((undisturbed / "config.json").read_text())["provenance"]
    assert provenance["seed"] == 3
    assert provenance["steps"] == 6
    assert provenance["recipe"]["rate"] == 1e-2
    assert provenance["fresh_accuracy"] == evaluate_task(model, "niah", 380, 200, 3)


def test_the_output_says_how_large_it_is_and_when_it_learned(undisturbed: Path, tmp_path: Path) -> None:
    made = read_provenance(undisturbed)
    assert made["parameters"] == sum(p.numel() for p in new_model(3).parameters())
    assert (made["learned_at"], made["fresh_samples"]) == (0, 200)
    shutil.copytree(undisturbed, tmp_path / "run")
    learned = state(undisturbed)
    for line, accuracy in zip(learned["lines"], (0.5, 0.899, 0.9, 0.4, 1.0, 1.0), strict=True):
        line["accuracy"] = accuracy
    torch.save(learned, tmp_path / "run" / "training.pt")
    assert train(CONFIG, RECIPE, tmp_path / "run", seed=3, resume=True)["learned_at"] == 3
    assert read_provenance(tmp_path / "run")["learned_at"] == 3


def test_a_run_can_be_resumed_from_before_its_first_step(undisturbed: Path, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(done: int, line: dict[str, Any]) -> None:
        raise Killed

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training.pt.part").write_bytes(b"PK")  # a kill before there was anything
    with pytest.raises(Killed):
        train(CONFIG, RECIPE, tmp_path / "run", seed=3, progress=kill)
    assert state(tmp_path / "run")["done"] == 0
    assert read_provenance(tmp_path / "run")["steps"] == 0
    train(CONFIG, RECIPE, tmp_path / "run", seed=3, resume=True)
    assert_same_run(tmp_path / "run", undisturbed)


def test_the_first_losses_are_those_of_the_definition(undisturbed: Path) -> None:
    tokens = torch.from_numpy(TASKS["niah"].stream(380, range(4), 3))
    model = new_model(3)
    with torch.no_grad():
        nll = -torch.log_softmax(model.logits(model(tokens)).double(), -1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    first = lines(undisturbed)[0]
    assert first["lm_loss"] == pytest.approx(float(nll.mean()), rel=1e-5)
    assert first["answer_loss"] == pytest.approx(float(nll[:, 372:].mean()), rel=1e-5)
    assert first["loss"] == pytest.approx(0.2 * float(nll.mean()) + float(nll[:, 372:].mean()), rel=1e-5)
    assert first["lm_loss"] == pytest.approx(math.log(256), rel=0.02)
    assert first["accuracy"] == 0


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_is_trained_on_its_whole_answer(task: Task, tmp_path: Path) -> None:
    recipe = replace(RECIPE, task=task.name, length=task.shortest() + 9, steps=2)
    found = train(CONFIG, recipe, tmp_path / "run", seed=3)
    assert found["steps"] == 2
    assert found["fresh_accuracy"] == 0
    tokens, model = torch.from_numpy(task.stream(recipe.length, range(4), 3)), new_model(3)
    with torch.no_grad():
        nll = -torch.log_softmax(model.logits(model(tokens)).double(), -1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    length = nll.shape[1]
    answers = torch.cat([nll[:, length - end - task.answer : length - end] for end in task.ends], 1)
    assert lines(tmp_path / "run")[0]["answer_loss"] == pytest.approx(float(answers.mean()), rel=1e-5)


def test_lines_have_the_schedules_rates_and_every_heads_lambda(undisturbed: Path) -> None:
    found = lines(undisturbed)
    assert [line["rate"] for line in found] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    theta = state(undisturbed)["model"]["layers.1.mixer.theta"]
    assert found[-1]["lambda"]["1"] == pytest.approx((0.25 / (1 + torch.exp(-theta))).tolist())
    assert {layer: len(heads) for layer, heads in found[0]["lambda"].items()} == {"0": 2, "1": 2}


def test_adams_first_step_moves_theta_ten_times_as_far(tmp_path: Path) -> None:
    # Adam's first step is rate·sign(gradient), whatever the gradient's size, where nothing decays.
    once = replace(PLAIN, steps=1, rate=1e-3, warmup=1, decay=0.0, clip=1e9)
    train(CONFIG, once, tmp_path / "run", seed=1, tokens=token_file(tmp_path / "a.npy", np.arange(200)))
    start, end = new_model(1).state_dict(), state(tmp_path / "run")["model"]
    moved = (end["layers.0.mixer.theta"] - start["layers.0.mixer.theta"]).abs()
    torch.testing.assert_close(moved, torch.full((2,), 1e-2), rtol=1e-2, atol=0)
    moved = (end["norm.weight"] - start["norm.weight"]).abs()
    torch.testing.assert_close(moved, torch.full((16,), 1e-3), rtol=1e-2, atol=0)
    name = "layers.0.ffn.down_proj.weight"
    shrunk = end[name] - start[name] * (1 - 1e-3 * 0.1)
    torch.testing.assert_close(shrunk.abs().median(), torch.tensor(1e-3), rtol=1e-2, atol=0)


def test_only_linear_maps_decay_and_every_parameter_is_trained() -> None:
    for mixer in ("qed", "eda", "gdn"):
        model = new_model(0, replace(CONFIG, mixer=mixer))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [({names.pop(id(p)) for p in group["params"]}, group) for group in parameter_groups(model, RECIPE)]
        assert not names
        decaying = set().union(*(members for members, group in groups if group["weight_decay"] > 0))
        assert all(name.endswith(".weight") and not any(x in name for x in ("norm", "conv", "embed")) for name in decaying)
        assert {"layers.0.mixer.q_proj.weight", "layers.1.ffn.up_proj.weight"} <= decaying
        fast = set().union(*(members for members, group in groups if group["factor"] == 10))
        assert fast == ({"layers.0.mixer.theta", "layers.1.mixer.theta"} if mixer == "qed" else set())


def test_micro_batches_add_up_to_the_batch(undisturbed: Path, tmp_path: Path) -> None:
    train(CONFIG, replace(RECIPE, micro_batch=1), tmp_path / "run", seed=3)
    for line, whole in zip(lines(tmp_path / "run"), lines(undisturbed), strict=True):
        assert line["loss"] == pytest.approx(whole["loss"], rel=1e-4)


def test_bfloat16_trains_float32_weights_close_to_float32(undisturbed: Path, tmp_path: Path) -> None:
    train(CONFIG, replace(RECIPE, precision="bfloat16"), tmp_path / "run", seed=3, save_dtype=torch.bfloat16)
    assert {x.dtype for x in state(tmp_path / "run")["model"].values()} == {torch.float32}
    assert checkpoint.load(tmp_path / "run", dtype=torch.bfloat16).embed.weight.dtype == torch.bfloat16
    size = (tmp_path / "run" / "model.safetensors").stat().st_size
    assert size < 0.7 * (undisturbed / "model.safetensors").stat().st_size
    found, exact = lines(tmp_path / "run"), lines(undisturbed)
    assert found[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=2e-2)
    assert found[-1]["loss"] != exact[-1]["loss"]


def test_a_token_file_is_learned(tmp_path: Path) -> None:
    path = token_file(tmp_path / "a.npy", np.tile(np.array([5, 1, 250, 7, 7, 9], np.uint16), 100))
    recipe = replace(PLAIN, steps=40, rate=2e-2, warmup=4, log_every=20, save_every=40)
    summary = train(replace(CONFIG, tokenizer="none"), recipe, tmp_path / "run", tokens=path)
    assert summary["loss"] < 0.5
    assert [line["step"] for line in lines(tmp_path / "run")] == [20, 40]
    assert "accuracy" not in summary


def test_token_batches_are_windows_fixed_by_seed_and_step() -> None:
    ids = np.arange(100, 160, dtype=np.uint16)
    batches = {(seed, step): batch(PLAIN, seed, step, ids, 256) for seed in (0, 1) for step in range(50)}
    assert all(torch.equal(rows - rows[:, :1], torch.arange(50).expand(4, 50)) for rows in batches.values())
    assert {int(row[0]) for rows in batches.values() for row in rows} == set(range(100, 111))
    assert torch.equal(batches[1, 7], batch(PLAIN, 1, 7, ids, 256))
    assert len({tuple(rows[:, 0].tolist()) for rows in batches.values()}) > 90


def test_accuracy_counts_whole_answers_of_fresh_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoint.load()  # which makes no mistakes at this length, and is kept from ever writing a 9
    scores = model.logits
    nine = torch.arange(256) == ord("9")
    monkeypatch.setattr(model, "logits", lambda hidden: scores(hidden).masked_fill(nine, -torch.inf))
    answers = [bytes(p.tokens[p.answer].tolist()) for p in niah_prompts(400, 50, 7)]
    expected = sum(b"9" not in answer for answer in answers) / 50
    assert 0 < expected < 1
    for size in (7, 50):
        assert evaluate_task(model, "niah", 400, 50, 7, size) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": replace(CONFIG, ffn=32)}, "config.ffn was 24, is 32"),
        ({"recipe": replace(RECIPE, rate=1e-3, clip=2.0)}, r"recipe.rate was 0.01, is 0.001; recipe.clip was 1.0, is 2.0"),
        ({"seed": 4}, "seed was 3, is 4"),
    ],
)
def test_resuming_another_run_names_what_differs(undisturbed: Path, changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"config": CONFIG, "recipe": RECIPE, "output": undisturbed, "seed": 3} | changes
    with pytest.raises(InputError, match=words):
        train(**arguments, resume=True)


def test_resuming_needs_a_run_and_the_same_tokens(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found no training\.pt"):
        train(CONFIG, RECIPE, tmp_path / "absent", resume=True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "training.pt").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(InputError, match="cannot be read"):
        train(CONFIG, RECIPE, tmp_path / "broken", resume=True)
    once = replace(PLAIN, steps=1)
    train(CONFIG, once, tmp_path / "run", tokens=token_file(tmp_path / "a.npy", np.arange(200)))
    with pytest.raises(InputError, match="tokens was 200 ids"):
        train(CONFIG, once, tmp_path / "run", tokens=token_file(tmp_path / "b.npy", np.arange(200)[::-1]), resume=True)


def test_an_output_that_exists_is_not_touched(undisturbed: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in undisturbed.iterdir()}
    (tmp_path / "file").touch()
    for output in (undisturbed, tmp_path / "file"):
        with pytest.raises(InputError, match="does not exist yet"):
            train(CONFIG, RECIPE, output, seed=3)
    assert {path.name: path.read_bytes() for path in undisturbed.iterdir()} == before


@pytest.mark.parametrize(
    ("config", "recipe", "options", "words"),
    [
        (CONFIG, PLAIN, {}, "token ids for the task 'tokens', found none"),
        (CONFIG, RECIPE, {"tokens": "ids"}, "no token file"),
        (replace(CONFIG, tokenizer="none"), RECIPE, {}, "tokenizer 'bytes'.*found 'none'"),
        (CONFIG, replace(RECIPE, length=100), {}, "length of at least 365 bytes.*found 100"),
        (
            CONFIG,
            replace(RECIPE, task="reassignment", length=230),
            {},
            "length of at least 239 bytes for the task 'reassignment', found 230",
        ),
        (CONFIG, RECIPE, {"seed": -1}, "seed.*found -1"),
        (CONFIG, RECIPE, {"device": "abacus"}, "device: expected one that is there, found 'abacus'"),
        (CONFIG, RECIPE, {"device": "cuda:99"}, "device: expected one that is there, found 'cuda:99'"),
        (CONFIG, PLAIN, {"tokens": [0] * 49}, r"at least 50 ids, found shape \(49,\)"),
        (CONFIG, PLAIN, {"tokens": [[0] * 99]}, r"one row.*found shape \(1, 99\)"),
        (CONFIG, PLAIN, {"tokens": [0.0] * 99}, "integer token ids.*float64"),
        (CONFIG, PLAIN, {"tokens": [0] * 49 + [256]}, "from 0 to 255.*found 256 at token 49"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, config: ModelConfig, recipe: Recipe, options: dict[str, Any], words: str
) -> None:
    if isinstance(options.get("tokens"), list):
        options = {"tokens": token_file(tmp_path / "a.npy", options["tokens"])}
    with pytest.raises(InputError, match=words):
        train(config, recipe, tmp_path / "run", **options)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    wild = replace(PLAIN, rate=1e30, warmup=1)
    path = token_file(tmp_path / "a.npy", np.arange(200))
    with pytest.raises(CheckFailed, match="found nan at step"):
        train(CONFIG, wild, tmp_path / "run", tokens=path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_a_recorded_step_gives_what_a_plain_one_does(precision: str, tolerance: float) -> None:
    recipe = replace(RECIPE, precision=precision)
    model = new_model(0).cuda()
    pull, plain = Pull(model, recipe), Pull(model, recipe)
    for step in range(3):
        for length in range(70):  # as many tables as are cached, and more: the graph must not lose its own
            chunk_table((0, length), 16, torch.device("cuda", 0))
        tokens = batch(recipe, 0, step, None, CONFIG.vocab_size)[: recipe.micro_batch].cuda()
        results = []
        for way in (pull, plain._run):
            model.zero_grad(set_to_none=False)
            results.append([*way(tokens).values(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)
