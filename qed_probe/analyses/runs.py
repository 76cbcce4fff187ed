"""Outcomes by run: which checkpoint answered what, as pandas tables, the samples of two of them paired."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from qed_probe.errors import InputError, StoreError

RUN = ("model", "arm", "seed", "lambda_max", "task", "trained_length", "learned_at")
"""What all outcomes of a run share; arm, seed and task tell runs apart."""
USUAL = 0.25
"""QED's λ_max, which an arm's name does not mention."""


def judged(outcomes: xr.Dataset) -> pd.DataFrame:
    """Outcomes as a table, a row each, with ``arm`` naming a λ_max that is not the usual one (``qed-max0.5``).

    Raises StoreError for outcomes without answers, and for two runs of the same arm, seed and task; runs of unknown seed may be
    any number, told apart by their models.
    """
    if "correct" not in outcomes:
        raise StoreError("expected outcomes with answers, found losses alone")
    frame = pd.DataFrame({str(name): values.values for name, values in outcomes.data_vars.items()})
    other = frame["lambda_max"].notna() & (frame["lambda_max"] != USUAL)
    named = frame["arm"] + "-max" + frame["lambda_max"].map(short)
    frame["arm"] = np.where(other, named, frame["arm"])
    runs = frame[frame["seed"] >= 0].drop_duplicates([*RUN])
    twice = runs[runs.duplicated(["arm", "seed", "task"], keep=False)]
    if len(twice):
        one, two, *_ = twice.sort_values(["arm", "seed", "task"]).itertuples()
        raise StoreError(
            f"expected one run of each arm, seed and task, found {one.model} and {two.model}, both {one.arm} seed {one.seed} "
            f"on {one.task}"
        )
    return frame


def short(number: float) -> str:
    """The fewest digits that are this number and no other."""
    return repr(float(number)).removesuffix(".0")


def trained(frame: pd.DataFrame) -> int:
    """The length that all runs were trained at, 0 if it is unknown or not one."""
    lengths = frame["trained_length"].unique()
    return int(lengths[0]) if len(lengths) == 1 else 0


def one_task(frame: pd.DataFrame, task: str | None) -> pd.DataFrame:
    """The rows of a task, which may be left out where there is only one; raises InputError."""
    there = sorted(frame["task"].unique())
    if (task is None and len(there) > 1) or (task is not None and task not in there):
        raise InputError(f"task: expected one of {', '.join(there)}, found {task or 'none'}")
    return frame[frame["task"] == task] if task is not None else frame


def of_run(frame: pd.DataFrame, arm: str, seed: int) -> pd.DataFrame:
    """The rows of one run, by length and index."""
    found = frame[(frame["arm"] == arm) & (frame["seed"] == seed)]
    return found.set_index(["length", "index"]).sort_index()


def check_pairs(first: pd.DataFrame, second: pd.DataFrame, names: Sequence[str]) -> None:
    """Raise StoreError unless two runs, as ``of_run`` gives them, answered the same samples; ``names`` say which they are."""
    ways = (first, second, names[0], names[1]), (second, first, names[1], names[0])
    for mine, theirs, name, other in ways:
        alone = mine.index.difference(theirs.index)
        if len(alone):
            length, index = alone[0]
            raise StoreError(
                f"expected {names[0]} and {names[1]} to have answered the same samples; length {length}, sample {index} and "
                f"{len(alone) - 1:,} more of {name} are not in {other}"
            )
    differing = (first["fingerprint"] != second["fingerprint"]).to_numpy()
    if differing.any():
        length, index = first.index[int(differing.argmax())]
        raise StoreError(
            f"expected {names[0]} and {names[1]} to have answered the same samples, found others at length {length}, "
            f"first sample {index}"
        )


def learned(frame: pd.DataFrame) -> pd.Series:
    """Whether each row's run had learned the task by the end of its training, as far as that is known."""
    return frame["learned_at"] > 0


def unchanged(frame: pd.DataFrame) -> pd.DataFrame:
    """What the models answered as they are."""
    return frame[(frame["strength"] == 1) & (frame["direction"] == "own") & (frame["mode"] == "full")]
