"""What lm-evaluation-harness leaves of a run, read as a table of outcomes.

With ``--output_path`` and ``--log_samples`` it writes ``results_TIME.json`` and, beside it, ``samples_TASK_TIME.jsonl``: a line a
document. Source: https://github.com/EleutherAI/lm-evaluation-harness, evaluator.py, loggers/evaluation_tracker.py, tasks/ruler.
"""

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from qed_probe.errors import InputError
from qed_probe.store.outcomes import make_outcomes

NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")
"""RULER's tasks of one needle: the metric of a sample is named after its ``max_length``; under other lengths it has −1."""

COMPLETIONS = ("fda", "swde", "squad_completion")
"""Tasks whose metric is ``contains``."""

ROUNDING = 1e-6
SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
RESULTS = re.compile(r".+_(?P<time>\d{4}-\d\d-\d\dT[\d.-]+)\.json")


@dataclass(frozen=True)
class _Run:
    """A file of samples, its task, and the results beside it."""

    path: Path
    task: str
    results_path: Path
    results: dict[str, Any]

    def stated(self, table: str) -> Any:  # noqa: ANN401 - whatever the JSON holds
        """What a table of the results says of the task, None if nothing."""
        tasks = self.results.get(table)
        return tasks.get(self.task) if isinstance(tasks, dict) else None


@dataclass(frozen=True)
class _Line:
    """A line of samples: where it is, what is kept of it, and what tells whether all are there."""

    where: str
    filter: str
    metrics: list[str]
    hashes: str
    columns: dict[str, Any]

    @property
    def document(self) -> tuple[str, int, int]:
        """Task, length and number: what no other line may have."""
        return self.columns["task"], self.columns["length"], self.columns["index"]


def read_harness(paths: str | Path | Sequence[str | Path], *, arm: str, seed: int) -> xr.Dataset:
    """Read what lm-evaluation-harness left of one model, a directory or files of it, as a table of outcomes.

    A ``results_*.json`` stands for the samples beside it. ``index`` is the document's id, ``length`` RULER's ``max_length``,
    ``fingerprint`` that of prompt and target, ``depth`` counts characters. Raises InputError, naming file and line, for tasks
    that are not in ``NEEDLES`` or ``COMPLETIONS``, several runs of one in a directory, several models, samples that are missing,
    cut or there twice, several filters, and samples other than those whose number, hash or accuracy the results state.
    """
    given = [paths] if isinstance(paths, (str, Path)) else paths
    runs = [_run(path) for path in _files([Path(path) for path in given])]
    models = {_field(run.results, "model_name", str, str(run.results_path)): run.results_path for run in runs}
    if len(models) > 1:
        found = " and ".join(f"{name} ({path})" for name, path in models.items())
        raise InputError(f"expected the results of one model, found {found}")
    lines = [line for run in runs for line in _lines(run)]
    _check_documents(lines)
    columns: dict[str, object] = {name: [line.columns[name] for line in lines] for name in lines[0].columns}
    versions = dict.fromkeys(str(run.results.get("lm_eval_version", "of unknown version")) for run in runs)
    made = {"created_by": f"lm-evaluation-harness {', '.join(versions)}"}
    return make_outcomes(columns | {"model": next(iter(models)), "arm": arm, "seed": seed}, made)


def _files(paths: Sequence[Path]) -> list[Path]:
    files = [file.resolve() for path in paths for file in _below(path)]
    twice = [str(file) for i, file in enumerate(files) if file in files[:i]]
    if twice or not files:
        raise InputError(f"expected files of samples that differ, found {f'{twice[0]} twice' if twice else 'none'}")
    return files


def _below(path: Path) -> list[Path]:
    """The files of samples that a path stands for."""
    results = RESULTS.fullmatch(path.name)
    if path.is_dir():
        files = sorted(path.rglob("samples_*.jsonl"))
        _check_single(path, files)
    elif path.is_file() and SAMPLES.fullmatch(path.name):
        return [path]
    elif path.is_file() and results:
        files = sorted(path.parent.glob(f"samples_*_{results['time']}.jsonl"))
    else:
        found = "a file of another name" if path.exists() else "nothing there"
        raise InputError(f"{path}: expected a directory, results_*.json or samples_*.jsonl of lm_eval, found {found}")
    if not files:
        raise InputError(f"{path}: expected samples_TASK_TIME.jsonl, which lm_eval --log_samples writes, found none")
    _check_no_task_is_lost(files)
    return files


def _check_single(directory: Path, files: list[Path]) -> None:
    """Of two runs of a task nobody can say which one is meant."""
    runs = defaultdict(list)
    for file in files:
        runs[file.parent, _name(file)["task"]].append(_name(file)["time"])
    for (folder, task), times in runs.items():
        if len(times) > 1:
            raise InputError(f"{folder}: expected one run of {task}, found {' and '.join(times)}; name the files to read")


def _check_no_task_is_lost(files: list[Path]) -> None:
    for run in {_results_path(file): _run(file) for file in files}.values():
        counts = run.results.get("n-samples")
        for task in (*NEEDLES, *COMPLETIONS):
            file = run.path.with_name(f"samples_{task}_{_name(run.path)['time']}.jsonl")
            if isinstance(counts, dict) and task in counts and not file.exists():
                raise InputError(
                    f"{file}: expected the samples of {task}, which {run.results_path.name} has, found nothing there"
                )


def _name(path: Path) -> re.Match[str]:
    name = SAMPLES.fullmatch(path.name)
    if not name:
        raise InputError(f"{path}: expected a name like samples_TASK_TIME.jsonl, found another")
    return name


def _results_path(path: Path) -> Path:
    """The results of a file of samples: of the same time, in the same directory."""
    time = _name(path)["time"]
    found = sorted(path.parent.glob(f"*_{time}.json"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise InputError(f"{path}: expected its results beside it, results_{time}.json, found {names}")
    return found[0]


def _run(path: Path) -> _Run:
    task, results_path = _name(path)["task"], _results_path(path)
    if task not in (*NEEDLES, *COMPLETIONS):
        known = ", ".join((*NEEDLES, *COMPLETIONS))
        raise InputError(f"{path}: expected samples of {known}, found {task}; name the files to read")
    return _Run(path, task, results_path, _object(results_path.read_bytes(), str(results_path)))


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: expected a JSON object, found one that is cut or damaged: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(found).__name__}")
    return found


def _lines(run: _Run) -> list[_Line]:
    """The lines of a run, with the one filter that the results name, all of them there."""
    with run.path.open("rb") as file:
        lines = [
            _line(run.task, _object(text, f"{run.path}, line {n}"), f"{run.path}, line {n}") for n, text in enumerate(file, 1)
        ]
    stated = run.stated("results")
    filters = sorted({key.partition(",")[2] for key in stated if "," in key}) if isinstance(stated, dict) else []
    if len(filters) != 1:
        raise InputError(f"{run.results_path}: expected {run.task} with one filter, found {' and '.join(filters) or 'none'}")
    chosen = [line for line in lines if line.filter == filters[0]]
    _check_documents(chosen)
    _check_count(run, chosen)
    _check_hash(run, lines)
    _check_accuracy(run, chosen, filters[0])
    return chosen


def _line(task: str, sample: dict[str, Any], where: str) -> _Line:
    hashes = {name: _field(sample, name, str, where) for name in ("doc_hash", "prompt_hash", "target_hash")}
    doc = _field(sample, "doc", dict, where)
    if task in NEEDLES:
        length, answer = _field(doc, "max_length", int, where), _only(doc, "outputs", where)
        metric, depth = str(length), _depth(_field(doc, "input", str, where), answer)
    else:
        length, answer = 0, _field(sample, "target", str, where)
        metric, depth = "contains", math.nan
    if sample.get(metric) not in (0, 1):
        raise InputError(f"{where}: expected the metric {metric} to be 0 or 1, found {sample.get(metric, 'none')}")
    columns = {
        "task": task,
        "length": length,
        "index": _field(sample, "doc_id", int, where),
        "fingerprint": _fingerprint(hashes["prompt_hash"] + hashes["target_hash"]),
        "depth": depth,
        "answer": answer,
        "prediction": _only(sample, "filtered_resps", where),
        "correct": bool(sample[metric]),
    }
    metrics = _field(sample, "metrics", list, where)
    return _Line(where, _field(sample, "filter", str, where), metrics, "".join(hashes.values()), columns)


def _field(sample: dict[str, Any], name: str, kind: type, where: str) -> Any:  # noqa: ANN401 - of that kind
    value = sample.get(name)
    if not isinstance(value, kind):
        raise InputError(f"{where}: expected {name} ({kind.__name__}), found {f'{value!r:.40}' if name in sample else 'none'}")
    return value


def _only(sample: dict[str, Any], name: str, where: str) -> str:
    match sample.get(name):
        case [str(text)]:
            return text
    raise InputError(f"{where}: expected {name} with one text, found {sample.get(name)!r:.40}")


def _fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _depth(text: str, answer: str) -> float:
    """Share of RULER's noise that comes before the needle, NaN where the wording is another."""
    noise = re.search(r"afterwards\.\n(.*)\nWhat ", text, re.DOTALL)
    needle = re.search(rf"One of the special magic .{{1,80}}? is: {re.escape(answer)}\.", noise[1]) if noise else None
    if not noise or not needle or len(noise[1]) == len(needle[0]):
        return math.nan
    return needle.start() / (len(noise[1]) - len(needle[0]))


def _check_documents(lines: list[_Line]) -> None:
    seen: dict[tuple[str, int, int], str] = {}
    for line in lines:
        if line.document in seen:
            task, length, index = line.document
            which = f"document {index} of {task}{f' at {length}' if length else ''}"
            raise InputError(f"{line.where}: expected every document once, found {which} again, after {seen[line.document]}")
        seen[line.document] = line.where


def _check_count(run: _Run, lines: list[_Line]) -> None:
    """The results count documents or, since February 2026, values of the last metric: of RULER's lengths, the last one's."""
    counts = Counter(metric for line in lines for metric in line.metrics)
    stated = (run.stated("n-samples") or {}).get("effective")
    if stated not in (len(lines), *[*counts.values()][-1:]):
        found = f"{len(lines)}, the last of them in line {lines[-1].where.rpartition(' ')[2]}" if lines else "none"
        raise InputError(f"{run.path}: expected {stated} samples, which {run.results_path.name} counts, found {found}")


def _check_hash(run: _Run, lines: list[_Line]) -> None:
    stated = run.stated("task_hashes")
    if stated not in (None, hashlib.sha256("".join(line.hashes for line in lines).encode()).hexdigest()):
        raise InputError(
            f"{run.path}: expected the samples whose hash is in {run.results_path.name}, found some other or missing"
        )


def _check_accuracy(run: _Run, lines: list[_Line], name: str) -> None:
    """Of each length, for RULER; −1 states that there is no sample."""
    correct: dict[str, list[bool]] = defaultdict(list)
    for line in lines:
        correct[str(line.columns["length"]) if run.task in NEEDLES else "contains"].append(line.columns["correct"])
    stated = {key.removesuffix(f",{name}"): x for key, x in run.stated("results").items() if key.endswith(f",{name}")}
    for metric, value in stated.items():
        if metric.isdecimal() or metric == "contains":
            found = sum(correct[metric]) / len(correct[metric]) if correct[metric] else -1
            if not isinstance(value, (int, float)) or not abs(value - found) <= ROUNDING:
                where = f"{run.path}: expected {metric} to be {value}, which {run.results_path.name} states"
                raise InputError(f"{where}, found {found} over {len(correct[metric])} samples")
