"""Prompts: read from a user's files, or made with a known answer."""

from qed_probe.tasks.prompts import Prompt, check_prompts, file_prompts, open_ids, text_prompts, token_prompts
from qed_probe.tasks.samples import Task
from qed_probe.tasks.table import TASKS, niah_prompts, task_prompts

__all__ = [
    "TASKS",
    "Prompt",
    "Task",
    "check_prompts",
    "file_prompts",
    "niah_prompts",
    "open_ids",
    "task_prompts",
    "text_prompts",
    "token_prompts",
]
