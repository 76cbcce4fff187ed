"""The tasks by name."""

from collections.abc import Sequence

from qed_probe.errors import InputError
from qed_probe.tasks.niah import NIAH
from qed_probe.tasks.prompts import Prompt
from qed_probe.tasks.reassignment import REASSIGNMENT
from qed_probe.tasks.samples import Task

TASKS: dict[str, Task] = {task.name: task for task in (*NIAH, REASSIGNMENT)}


def task_prompts(name: str, length: int, samples: int, seed: int, depth: float | None = None) -> Sequence[Prompt]:
    """What ``Task.prompts`` gives, of the task of this name; raises InputError for no such task, and as that does."""
    if name not in TASKS:
        raise InputError(f"task: expected one of {', '.join(TASKS)}, found {name!r}")
    return TASKS[name].prompts(length, samples, seed, depth=depth)


def niah_prompts(length: int, samples: int, seed: int, *, depth: float | None = None) -> Sequence[Prompt]:
    """Samples of the task ``niah``, as ``task_prompts`` gives them."""
    return task_prompts("niah", length, samples, seed, depth)
