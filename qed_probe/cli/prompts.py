"""Where a command's prompts come from: options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

import qed_probe as qp
from qed_probe.cli.options import USUAL
from qed_probe.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from qed_probe.tasks.prompts import Tokenizer

Text = Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="One prompt a line, or .jsonl with 'text' or 'tokens'.")]
Tokens = Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Token ids, [T] or [N, T].")]
Chat = Annotated[bool, typer.Option("--chat", help="Texts are a user's messages, in the tokenizer's chat template.")]
Task = Annotated[str | None, typer.Option(help="niah (where no prompts are given), niah-2, niah-3 or reassignment.")]
Length = Annotated[int | None, typer.Option(help="Tokens a sample of the task; the model's training length if left out.")]
Samples = Annotated[int | None, typer.Option(help="Samples of the task; 16 if left out.")]


def is_store(subject: str | None, asked: dict[str, Any], run: dict[str, Any]) -> TypeGuard[str]:
    """Whether a command is to look into a trace; raises InputError for options of prompts, and of a ``run``, if it is."""
    from qed_probe.store import place

    if subject is None or not (place.found(Path(subject)) / "zarr.json").exists():
        return False
    asked = asked | {f"--{name}": value != USUAL[name] for name, value in run.items()}
    if given := [option for option, value in asked.items() if value]:
        raise InputError(f"{', '.join(given)}: expected with a checkpoint, found with the store {subject}")
    return True


def chosen_prompts(
    checkpoint: str | None,
    sources: dict[str, Any],
    length: int | None,
    samples: int | None,
    seed: int,
    trust: bool,
    *,
    chat: bool,
    usual: int = 16,
) -> "Sequence[qp.Prompt]":
    """The prompts of whichever source is named, ``usual`` of the task ``niah`` if none is; raises InputError for two of them."""
    given = [option for option, value in sources.items() if value]
    if len(given) > 1:
        raise InputError(f"expected one source of prompts, found {' and '.join(given)}")
    sized = [option for option, value in {"--length": length, "--samples": samples}.items() if value is not None]
    if sized and given and given != ["--task"]:
        raise InputError(f"{' and '.join(sized)}: expected with a task, found with {given[0]}")
    task = sources["--task"] or "niah"
    if task not in qp.TASKS:
        raise InputError(f"--task: expected one of {', '.join(qp.TASKS)}, found {task!r}")
    if chat and not (sources["--text"] or sources["--prompts"]):
        raise InputError(f"--chat: expected text, with --text or --prompts, found {given[0] if given else 'no prompts'}")
    if sources["--tokens"]:
        return qp.token_prompts(sources["--tokens"], qp.describe(checkpoint, trust_remote_code=trust).vocab_size)
    if sources["--prompts"]:
        return qp.file_prompts(sources["--prompts"], _for_lines(checkpoint, trust, chat=chat), ids=not chat)
    tokenizer = qp.find_tokenizer(checkpoint, trust_remote_code=trust, chat=chat)
    if sources["--text"]:
        return qp.text_prompts(sources["--text"], tokenizer)
    if not isinstance(tokenizer, qp.ByteTokenizer):
        raise InputError(
            f"--task {task}: expected a model over bytes, found one over other tokens; use --text, --prompts or --tokens"
        )
    length = _training_length(checkpoint) if length is None else length
    return qp.task_prompts(task, length, usual if samples is None else samples, seed)


class _Unusable:
    """A tokenizer that cannot be used, which is said where a text asks for it: token ids need none."""

    def __init__(self, error: CheckpointError) -> None:
        self.error = error

    def encode(self, text: str, /) -> "NDArray[np.int64]":
        raise self.error


def _for_lines(checkpoint: str | None, trust: bool, *, chat: bool) -> "Tokenizer | None":
    try:
        return qp.find_tokenizer(checkpoint, trust_remote_code=trust, chat=chat)
    except CheckpointError as error:
        return _Unusable(error)


def _training_length(checkpoint: str | None) -> int:
    length = qp.read_provenance(checkpoint).get("recipe", {}).get("length")
    if length is None:
        raise InputError("--length: expected a number, as the checkpoint does not say at which length it was trained; found none")
    return int(length)


def integers(option: str, text: str | None) -> list[int] | None:
    """Whole numbers with commas between them; raises InputError naming the option."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option}: expected whole numbers with commas between them, found {text!r}") from None
