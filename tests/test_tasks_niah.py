"""S-NIAH-1 to -3 against RULER's own templates and against the definition of their parts."""

import re

import numpy as np
import pytest

from qed_probe.errors import InputError
from qed_probe.tasks import TASKS, Prompt, niah_prompts
from qed_probe.tasks.samples import ADJECTIVES, NOUNS

# RULER's constants, from which its generator makes the singular wording for one needle and one question.
TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text? "
    "The special magic {type_needle_v} for {query} mentioned in the provided text are"
)
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
SHORTEST = TASKS["niah"].shortest()
LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def ruler(context: str, key: str, value: str) -> str:
    template = TEMPLATE.replace("Some", "A").replace("are all", "is").replace("are", "is")
    return template.format(type_needle_v="number", context=context, query=key) + " " + value


def text(prompt: Prompt) -> str:
    return bytes(prompt.tokens.astype(np.uint8)).decode("ascii")


def part(prompt: Prompt, role: str) -> str:
    assert prompt.roles is not None
    return bytes(prompt.tokens[prompt.roles == role].astype(np.uint8)).decode("ascii")


@pytest.mark.parametrize("length", [SHORTEST, SHORTEST + 1, 512, 1000, 4097])
def test_wording_is_rulers(length: int) -> None:
    for prompt in niah_prompts(length, 20, seed=3):
        whole = text(prompt)
        assert len(whole) == length
        found = re.fullmatch(r"One of the special magic numbers for ([a-z]+)-([a-z]+) is: (\d{7})\.", part(prompt, "needle"))
        assert found
        adjective, noun, value = found.groups()
        assert adjective in ADJECTIVES
        assert noun in NOUNS
        key = f"{adjective}-{noun}"
        context = whole[whole.index("\n") + 1 : whole.rindex("\n")]
        assert whole == ruler(context, key, value)
        assert NEEDLE.format(type_needle_v="numbers", key=key, value=value) in context


def test_noise_is_rulers_line_repeated_around_the_needle() -> None:
    for prompt in niah_prompts(1500, 20, seed=0):
        before, after = text(prompt).split("\n", 1)[1].rsplit("\n", 1)[0].split(part(prompt, "needle"))
        assert ((LINE + "\n") * 20).endswith(before)
        assert (("\n" + LINE) * 20).startswith(after)
        assert part(prompt, "noise") == before + after


def test_roles_and_answer_cover_the_prompt() -> None:
    (prompt,) = niah_prompts(700, 1, seed=1)
    assert prompt.answer == slice(693, 700)
    assert part(prompt, "answer") == text(prompt)[prompt.answer]
    assert part(prompt, "answer") in part(prompt, "needle")
    assert part(prompt, "question").startswith("A special magic number is hidden")
    assert part(prompt, "question").endswith("mentioned in the provided text is ")
    assert sum(len(part(prompt, role)) for role in ("noise", "needle", "question", "answer")) == 700


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_depth_is_the_share_of_noise_before_the_needle(depth: float) -> None:
    for prompt in niah_prompts(2000, 5, seed=5, depth=depth):
        before = text(prompt).split("\n", 1)[1].split(part(prompt, "needle"))[0]
        assert abs(len(before) / len(part(prompt, "noise")) - depth) < 1e-3
        assert prompt.details == {"length": 2000.0, "depth": depth}


def test_depth_is_uniform_unless_given() -> None:
    depths = np.sort([prompt.details["depth"] for prompt in niah_prompts(400, 400, seed=0)])
    # Kolmogorov–Smirnov: 1.95/√n is passed by a uniform sample in all but 1 of 1000 cases.
    assert np.abs(depths - (np.arange(400) + 0.5) / 400).max() < 1.95 / 20


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    few, many, other = (list(map(text, niah_prompts(600, n, seed=s))) for n, s in ((3, 7), (9, 7), (9, 8)))
    assert many[:3] == few
    assert len(set(many + other)) == 18
    stream = TASKS["niah"].stream(600, range(20), 7)
    np.testing.assert_array_equal(TASKS["niah"].stream(600, [4, 11], 7), stream[[4, 11]])


def test_samples_are_made_when_they_are_asked_for() -> None:
    prompts = niah_prompts(600, 10**12, seed=7)
    assert len(prompts) == 10**12
    assert text(prompts[2]) == text(niah_prompts(600, 3, seed=7)[2])
    assert text(prompts[10**11]) not in map(text, prompts[:3])


def test_training_never_sees_the_fresh_samples() -> None:
    trained = {bytes(row.astype(np.uint8)) for row in TASKS["niah"].stream(512, range(2000), 0)}
    assert len(trained) == 2000
    assert not trained & {text(prompt).encode() for prompt in niah_prompts(512, 200, 0)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((SHORTEST - 1, 1, 0), f"at least {SHORTEST} bytes.*found {SHORTEST - 1}"),
        ((512, 0, 0), "one sample, found 0"),
        ((512, 1, -1), "seed.*found -1"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[int, int, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        niah_prompts(*arguments)


@pytest.mark.parametrize("depth", [-0.1, 1.5, float("nan")])
def test_a_depth_outside_the_unit_interval_is_refused(depth: float) -> None:
    with pytest.raises(InputError, match=f"depth from 0 to 1, found {depth}"):
        niah_prompts(512, 1, 0, depth=depth)
