"""See what happens inside the memory of delta-rule linear attention.

``import qed_probe as qp`` imports nothing else: each name below is imported from its room when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qed_probe import analyses, errors, figures, kernels, models, store, tasks, training
    from qed_probe.eigen import Verdict, compare_eigen, merge_eigen, tally_eigen, tally_eigen_store, verdicts
    from qed_probe.errors import CheckFailed, CheckpointError, InputError, QedProbeError, StoreError
    from qed_probe.evaluation import evaluate, patch
    from qed_probe.gallery import DIAGNOSTICS, contrast, contrast_published, contrast_traces, diff, plot
    from qed_probe.kernels import MIXERS, Mixer, Tokens, recurrence, reference, run
    from qed_probe.memory import inspect_memory, inspect_memory_store, read_weights
    from qed_probe.models.capture import Captured, capture
    from qed_probe.models.checkpoint import load as load_model
    from qed_probe.models.checkpoint import locate, read_config, read_provenance
    from qed_probe.models.checkpoint import save as save_model
    from qed_probe.models.config import PRESETS, ModelConfig, preset
    from qed_probe.models.intervention import Intervention
    from qed_probe.models.language import LanguageModel
    from qed_probe.models.opening import describe, find_tokenizer
    from qed_probe.models.tokenizer import ByteTokenizer
    from qed_probe.replays import replay, replay_store
    from qed_probe.store.eigen import open_eigen, save_eigen
    from qed_probe.store.harness import read_harness
    from qed_probe.store.memory import open_memory, save_memory
    from qed_probe.store.outcomes import check_free, export_outcomes, open_outcomes, save_outcomes
    from qed_probe.store.patching import open_patches, save_patches
    from qed_probe.store.reader import IncompleteStoreWarning, open, open_inputs, open_states
    from qed_probe.store.replays import open_replays, save_replays
    from qed_probe.tasks import TASKS, Prompt, Task, file_prompts, niah_prompts, task_prompts, text_prompts, token_prompts
    from qed_probe.tracing import Estimate, estimate, trace
    from qed_probe.training import GRID, RECIPES, Job, Recipe, arm, find_recipe, read_history, train, train_grid

__version__ = "0.1.0"

__all__ = [
    "DIAGNOSTICS", "GRID", "MIXERS", "PRESETS", "RECIPES", "TASKS", "ByteTokenizer", "Captured", "CheckFailed",
    "CheckpointError", "Estimate", "IncompleteStoreWarning", "InputError", "Intervention", "Job", "LanguageModel", "Mixer",
    "ModelConfig", "Prompt", "QedProbeError", "Recipe", "StoreError", "Task", "Tokens", "Verdict", "__version__", "analyses",
    "arm", "capture", "check_free", "compare_eigen", "contrast", "contrast_published", "contrast_traces", "describe", "diff",
    "errors", "estimate", "evaluate", "export_outcomes", "figures", "file_prompts", "find_recipe", "find_tokenizer",
    "inspect_memory", "inspect_memory_store", "kernels", "load_model", "locate", "merge_eigen", "models", "niah_prompts",
    "open", "open_eigen", "open_inputs", "open_memory", "open_outcomes", "open_patches", "open_replays", "open_states",
    "patch", "plot", "preset", "read_config", "read_harness", "read_history", "read_provenance", "read_weights", "recurrence",
    "reference", "replay", "replay_store", "run", "save_eigen", "save_memory", "save_model", "save_outcomes", "save_patches",
    "save_replays", "store", "tally_eigen", "tally_eigen_store", "task_prompts", "tasks", "text_prompts", "token_prompts",
    "trace", "train", "train_grid", "training", "verdicts",
]  # fmt: skip

_ROOMS = ("analyses", "errors", "figures", "kernels", "models", "store", "tasks", "training")
_HOMES = {
    "eigen": ("Verdict", "compare_eigen", "merge_eigen", "tally_eigen", "tally_eigen_store", "verdicts"),
    "errors": ("CheckFailed", "CheckpointError", "InputError", "QedProbeError", "StoreError"),
    "evaluation": ("evaluate", "patch"),
    "gallery": ("DIAGNOSTICS", "contrast", "contrast_published", "contrast_traces", "diff", "plot"),
    "kernels": ("MIXERS", "Mixer", "Tokens", "recurrence", "reference", "run"),
    "memory": ("inspect_memory", "inspect_memory_store", "read_weights"),
    "models.capture": ("Captured", "capture"),
    "models.checkpoint": ("load as load_model", "locate", "read_config", "read_provenance", "save as save_model"),
    "models.config": ("PRESETS", "ModelConfig", "preset"),
    "models.intervention": ("Intervention",),
    "models.language": ("LanguageModel",),
    "models.opening": ("describe", "find_tokenizer"),
    "models.tokenizer": ("ByteTokenizer",),
    "replays": ("replay", "replay_store"),
    "store.harness": ("read_harness",),
    "store.eigen": ("open_eigen", "save_eigen"),
    "store.memory": ("open_memory", "save_memory"),
    "store.outcomes": ("check_free", "export_outcomes", "open_outcomes", "save_outcomes"),
    "store.patching": ("open_patches", "save_patches"),
    "store.replays": ("open_replays", "save_replays"),
    "store.reader": ("IncompleteStoreWarning", "open", "open_inputs", "open_states"),
    "tasks": ("TASKS", "Prompt", "Task", "file_prompts", "niah_prompts", "task_prompts", "text_prompts", "token_prompts"),
    "tracing": ("Estimate", "estimate", "trace"),
    "training": ("GRID", "RECIPES", "Job", "Recipe", "arm", "find_recipe", "read_history", "train", "train_grid"),
}
_SOURCES = {name.split()[-1]: (home, name.split()[0]) for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name in _ROOMS:
        return import_module(f"qed_probe.{name}")
    if name not in _SOURCES:
        raise AttributeError(f"module 'qed_probe' has no attribute {name!r}")
    home, source = _SOURCES[name]
    value = getattr(import_module(f"qed_probe.{home}"), source)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
