"""Kinds of answers where values change, against a reader of the samples that shares no code with what made them."""

from itertools import chain

import numpy as np
import pytest
import xarray as xr

import qed_probe as qp
from qed_probe.analyses import answer_kinds
from qed_probe.errors import StoreError
from qed_probe.tasks import Prompt
from tests.hand_made import join, run
from tests.test_tasks_reassignment import told

KINDS = ("current", "stale", "other", "other-stale", "none")
NOTHING = "0000000"
"""No value begins with 0."""


def values(prompt: Prompt) -> dict[str, list[str]]:
    """Every value of a sample by its kind, in the order of variables and assignments."""
    asked, by_name = told(prompt)
    others = [mine for name, mine in by_name.items() if name != asked]
    return {
        "current": by_name[asked][-1:],
        "stale": by_name[asked][:-1],
        "other": [mine[-1] for mine in others],
        "other-stale": [*chain.from_iterable(mine[:-1] for mine in others)],
        "none": [NOTHING],
    }


def outcomes(length: int, said: list[str], seed: int = 0, *, arm: str = "eda", samples: int = 0) -> xr.Dataset:
    """One run of the task, which answered so."""
    prompts = qp.task_prompts("reassignment", length, len(said), samples)
    answers = [values(prompt)["current"][0] for prompt in prompts]
    columns = {
        "task": "reassignment", "fingerprint": [prompt.fingerprint for prompt in prompts], "answer": np.array(answers, object),
        "prediction": np.array(said, object),
    }  # fmt: skip
    right = [answer == one for answer, one in zip(answers, said, strict=True)]
    return run(arm, seed, {length: right}, **columns)


def test_every_value_of_a_sample_has_its_kind() -> None:
    prompts = qp.task_prompts("reassignment", 512, 40, 0)
    for kind in KINDS:
        found = answer_kinds(outcomes(512, [values(prompt)[kind][-1] for prompt in prompts]))
        assert found["answers"].dims == ("run", "length", "kind")
        assert found["kind"].values.tolist() == [*KINDS]
        assert found["answers"].values.tolist() == [[[40 * (kind == each) for each in KINDS]]]


def test_runs_and_lengths_are_counted_apart() -> None:
    right = {n: [values(p)["current"][0] for p in qp.task_prompts("reassignment", n, 3, 0)] for n in (512, 700)}
    one = join(outcomes(700, [*right[700][:2], NOTHING]), outcomes(512, right[512]))
    found = answer_kinds(join(one, outcomes(512, [NOTHING] * 3, 1), outcomes(512, right[512], arm="kda")))
    assert found["length"].values.tolist() == [512, 700]
    names = [*zip(found["arm"].values.tolist(), found["seed"].values.tolist(), strict=True)]
    counted = found["answers"].sel(kind=["current", "none"]).values.tolist()
    expected = {("eda", 0): [[3, 0], [2, 1]], ("eda", 1): [[0, 3], [0, 0]], ("kda", 0): [[3, 0], [0, 0]]}
    assert dict(zip(names, counted, strict=True)) == expected
    assert found["learned_at"].values.tolist() == [400] * 3


def test_the_latest_value_is_the_one_that_stands_last() -> None:
    prompts = qp.task_prompts("reassignment", 600, 30, 0)
    text = [bytes(prompt.tokens.tolist()).decode() for prompt in prompts]
    last = [max(chain.from_iterable(told(p)[1].values()), key=t.index) for p, t in zip(prompts, text, strict=True)]
    found = answer_kinds(outcomes(600, last))
    assert found["latest"].values.tolist() == [[30]]
    kept = found["answers"].sel(kind=["current", "other"]).sum("kind")
    assert kept.values.tolist() == [[30]]  # what stands last of all has been superseded by nothing
    assert 0 < found["answers"].sel(kind="current").item() < 30
    assert answer_kinds(outcomes(600, [NOTHING] * 30))["latest"].values.tolist() == [[0]]


def same(one: str, other: str) -> float:
    return float((np.array([*one]) == np.array([*other])).mean())


def test_the_digits_of_answers_that_are_no_value_are_held_against_the_values() -> None:
    prompts = qp.task_prompts("reassignment", 512, 20, 0)
    kept = [values(prompt) for prompt in prompts]
    said = [mine["current"][0][:4] + "xyz" for mine in kept]
    found = answer_kinds(outcomes(512, [*said[:19], kept[19]["stale"][0]]))
    for kind in KINDS[:4]:
        each = [np.mean([same(one, value) for value in mine[kind]]) for one, mine in zip(said, kept, strict=True)]
        assert found["agreement"].sel(kind=kind).item() == pytest.approx(np.mean(each[:19]))
    assert found["agreement"].sel(kind="current").item() == pytest.approx(4 / 7)
    assert np.isnan(found["agreement"].sel(kind="none").item())
    assert np.isnan(answer_kinds(outcomes(512, [mine["stale"][0] for mine in kept]))["agreement"]).all()


def test_an_answer_of_other_bytes_is_no_value() -> None:
    found = answer_kinds(outcomes(512, ["\\xff\\xff12345", "", "12"]))
    assert found["answers"].sel(kind="none").values.tolist() == [[3]]


def test_other_samples_and_other_tasks_are_refused() -> None:
    ds = outcomes(512, [NOTHING] * 3, samples=7)
    assert answer_kinds(ds, seed=7)["answers"].sum() == 3
    with pytest.raises(StoreError, match="samples of seed 0, found others at length 512, sample 0"):
        answer_kinds(ds)
    with pytest.raises(StoreError, match="task reassignment at strength 1, found none"):
        answer_kinds(run("qed", 0, {512: [1, 0]}))
