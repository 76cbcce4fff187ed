"""Output of lm-evaluation-harness, written here in its format: read as outcomes, or refused with file and line."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from qed_probe.errors import InputError
from qed_probe.store.harness import read_harness
from qed_probe.store.outcomes import open_outcomes, save_outcomes

TIME = "2026-08-21T19-56-54.123456"
Samples = list[dict[str, Any]]


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def finish(
    number: int, doc: dict[str, Any], target: str, prompt: str, prediction: str, metrics: dict[str, float]
) -> dict[str, Any]:
    """A sample as evaluator.py makes it and evaluation_tracker.py writes it."""
    return {
        "doc_id": number, "doc": doc, "target": target,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": ["\n"], "max_gen_toks": 48}}},
        "resps": [[prediction]], "filtered_resps": [prediction], "filter": "none", "metrics": [*metrics],
        "doc_hash": hashed(json.dumps(doc, indent=2, ensure_ascii=False)), "prompt_hash": hashed(prompt),
        "target_hash": hashed(target), **metrics,
    }  # fmt: skip


def needle(number: int, length: int, right: bool = True) -> dict[str, Any]:
    """A document of niah_single_1; ``DEFAULT_SEQ_LENGTHS`` is 4096, which every sample has as a metric."""
    value, noise = str(8056020 + number), ["The grass is green. The sky is blue."] * 10
    noise.insert(number % 10, f"One of the special magic numbers for big-cat is: {value}.")
    text = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number "
        "afterwards.\n" + "\n".join(noise) + "\nWhat is the special magic number for big-cat mentioned in the provided text?"
    )
    prefix = "The special magic number for big-cat mentioned in the provided text is"
    doc = {"index": number, "input": text, "outputs": [value], "length": length - 9, "max_length": length, "gen_prefix": prefix}
    metrics = {"4096": -1.0} | {str(length): float(right)}
    return finish(number, doc, f"['{value}']", f"{text} {prefix}", f" {value}." if right else "lol 日本", metrics)


def completion(number: int, right: bool = True) -> dict[str, Any]:
    """A document of fda, swde or squad_completion."""
    doc = {"doc_id": f"K{number}", "file_name": "K.txt", "key": "k", "value": f"vé{number} ", "text": f"text {number} k:"}
    return finish(number, doc, f"vé{number}", doc["text"], f"vé{number}!" if right else "", {"contains": int(right)})


def mean(values: list[float]) -> float:
    kept = [x for x in values if x != -1]
    return sum(kept) / len(kept) if kept else -1


def results(tasks: dict[str, Samples], model: str = "org/model-1") -> dict[str, Any]:
    """What evaluator_utils.py states of the samples; it counts the values of the last metric."""
    stated: dict[str, dict[str, Any]] = {}
    counts = {}
    for task, samples in tasks.items():
        values: dict[str, list[float]] = {}
        for sample in samples:
            for metric in sample["metrics"]:
                values.setdefault(f"{metric},{sample['filter']}", []).append(sample[metric])
        stated[task] = {"alias": task, "sample_len": len(samples)}
        for key, x in values.items():
            stated[task] |= {key: mean(x), key.replace(",", "_stderr,"): "N/A"}
        counts[task] = {"original": 500, "effective": len([*values.values()][-1])}
    hashes = {t: hashed("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in x)) for t, x in tasks.items()}
    return {
        "results": stated, "group_subtasks": {}, "configs": {task: {"task": task} for task in tasks},
        "n-samples": counts, "lm_eval_version": "0.4.9", "task_hashes": hashes,
        "model_source": "hf", "model_name": model, "model_name_sanitized": model.replace("/", "__"),
    }  # fmt: skip


def write(
    root: Path, tasks: dict[str, Samples], time: str = TIME, change: Callable[[Any], object] = id, model: str = "org/model-1"
) -> Path:
    """Write a run below ``root``, its results changed by ``change``, and return its directory."""
    folder = root / model.replace("/", "__")
    folder.mkdir(parents=True, exist_ok=True)
    stated = results(tasks, model)
    change(stated)
    (folder / f"results_{time}.json").write_text(json.dumps(stated, indent=2, ensure_ascii=False), "utf-8")
    for task, samples in tasks.items():
        lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
        (folder / f"samples_{task}_{time}.jsonl").write_text("".join(lines), "utf-8")
    return folder


def needles(count: int = 6, lengths: tuple[int, ...] = (4096, 8192)) -> Samples:
    """Documents are numbered through all lengths, as in the harness."""
    return [needle(i, length, i % 3 != 0) for i, length in enumerate(np.repeat(lengths, count).tolist())]


def samples_file(folder: Path, task: str, time: str = TIME) -> Path:
    return folder / f"samples_{task}_{time}.jsonl"


def read(paths: Path | list[Path]) -> xr.Dataset:
    return read_harness(paths, arm="qed", seed=3)


def test_a_run_is_read_as_outcomes(tmp_path: Path) -> None:
    folder = write(tmp_path, {"niah_single_1": needles(), "fda": [completion(i, i != 1) for i in range(4)]})
    ds = read(tmp_path)
    assert ds.sizes["sample"] == 16
    assert {*ds["model"].values, *ds["arm"].values} == {"org/model-1", "qed"}
    assert {*ds["seed"].values.tolist()} == {3}
    assert np.isnan(ds["lambda_max"].values).all()
    assert ds.attrs["created_by"] == "lm-evaluation-harness 0.4.9"
    fda, niah = (ds.isel(sample=np.flatnonzero(ds["task"].values == task)) for task in ("fda", "niah_single_1"))
    assert fda["length"].values.tolist() == [0] * 4
    assert fda["correct"].values.tolist() == [True, False, True, True]
    assert fda["answer"].values.tolist() == ["vé0", "vé1", "vé2", "vé3"]
    assert fda["prediction"].values.tolist() == ["vé0!", "", "vé2!", "vé3!"]
    assert np.isnan(fda["depth"].values).all()
    assert niah["length"].values.tolist() == [4096] * 6 + [8192] * 6
    assert niah["index"].values.tolist() == [*range(12)]
    assert niah["correct"].values.tolist() == [i % 3 != 0 for i in range(12)]
    assert niah["answer"].values[1] == "8056021"
    assert niah["prediction"].values[:2].tolist() == ["lol 日本", " 8056021."]
    assert niah["depth"].values == pytest.approx([0, *[(37 * i) / 370 for i in range(1, 10)], 0, 0.1], abs=0.02)
    assert len({*ds["fingerprint"].values.tolist()}) == 16
    for same in (folder, [folder], folder / f"results_{TIME}.json", [*sorted(folder.glob("samples_*.jsonl"))]):
        xr.testing.assert_identical(read(same), ds)
    save_outcomes(ds, tmp_path / "a.zarr")
    xr.testing.assert_identical(open_outcomes(tmp_path / "a.zarr"), ds)


def test_samples_pair_by_document_and_prompt(tmp_path: Path) -> None:
    a, b = needles(), needles()
    b[2]["prompt_hash"] = hashed("another prompt")
    write(tmp_path, {"niah_single_1": a})
    write(tmp_path, {"niah_single_1": b}, model="org/model-2")
    first, second = (read(tmp_path / f"org__model-{i}")["fingerprint"].values for i in (1, 2))
    assert np.flatnonzero(first != second).tolist() == [2]


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("task", ["niah_single_3", "swde", "squad_completion"])
def test_all_right_and_all_wrong(tmp_path: Path, task: str, right: bool) -> None:
    make = [needle(i, 1024, right) if task.startswith("niah") else completion(i, right) for i in range(5)]
    ds = read(write(tmp_path, {task: make}))
    assert ds["correct"].values.tolist() == [right] * 5


def test_either_count_of_the_samples_is_right(tmp_path: Path) -> None:
    """Older harnesses count the documents, newer ones the values of the last metric."""
    made = {"niah_single_2": needles(5, (1024, 2048, 8192))}
    assert results(made)["n-samples"]["niah_single_2"]["effective"] == 5
    write(tmp_path / "new", made)
    write(tmp_path / "old", made, change=lambda x: x["n-samples"]["niah_single_2"].update(effective=15))
    xr.testing.assert_identical(read(tmp_path / "new"), read(tmp_path / "old"))


def test_a_wording_of_its_own_has_no_depth(tmp_path: Path) -> None:
    made = needles(1)
    made[0]["doc"]["input"] = made[0]["doc"]["input"].replace("One of the special magic", "One of the secret")
    depth = read(write(tmp_path, {"niah_single_1": made}))["depth"].values
    assert math.isnan(depth[0])
    assert not math.isnan(depth[1])


def spoil_line(number: int, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change one sample of niah_single_1, and nothing of the results."""

    def spoil(path: Path) -> None:
        lines = path.read_text("utf-8").splitlines(keepends=True)
        sample = json.loads(lines[number - 1])
        change(sample)
        lines[number - 1] = json.dumps(sample) + "\n"
        path.write_text("".join(lines), "utf-8")

    return spoil


def keep_lines(*numbers: int) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[n - 1] for n in numbers))

    return spoil


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "FILE, line 12: expected a JSON object, found one that is cut or damaged"),
        (lambda path: path.write_bytes(path.read_bytes().replace("日".encode(), b"\xe6", 1)), "FILE, line 1: .* cut or damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "FILE, line 13: .* cut or damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b"[]\n"), "FILE, line 13: expected a JSON object, found list"),
        (keep_lines(*range(1, 12)), "FILE: expected 6 samples, which results_.*json counts, found 11, the last .* in line 11"),
        (keep_lines(), "FILE: expected 6 samples, which results_.*json counts, found none"),
        (keep_lines(*range(1, 7)), "FILE: expected the samples whose hash is in results_.*json, found some other or missing"),
        (keep_lines(*range(2, 13), 1), "FILE: expected the samples whose hash"),
        (
            keep_lines(*range(1, 13), 8),
            "FILE, line 13: .* once, found document 7 of niah_single_1 at 8192 again, after FILE, line 8",
        ),
        (spoil_line(3, lambda x: x.update(prompt_hash="0")), "FILE: expected the samples whose hash"),
        (spoil_line(3, lambda x: x.update({"4096": 0.0})), "FILE: expected 4096 to be 0.66.*, .* found 0.5 over 6 samples"),
        (spoil_line(3, lambda x: x.update({"4096": 0.5})), "FILE, line 3: expected the metric 4096 to be 0 or 1, found 0.5"),
        (spoil_line(3, lambda x: x.update({"4096": -1.0})), "FILE, line 3: expected the metric 4096 to be 0 or 1, found -1.0"),
        (spoil_line(3, lambda x: x.pop("4096")), "FILE, line 3: expected the metric 4096 to be 0 or 1, found none"),
        (spoil_line(3, lambda x: x.pop("doc_id")), r"FILE, line 3: expected doc_id \(int\), found none"),
        (spoil_line(3, lambda x: x.pop("filter")), r"FILE, line 3: expected filter \(str\), found none"),
        (spoil_line(3, lambda x: x.update(doc="d" * 99)), r"FILE, line 3: expected doc \(dict\), found 'd{39}$"),
        (spoil_line(3, lambda x: x["doc"].update(outputs=["1", "2"])), r"line 3: expected outputs with one text, found \['1', "),
        (spoil_line(3, lambda x: x.update(filtered_resps=[["a"]])), r"line 3: expected filtered_resps with one text, found \[\["),
    ],
)  # fmt: skip
def test_spoilt_samples_are_refused_with_their_line(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    path = samples_file(write(tmp_path, {"niah_single_1": needles()}), "niah_single_1")
    spoil(path)
    for given in (tmp_path, path):
        with pytest.raises(InputError, match=message.replace("FILE", str(path))):
            read(given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["results"]["fda"].update({"contains,none": 0.9}), "expected contains to be 0.9, which .* found 1.0 over 4"),
        (lambda x: x["results"]["fda"].update({"contains,none": None}), "expected contains to be None"),
        (lambda x: x["results"]["fda"].update({"contains,none": math.nan}), "expected contains to be nan"),
        (lambda x: x["results"]["fda"].update({"contains,strip": 0.9}), "expected fda with one filter, found none and strip"),
        (lambda x: x["results"].update(fda={"alias": "fda"}), "expected fda with one filter, found none$"),
        (lambda x: x.pop("model_name"), r"results_.*json: expected model_name \(str\), found none"),
        (lambda x: x.pop("results"), "expected fda with one filter, found none$"),
        (lambda x: x.pop("n-samples"), "expected None samples"),
        (lambda x: x["n-samples"]["fda"].update(effective=5), "expected 5 samples, .* found 4, the last of them in line 4"),
        (lambda x: x["n-samples"].update(swde={}), "samples_swde_.*jsonl: expected the samples of swde, which results_.* has"),
    ],
)  # fmt: skip
def test_results_that_say_something_else_are_refused(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    write(tmp_path, {"fda": [completion(i) for i in range(4)]}, change=change)
    with pytest.raises(InputError, match=message):
        read(tmp_path)


def test_results_without_hashes_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"fda": [completion(i) for i in range(4)]}, change=lambda x: x.update(task_hashes={}))
    assert read(tmp_path).sizes["sample"] == 4


def test_of_several_filters_the_one_that_the_results_name_is_read(tmp_path: Path) -> None:
    made = [completion(i) for i in range(4)] + [completion(i, right=False) | {"filter": "strip"} for i in range(4)]
    folder = write(tmp_path, {"fda": made})
    with pytest.raises(InputError, match=rf"^{folder}/results_.*json: expected fda with one filter, found none and strip"):
        read(tmp_path)
    stated = json.loads((folder / f"results_{TIME}.json").read_text())
    stated["results"]["fda"] = {"contains,strip": 0.0}
    (folder / f"results_{TIME}.json").write_text(json.dumps(stated))
    assert read(tmp_path)["correct"].values.tolist() == [False] * 4


def test_two_runs_of_a_task_are_refused_unless_named(tmp_path: Path) -> None:
    """One run a length is common; which of two runs of the same documents is meant, nobody can say."""
    later = "2026-08-22T00-00-00"
    folder = write(tmp_path, {"niah_single_1": needles(3, (4096,))})
    write(tmp_path, {"niah_single_1": needles(3, (8192,))}, time=later)
    with pytest.raises(
        InputError, match=rf"^{folder}: expected one run of niah_single_1, found {TIME} and {later}; name the files"
    ):
        read(tmp_path)
    files = [samples_file(folder, "niah_single_1", time) for time in (TIME, later)]
    assert read(files)["length"].values.tolist() == [4096] * 3 + [8192] * 3
    write(tmp_path, {"niah_single_1": needles(3, (4096,))}, time=later)
    with pytest.raises(
        InputError, match=rf"^{files[1]}, line 1: .* once, found document 0 .* at 4096 again, after {files[0]}, line 1"
    ):
        read(files)
    with pytest.raises(InputError, match=rf"expected files of samples that differ, found {files[0]} twice"):
        read([files[0], folder / f"results_{TIME}.json"])


def test_several_models_are_refused(tmp_path: Path) -> None:
    for model in ("org/a", "org/b"):
        write(tmp_path, {"fda": [completion(0)]}, model=model)
    with pytest.raises(InputError, match=r"expected the results of one model, found org/a \(.*\) and org/b \(.*\)"):
        read(tmp_path)
    assert read(tmp_path / "org__b")["model"].values.tolist() == ["org/b"]


def test_what_is_no_output_of_the_harness_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"fda": [completion(0)], "arc_easy": [completion(0)]})
    with pytest.raises(InputError, match=r"samples_arc_easy_.*: expected samples of niah_single_1, .* found arc_easy; name"):
        read(tmp_path)
    assert read(samples_file(folder, "fda")).sizes["sample"] == 1
    with pytest.raises(InputError, match=r"expected a directory, .* found nothing there"):
        read(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match="found a file of another name"):
        read(tmp_path / "notes.txt")
    with pytest.raises(InputError, match="expected files of samples that differ, found none"):
        read([])
    (folder / "samples_fda.jsonl").write_text("")
    with pytest.raises(InputError, match=r"expected a name like samples_TASK_TIME\.jsonl"):
        read(tmp_path)


def test_samples_or_results_that_are_missing_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"fda": [completion(0)]})
    results_path, samples_path = folder / f"results_{TIME}.json", samples_file(folder, "fda")
    text = results_path.read_text()
    results_path.write_text(text[:-20])
    with pytest.raises(InputError, match=rf"^{results_path}: expected a JSON object, found one that is cut or damaged: .* line "):
        read(tmp_path)
    results_path.write_text(text)
    shutil.copy(results_path, folder / f"mine_{TIME}.json")
    with pytest.raises(
        InputError, match=rf"^{samples_path}: expected its results beside it, .* found mine_.*json, results_.*json"
    ):
        read(tmp_path)
    results_path.unlink()
    assert read(tmp_path).sizes["sample"] == 1  # named as by --output_path mine.json
    (folder / f"mine_{TIME}.json").unlink()
    with pytest.raises(InputError, match=rf"^{samples_path}: expected its results beside it, results_{TIME}.json, found none"):
        read(tmp_path)
    samples_path.unlink()
    results_path.write_text(text)
    for given in (tmp_path, results_path):
        with pytest.raises(
            InputError, match=rf"^{given}: expected samples_TASK_TIME.jsonl, which lm_eval --log_samples writes, found none"
        ):
            read(given)
