"""Memory does not grow with the prompts: they are made a few at a time, thrice in all, and nothing is kept of their tokens."""

import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import qed_probe as qp
from qed_probe.store import layout, reader, schema
from qed_probe.tasks.prompts import LazyPrompts
from qed_probe.tracing import plan
from tests.test_tracing import make_checkpoint

LENGTH, TOGETHER = 256, 4


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and everything that is done piece by piece in pieces of TOGETHER prompts."""
    monkeypatch.setattr(plan, "PACK", TOGETHER * LENGTH)
    monkeypatch.setattr(layout, "GROUP", TOGETHER * LENGTH)
    monkeypatch.setattr(schema, "MAX_BLOCK", TOGETHER * LENGTH)
    return make_checkpoint(tmp_path / "model", "qed")


def prompt(index: int) -> qp.Prompt:
    return qp.Prompt(np.full(LENGTH, index % 256), np.full(LENGTH, "noise"), slice(7, 9), {"index": float(index)})


def counted(size: int) -> tuple[Sequence[qp.Prompt], list[int]]:
    """Prompts, and how many of them are alive each time one is made."""
    made: list[weakref.ref[qp.Prompt]] = []
    alive: list[int] = []

    def make(index: int) -> qp.Prompt:
        fresh = prompt(index)
        made.append(weakref.ref(fresh))
        alive.append(sum(ref() is not None for ref in made))
        return fresh

    return LazyPrompts(size, make), alive


def test_few_prompts_are_alive_at_a_time(model: Path, tmp_path: Path) -> None:
    prompts, alive = counted(30)
    cost = qp.estimate(model, prompts)
    assert len(alive) == 30 + TOGETHER  # to plan, and to time a pass
    assert max(alive) <= TOGETHER
    prompts, alive = counted(30)
    ds = qp.trace(model, prompts, tmp_path / "run.zarr")
    assert len(alive) == 3 * 30  # to plan, to lay out, to forward
    assert max(alive) <= 2 * TOGETHER
    assert cost.tokens == ds.sizes["token"] == 30 * LENGTH
    assert ds["token_id"].values.tolist() == [index for index in range(30) for _ in range(LENGTH)]
    assert ds["index"].values.tolist() == [*range(30)]


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    try:
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_plan_holds_a_few_numbers_a_prompt(model: Path) -> None:
    few, many = (peak(partial(qp.estimate, model, LazyPrompts(size, prompt), state_at=[3])) for size in (100, 1100))
    assert many - few < 100 * 1000


def test_a_trace_does_not_hold_its_tokens(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "IN_MEMORY", 0)  # what opening loads is bounded, and none of the trace's
    qp.trace(model, [prompt(0)], tmp_path / "first.zarr")  # an import may not pass for growth
    few, many = (peak(partial(qp.trace, model, LazyPrompts(n, prompt), tmp_path / f"{n}.zarr")) for n in (16, 48))
    assert many - few < 4 * 32 * LENGTH


def test_a_source_that_changes_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    prompts = qp.file_prompts(path, qp.ByteTokenizer())
    going = plan.make_plan(model, prompts)
    path.write_text("one\nTwo\n")
    assert going.prompts[0].tokens.tolist() == [*b"one"]
    with pytest.raises(qp.InputError, match=r"prompt 2: .*its source has changed"):
        going.prompts[1]
