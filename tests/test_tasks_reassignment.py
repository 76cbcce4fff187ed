"""Reassignment against a reader of its text that knows nothing of how it was made."""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import qed_probe as qp
from qed_probe.tasks import TASKS, Prompt
from tests.test_tasks import part, spans, text

TASK = TASKS["reassignment"]
LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
STATEMENT = r"([A-Z]) = (\d{7})\."
QUESTION = r"\nWhat is ([A-Z]) now\? \1 = (\d{7})"


def told(prompt: Prompt) -> tuple[str, dict[str, list[str]]]:
    """The variable that is asked for, and every variable's values in order."""
    found = re.search(QUESTION + "$", text(prompt))
    assert found
    values = defaultdict(list)
    for name, value in re.findall(STATEMENT, text(prompt)):
        values[name].append(value)
    return found[1], values


@pytest.mark.parametrize("length", [TASK.shortest(), 512, 2000])
@pytest.mark.parametrize("depth", [None, 0.0, 0.5, 1.0])
def test_the_answer_is_the_value_assigned_last(length: int, depth: float | None) -> None:
    for prompt in TASK.prompts(length, 100, seed=2, depth=depth):
        asked, values = told(prompt)
        assert part(prompt, "answer") == values[asked][-1]
        assert len(values) == 3
        assert all(len(mine) in (2, 3) for mine in values.values())
        every = [value for mine in values.values() for value in mine]
        assert len({*every}) == len(every)
        assert prompt.details["updates"] == len(values[asked]) - 1


def test_roles_are_what_the_statements_say() -> None:
    seen = set()
    for prompt in TASK.prompts(700, 200, seed=3):
        asked, values = told(prompt)
        others = values.keys() - {asked}
        (current,) = spans(prompt, "current")
        assert re.fullmatch(STATEMENT, current)
        assert (asked, values[asked][-1]) == re.findall(STATEMENT, current)[0]
        last = [re.findall(STATEMENT, span)[0] for span in spans(prompt, "other")]
        assert sorted(last) == sorted((other, values[other][-1]) for other in others)
        stale = [re.findall(STATEMENT, span)[0] for span in spans(prompt, "stale")]
        assert all(re.fullmatch(STATEMENT, span) for span in spans(prompt, "stale"))
        assert sorted(stale) == sorted([(name, value) for name in values for value in values[name][:-1]])
        opening, question = spans(prompt, "question")
        assert opening.endswith("\n")
        assert re.fullmatch(QUESTION, question + part(prompt, "answer"))
        assert prompt.roles is not None
        assert set(prompt.roles) == {"question", "noise", "stale", "current", "other", "answer"}
        seen.add((len(values[asked]), *sorted(len(values[other]) for other in others)))
    assert seen == {(a, b, c) for a in (2, 3) for b, c in ((2, 2), (2, 3), (3, 3))}


def test_statements_have_lines_of_their_own_in_the_noise_line_repeated() -> None:
    for prompt in TASK.prompts(1500, 50, seed=4):
        lines = text(prompt).split("\n")
        statements = [line for line in lines[:-1] if "=" in line]
        assert all(re.fullmatch(STATEMENT, line) for line in statements)
        rest = [line for line in lines[1:-1] if "=" not in line]
        assert all(LINE.endswith(line) or LINE.startswith(line) for line in rest)
        assert rest.count(LINE) >= 4


def test_every_place_is_uniform_and_the_current_value_is_seldom_the_last() -> None:
    prompts = TASK.prompts(600, 1000, seed=0)
    depths = np.sort([prompt.details["depth"] for prompt in prompts])
    law = (depths**2 + depths**3) / 2  # the larger of two, or the largest of three, uniform places
    # Kolmogorov–Smirnov: 1.95/√n is passed by such a sample in all but 1 of 1000 cases.
    assert np.abs(law - (np.arange(1000) + 0.5) / 1000).max() < 1.95 / np.sqrt(1000)
    ahead = [
        text(prompt).index(spans(prompt, "current")[0]) > text(prompt).index(spans(prompt, "other")[-1]) for prompt in prompts
    ]
    # All three variables are alike, so the last place belongs to the asked one in a third.
    assert abs(np.mean(ahead) - 1 / 3) < 3.3 * np.sqrt(2 / 9 / 1000)


def test_training_asks_for_every_variable_and_scores_every_answer() -> None:
    for row in TASK.stream(400, range(50), seed=5):
        sample = bytes(row.tolist()).decode()
        found = list(re.finditer(QUESTION, sample))
        assert len({match[1] for match in found}) == 3
        assert all(
            re.findall(rf"{name} = (\d{{7}})\.", sample)[-1] == value for name, value in (match.groups() for match in found)
        )
        assert sorted(400 - match.end() for match in found) == list(TASK.ends)


def test_roles_and_updates_reach_the_store(tmp_path: Path) -> None:
    prompts = qp.task_prompts("reassignment", 512, 2, 0)
    ds = qp.trace(None, prompts, tmp_path / "run.zarr", layers=[1])
    roles = [prompt.roles for prompt in prompts if prompt.roles is not None]
    assert ds["role"].values.tolist() == np.concatenate(roles).tolist()
    assert ds["updates"].values.tolist() == [prompt.details["updates"] for prompt in prompts]
