"""Prompts: read from a user's files, or made with a known answer."""

from qed_probe.tasks.niah import niah_prompts, niah_tokens
from qed_probe.tasks.prompts import Prompt, check_prompts, file_prompts, open_ids, text_prompts, token_prompts

__all__ = [
    "Prompt",
    "check_prompts",
    "file_prompts",
    "niah_prompts",
    "niah_tokens",
    "open_ids",
    "text_prompts",
    "token_prompts",
]
