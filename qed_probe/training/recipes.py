"""How a model is trained, apart from what it is."""

from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any

from qed_probe.errors import InputError
from qed_probe.tasks.table import TASKS

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Recipe:
    """Everything that fixes a training run but the model's config, the seed and the data.

    A step sees ``batch`` sequences of ``length`` tokens, ``micro_batch`` at a time. ``rate`` is the peak of the WSD schedule,
    ``warmup`` its first steps and ``decay`` the share of the steps in which it falls; θ takes ``theta_rate_factor`` times it. The
    task ``tokens`` minimises the plain language model's loss over a file of ids, one of ``TASKS`` lm_weight·(mean loss of all
    tokens) + mean loss of the answer's. ``bfloat16`` is autocast over float32 master weights. A line is logged every
    ``log_every`` steps, and the run is saved every ``save_every``, a multiple of it. Raises InputError if a value cannot be used.
    """

    steps: int
    batch: int
    length: int
    rate: float
    micro_batch: int
    task: str
    precision: str = "float32"
    warmup: int = 100
    decay: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    theta_rate_factor: float = 10.0
    lm_weight: float = 0.2
    log_every: int = 10
    save_every: int = 250

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and not (type(value) is int and value >= 1):
                raise InputError(f"recipe, {field.name}: expected a whole number of at least 1, found {value!r}")
            if field.type is float and not (type(value) in (int, float) and isfinite(value) and value >= 0):
                raise InputError(f"recipe, {field.name}: expected a finite number of at least 0, found {value!r}")
        expectations = (
            ("length", self.length >= 2, "at least 2, as the first token is only ever read"),
            ("micro_batch", self.batch % self.micro_batch == 0, f"a divisor of the batch, {self.batch}"),
            ("save_every", self.save_every % self.log_every == 0, f"a multiple of log_every, {self.log_every}"),
            ("decay", self.decay <= 1, "a share of the steps, at most 1"),
            ("clip", self.clip > 0, "more than 0"),
            ("task", self.task in (*TASKS, "tokens"), f"one of {', '.join((*TASKS, 'tokens'))}"),
            ("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
        )
        for name, holds, expected in expectations:
            if not holds:
                raise InputError(f"recipe, {name}: expected {expected}, found {getattr(self, name)!r}")


RECIPES: dict[str, Recipe] = {
    "tiny": Recipe(steps=2000, batch=64, length=512, rate=5e-4, micro_batch=64, task="niah", precision="bfloat16", warmup=500),
    "340m": Recipe(
        steps=15_000_000_000 // 524_288,
        batch=256,
        length=2048,
        rate=3e-4,
        micro_batch=8,
        task="tokens",
        precision="bfloat16",
        warmup=1000,
        save_every=500,
    ),
}
"""By the names of the model presets. ``tiny`` was found on gdn2 alone, by what it learns at the training length, with seeds that
nothing else uses, from 100 on (docs/experiments.md). ``340m`` has the rate, batch, length, tokens, precision and decay of QED
(arXiv 2608.13668, Sec. 4); its warm-up, weight decay and clipping are the usual ones, as the paper gives none."""
_OWN: dict[tuple[str, str], dict[str, Any]] = {("tiny", "reassignment"): {"steps": 6000, "rate": 1e-3}}
"""What a preset's recipe has to have otherwise for a task; found in the same way."""


def find_recipe(preset: str, task: str | None = None) -> Recipe:
    """The recipe of a preset, for its own task unless one is given; raises InputError for an unknown name."""
    if preset not in RECIPES:
        raise InputError(f"preset: expected one of {', '.join(RECIPES)}, found {preset!r}")
    recipe = RECIPES[preset]
    return recipe if task is None else replace(recipe, task=task, **_OWN.get((preset, task), {}))
