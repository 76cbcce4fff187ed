"""Reference models: a recipe, a schedule and one training loop that can be stopped and resumed."""

from qed_probe.training.arms import arm
from qed_probe.training.grid import GRID, Job, train_grid
from qed_probe.training.history import read_history
from qed_probe.training.objective import evaluate_task
from qed_probe.training.recipes import RECIPES, Recipe, find_recipe
from qed_probe.training.schedule import wsd
from qed_probe.training.train import train

__all__ = [
    "GRID",
    "RECIPES",
    "Job",
    "Recipe",
    "arm",
    "evaluate_task",
    "find_recipe",
    "read_history",
    "train",
    "train_grid",
    "wsd",
]
