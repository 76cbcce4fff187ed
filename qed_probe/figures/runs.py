"""How runs are told apart: each arm by its colour, each seed by its mark."""

from collections.abc import Iterable
from itertools import cycle
from typing import Any

import numpy as np
import xarray as xr

from qed_probe.figures import style

# The papers' arms in the papers' order; the baselines are grey, and an arm of one paper has the colour of its kin in the other.
COLOURS = {
    "gdn2": style.GREY, "qed": style.BLUE, "qed-nogate": style.ORANGE, "qed-nogate-noproj": style.VERMILION,
    "qed-rand": style.GREEN, "qed-noproj": style.PURPLE,
    "kda": style.GREY, "kda-safegate": style.SKY, "eda": style.BLUE, "eda-same": style.ORANGE, "eda-rand": style.GREEN,
    "eda-reversed": style.PURPLE, "eda-gdn2": style.VERMILION,
}  # fmt: skip
# Yellow is not among them: a thin line of it is lost on white.
FREE = (style.BLUE, style.VERMILION, style.GREEN, style.ORANGE, style.PURPLE, style.SKY, style.GREY)
MARKERS = {"o": 3.2, "s": 3.0, "^": 3.4, "D": 2.8, "v": 3.4, "P": 3.6, "X": 3.6, "*": 4.4}


def arms(ds: xr.Dataset) -> list[str]:
    """The arm of each run, with the bound of its λ where one arm has several."""
    names = [str(name) for name in ds["arm"].values]
    bounds = [float(x) for x in ds["lambda_max"].values] if "lambda_max" in ds else [np.nan] * len(names)
    pairs = list(zip(names, bounds, strict=True))
    several = {name for name in names if len({x for other, x in pairs if other == name and np.isfinite(x)}) > 1}
    return [f"{name} (λ ≤ {x:g})" if name in several else name for name, x in pairs]


def seeds(ds: xr.Dataset) -> list[str]:
    """What tells the runs of an arm apart: the training seed or, where that is unknown, the model's name."""
    pairs = zip(ds["model"].values, ds["seed"].values, strict=True)
    return [seed_name(seed) if seed >= 0 else shorten(str(model)) for model, seed in pairs]


def seed_name(seed: int) -> str:
    """A seed as legends name it."""
    return f"seed {seed}"


def shorten(name: str, most: int = 24) -> str:
    """The end of a long name, which is what the names of one folder differ in."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def tasks(ds: xr.Dataset) -> list[str]:
    """The tasks, each once, as they come."""
    return list(dict.fromkeys(str(task) for task in ds["task"].values))


def titles(ds: xr.Dataset) -> list[str]:
    """Arm, seed and, where there are several tasks, the task of each run."""
    several = len(tasks(ds)) > 1
    parts = zip(ds["task"].values, arms(ds), seeds(ds), strict=True)
    return [f"{task}: " * several + f"{arm}, {seed}" for task, arm, seed in parts]


def in_order(arms: Iterable[str]) -> list[str]:
    """Each arm once: the papers' in the papers' order, then the others as they come."""
    places = {arm: place for place, arm in enumerate(COLOURS)}
    return sorted(dict.fromkeys(arms), key=lambda arm: places.get(arm.partition(" (")[0], len(places)))


def by_seed(seeds: Iterable[str]) -> list[str]:
    """Each seed once, by number, then the models by name."""
    numbers = {name: int(digits) for name in seeds if (digits := name.removeprefix("seed ")).isdecimal()}
    return [*sorted(numbers, key=numbers.__getitem__), *sorted(set(seeds) - set(numbers))]


def colours(arms: Iterable[str]) -> dict[str, str]:
    """The colour of each arm, in the papers' order: its own where that is free, else the next free one, else one twice."""
    names = in_order(arms)
    found: dict[str, str] = {}
    for name in names:
        if name in COLOURS and COLOURS[name] not in found.values():
            found[name] = COLOURS[name]
    free = [colour for colour in FREE if colour not in found.values()]
    others = [name for name in names if name not in found]
    found |= zip(others, free, strict=False)
    again = cycle(FREE)
    return {name: found.get(name) or COLOURS.get(name) or next(again) for name in names}


def marks(seeds: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The mark of each seed, in order: each marker filled, then hollow."""
    looks = [_mark(marker, hollow) for marker in MARKERS for hollow in (False, True)]
    return dict(zip(by_seed(seeds), cycle(looks), strict=False))


def _mark(marker: str, hollow: bool) -> dict[str, Any]:
    look = {"marker": marker, "markersize": MARKERS[marker], "markeredgewidth": 0.6}
    return look | ({"markerfacecolor": "white"} if hollow else {})
