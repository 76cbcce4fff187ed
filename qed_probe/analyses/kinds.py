"""What a model answers where values change: the current value of what is asked for, a stale one, or another variable's."""

from operator import eq

import numpy as np
import pandas as pd
import xarray as xr

from qed_probe.analyses.accuracy import labels
from qed_probe.analyses.runs import RUN, judged, unchanged
from qed_probe.errors import StoreError
from qed_probe.tasks.reassignment import KINDS, REASSIGNMENT, kinds

EVERY = (*KINDS, "none")


def answer_kinds(outcomes: xr.Dataset, seed: int = 0) -> xr.Dataset:
    """How many answers to the task ``reassignment`` are of each kind, of each run and length, at strength 1.

    Dims ``run``, labelled as by ``accuracy``, ``length`` (tokens) and ``kind``: ``answers`` that are the current value, which is
    the right one, a stale one of the same variable, another variable's current or stale one (other, other-stale), or no value
    of the sample (none). Dims run and length: ``latest``, answers that are the value assigned last of all, right or not; who
    overlooks the keys answers so. ``agreement``, of the answers that are no value: the share of digits that are, place for
    place, those of a value of each kind, the mean over such values and answers; a tenth by chance, and NaN where there is none.
    The samples are made again, from the ``seed`` that ``evaluate`` was given.

    Raises StoreError as ``judged`` does, without outcomes of the task at strength 1, and if these are of other samples.
    """
    frame = judged(outcomes)
    frame = unchanged(frame[frame["task"] == REASSIGNMENT.name])
    if frame.empty:
        raise StoreError(f"expected outcomes of the task {REASSIGNMENT.name} at strength 1, found none")
    values = _values(frame, seed)
    rows = zip(frame["prediction"], frame["length"], frame["index"], strict=True)
    table = pd.DataFrame([_judge(answer, values[length, index]) for answer, length, index in rows], frame.index)
    grouped = table.groupby([frame[name] for name in (*RUN, "length")], dropna=False)
    latest = grouped["latest"].sum().unstack("length", fill_value=0)
    counts = grouped[[*EVERY]].sum().unstack("length", fill_value=0)
    means = grouped[[f"as {kind}" for kind in EVERY]].mean().unstack("length")
    dims = ("run", "length", "kind")
    return xr.Dataset(
        {
            "answers": (dims, np.stack([counts[kind] for kind in EVERY], -1)),
            "latest": (dims[:2], latest.to_numpy()),
            "agreement": (dims, np.stack([means[f"as {kind}"] for kind in EVERY], -1), {"units": "1"}),
        },
        labels(latest) | {"length": ("length", latest.columns.to_numpy()), "kind": ("kind", np.array(EVERY))},
    )


def _judge(answer: str, values: dict[str, str]) -> dict[str, float]:
    """Of one answer what is added up, 0 or 1, and as a value of which kind its digits are, NaN where it is a value itself."""
    kind = values.get(answer, "none")
    found = {"latest": int(answer == [*values][-1])} | {each: int(kind == each) for each in EVERY}
    alike: dict[str, list[float]] = {each: [] for each in EVERY}
    for value, each in values.items() if kind == "none" else ():
        alike[each].append(sum(map(eq, answer, value)) / len(value))
    return found | {f"as {each}": float(np.mean(shares)) if shares else np.nan for each, shares in alike.items()}


def _values(frame: pd.DataFrame, seed: int) -> dict[tuple[int, int], dict[str, str]]:
    """What ``kinds`` says of each sample, by length and index."""
    samples = frame[["length", "index", "fingerprint"]].drop_duplicates().to_numpy()
    found = {}
    for length, index, fingerprint in samples.tolist():
        prompt = REASSIGNMENT.prompts(length, index + 1, seed)[index]
        if prompt.fingerprint != fingerprint:
            raise StoreError(f"expected answers to the samples of seed {seed}, found others at length {length}, sample {index}")
        found[length, index] = kinds(prompt)
    return found
