"""What holds for every task: length, roles, answer, what a sample depends on, and what is refused."""

import hashlib

import numpy as np
import pytest

import qed_probe as qp
from qed_probe.errors import InputError
from qed_probe.tasks import TASKS, Prompt, Task

every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def text(prompt: Prompt) -> str:
    return bytes(prompt.tokens.astype(np.uint8)).decode("ascii")


def part(prompt: Prompt, role: str) -> str:
    assert prompt.roles is not None
    return bytes(prompt.tokens[prompt.roles == role].astype(np.uint8)).decode("ascii")


def spans(prompt: Prompt, role: str) -> list[str]:
    """The texts of a role, each where it is without a break."""
    assert prompt.roles is not None
    edges = np.flatnonzero(np.diff(prompt.roles == role, prepend=False, append=False))
    return [text(prompt)[start:stop] for start, stop in edges.reshape(-1, 2)]


@every_task
def test_a_sample_has_its_length_to_the_byte_and_ends_with_its_answer(task: Task) -> None:
    shortest = task.shortest()
    for length in (*range(shortest, shortest + 110), 512, 1000, 4097):
        for prompt in task.prompts(length, 3, seed=length):
            assert len(prompt.tokens) == length
            assert prompt.roles is not None
            assert len(prompt.roles) == length
            assert prompt.answer == slice(length - task.answer, length)
            assert text(prompt)[prompt.answer] == part(prompt, "answer")
            assert prompt.details["length"] == length
            assert 0 <= prompt.details["depth"] <= 1
        assert task.stream(length, range(2), seed=length).shape == (2, length)


@every_task
def test_the_longest_sample_of_the_shortest_length_has_no_noise(task: Task) -> None:
    """Else samples could be shorter; one in a hundred or so has the longest keys."""
    rng, draw = np.random.default_rng(0), task.practice or task.draw
    samples = [draw(task.shortest(), rng, None).prompt() for _ in range(2000)]
    assert min(len(part(sample, "noise").replace("\n", "")) for sample in samples) <= 6


@every_task
def test_a_sample_depends_on_seed_and_index_alone(task: Task) -> None:
    few, many, other = (list(map(text, task.prompts(600, n, seed=s))) for n, s in ((3, 7), (9, 7), (9, 8)))
    assert many[:3] == few
    assert len(set(many + other)) == 18
    stream = task.stream(600, range(20), 7)
    np.testing.assert_array_equal(task.stream(600, [4, 11], 7), stream[[4, 11]])


@every_task
def test_samples_are_made_when_they_are_asked_for(task: Task) -> None:
    prompts = task.prompts(600, 10**12, seed=7)
    assert len(prompts) == 10**12
    assert text(prompts[2]) == text(task.prompts(600, 3, seed=7)[2])
    assert text(prompts[10**11]) not in map(text, prompts[:3])


@every_task
def test_training_never_sees_the_fresh_samples(task: Task) -> None:
    trained = {bytes(row.astype(np.uint8)) for row in task.stream(512, range(2000), 0)}
    assert len(trained) == 2000
    assert not trained & {text(prompt).encode() for prompt in task.prompts(512, 200, 0)}


@every_task
@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_depth_is_the_share_of_noise_before_what_is_asked_for(task: Task, depth: float) -> None:
    role = "current" if task.name == "reassignment" else "needle"
    for prompt in task.prompts(2000, 5, seed=5, depth=depth):
        assert prompt.roles is not None
        noise, (start, *_) = prompt.roles == "noise", np.flatnonzero(prompt.roles == role)
        assert abs(noise[:start].sum() / noise.sum() - depth) < 8e-3  # up to eight ends of lines are not of the noise's size
        assert prompt.details["depth"] == depth


def test_the_samples_of_niah_are_those_that_the_bundled_model_was_trained_on() -> None:
    digest = hashlib.sha256()
    for length in (365, 512, 4097):
        for depth in (None, 0.0, 0.3):
            for prompt in qp.niah_prompts(length, 5, seed=11, depth=depth):
                digest.update(prompt.fingerprint.to_bytes(8, "little", signed=True))
        digest.update(TASKS["niah"].stream(length, range(3, 9), 11).astype("<i8").tobytes())
    assert digest.hexdigest() == "52c665ba7cf0576e8b9bd7d489249051af15b96ae0ce6e2d1e561356712f9595"


def test_prompts_by_name_are_the_tasks() -> None:
    for name, task in TASKS.items():
        assert task.name == name
        assert text(qp.task_prompts(name, 600, 2, 5)[1]) == text(task.prompts(600, 2, 5)[1])
        assert text(qp.task_prompts(name, 600, 2, 5, depth=0.5)[1]) == text(task.prompts(600, 2, 5, depth=0.5)[1])
    with pytest.raises(InputError, match="task: expected one of niah, niah-2, niah-3, reassignment, found 'niah-4'"):
        qp.task_prompts("niah-4", 600, 2, 5)


@every_task
def test_bad_arguments_are_named(task: Task) -> None:
    short = task.shortest() - 1
    with pytest.raises(InputError, match=f"at least {short + 1} bytes for the task '{task.name}', found {short}"):
        task.prompts(short, 1, 0)
    with pytest.raises(InputError, match=f"at least {short + 1} bytes for the task '{task.name}', found {short}"):
        task.stream(short, range(1), 0)
    with pytest.raises(InputError, match="one sample, found 0"):
        task.prompts(512, 0, 0)
    for ask in (lambda: task.prompts(512, 1, -1), lambda: task.stream(512, range(1), -1)):
        with pytest.raises(InputError, match="seed of at least 0, found -1"):
            ask()
    for depth in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match=f"depth from 0 to 1, found {depth}"):
            task.prompts(512, 1, 0, depth=depth)
