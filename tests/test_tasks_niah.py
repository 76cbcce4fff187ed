"""S-NIAH-1 to -3 against RULER's own templates and against the definition of their parts."""

import re
import uuid
from collections import Counter

import numpy as np
import pytest

from qed_probe.tasks import TASKS, niah_prompts
from qed_probe.tasks.prose import prose
from qed_probe.tasks.samples import ADJECTIVES, NOUNS
from tests.test_tasks import part, text

# RULER's constants, from which its generator makes the singular wording for one needle and one question.
TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text? "
    "The special magic {type_needle_v} for {query} mentioned in the provided text are"
)
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KINDS = {"niah": ("number", r"\d{7}"), "niah-2": ("number", r"\d{7}"), "niah-3": ("uuid", r"[0-9a-f-]{36}")}


def ruler(context: str, kind: str, key: str, value: str) -> str:
    template = TEMPLATE.replace("Some", "A").replace("are all", "is").replace("are", "is")
    return template.format(type_needle_v=kind, context=context, query=key) + " " + value


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("more", [0, 1, 147, 635, 3732])
def test_wording_is_rulers(name: str, more: int) -> None:
    kind, values = KINDS[name]
    for prompt in TASKS[name].prompts(TASKS[name].shortest() + more, 20, seed=3):
        whole = text(prompt)
        needle = rf"One of the special magic {kind}s for ([a-z]+)-([a-z]+) is: ({values})\."
        found = re.fullmatch(needle, part(prompt, "needle"))
        assert found
        adjective, noun, value = found.groups()
        assert adjective in ADJECTIVES
        assert noun in NOUNS
        key = f"{adjective}-{noun}"
        context = whole[whole.index("\n") + 1 : whole.rindex("\n")]
        assert whole == ruler(context, kind, key, value)
        assert NEEDLE.format(type_needle_v=kind + "s", key=key, value=value) in context


def test_noise_is_rulers_line_repeated_around_the_needle() -> None:
    for prompt in niah_prompts(1500, 20, seed=0):
        before, after = text(prompt).split("\n", 1)[1].rsplit("\n", 1)[0].split(part(prompt, "needle"))
        assert ((LINE + "\n") * 20).endswith(before)
        assert (("\n" + LINE) * 20).startswith(after)
        assert part(prompt, "noise") == before + after


@pytest.mark.parametrize("name", ["niah-2", "niah-3"])
def test_the_haystack_is_prose_in_whole_lines_around_the_needle(name: str) -> None:
    seen: Counter[str] = Counter()
    for prompt in TASKS[name].prompts(6000, 20, seed=0):
        before, after = text(prompt).split("\n", 1)[1].rsplit("\n", 1)[0].split(part(prompt, "needle"))
        assert part(prompt, "noise") == before + after
        lines = [*before.split("\n")[1:-1], *after.split("\n")[1:-1]]
        assert all(re.fullmatch(r"([A-Z][a-z', ]+\. ){2}[A-Z][a-z', ]+\.", line) for line in lines)
        seen.update(lines)
    assert seen.total() > 300
    assert max(seen.values()) == 1


def test_lines_of_prose_hardly_repeat() -> None:
    lines = prose(np.random.default_rng(0))
    sentences = Counter(sentence for _ in range(3000) for sentence in next(lines).split(". "))
    assert sentences.total() == 9000
    assert len(sentences) > 8800


def test_a_uuid_is_of_version_4() -> None:
    for prompt in TASKS["niah-3"].prompts(500, 20, seed=1):
        assert uuid.UUID(part(prompt, "answer")).version == 4


def test_the_styles_share_key_and_number() -> None:
    first, second, third = (TASKS[name].prompts(600, 5, seed=2) for name in KINDS)
    for one, two, three in zip(first, second, third, strict=True):
        assert part(one, "needle") == part(two, "needle")
        assert one.details == two.details
        assert part(one, "needle").split(" is: ")[0] == part(three, "needle").split(" is: ")[0].replace("uuid", "number")


def test_roles_and_answer_cover_the_prompt() -> None:
    (prompt,) = niah_prompts(700, 1, seed=1)
    assert prompt.answer == slice(693, 700)
    assert part(prompt, "answer") == text(prompt)[prompt.answer]
    assert part(prompt, "answer") in part(prompt, "needle")
    assert part(prompt, "question").startswith("A special magic number is hidden")
    assert part(prompt, "question").endswith("mentioned in the provided text is ")
    assert sum(len(part(prompt, role)) for role in ("noise", "needle", "question", "answer")) == 700


def test_depth_is_uniform_unless_given() -> None:
    depths = np.sort([prompt.details["depth"] for prompt in niah_prompts(400, 400, seed=0)])
    # Kolmogorov–Smirnov: 1.95/√n is passed by a uniform sample in all but 1 of 1000 cases.
    assert np.abs(depths - (np.arange(400) + 0.5) / 400).max() < 1.95 / 20
