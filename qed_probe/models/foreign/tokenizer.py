"""The tokenizer that a checkpoint of transformers brings along."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.models.foreign.library import quiet, refusals, refuse_elsewhere, transformers

SETTINGS = "tokenizer_config.json"
FILES = ("tokenizer.json", SETTINGS, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class ForeignTokenizer:
    """A tokenizer of transformers.

    Texts begin with whatever it puts before them by itself; with ``chat`` each is a user's message in its chat template, up to
    where the answer begins.
    """

    def __init__(self, inner: Any, directory: Path, *, chat: bool = False) -> None:  # noqa: ANN401 - of the library
        self._inner, self._directory, self._chat = inner, directory, chat

    def encode(self, text: str, /) -> NDArray[np.int64]:
        """Token ids of a text, int64 ``[T]``.

        Raises UnicodeEncodeError for a lone surrogate, and CheckpointError where the tokenizer or its chat template fails.
        """
        text.encode()
        if not self._chat:
            with quiet(), refusals(self._directory, "a tokenizer that can read the text"):
                return np.array(self._inner.encode(text), np.int64)
        messages = [{"role": "user", "content": text}]
        with quiet(), refusals(self._directory, "a chat template that takes a user's message"):
            ids = self._inner.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return np.array(ids, np.int64)

    def pieces(self, ids: Sequence[int] | NDArray[np.int64], /) -> list[str]:
        r"""One printable string a token: its text, what cannot be printed as an escape such as ``\n``; empty if it has none."""
        known = {int(i): self._piece(int(i)) for i in np.unique(ids)}
        return [known[int(i)] for i in ids]

    def _piece(self, index: int) -> str:
        try:
            return _printable(self._inner.decode([index]))
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):  # of an id that only pads the model's vocabulary
            return ""


def find_tokenizer(directory: Path, *, trust_remote_code: bool = False, chat: bool = False) -> ForeignTokenizer | None:
    """The checkpoint's tokenizer, None if it has no file of one.

    Raises CheckpointError for one that cannot be used, and InputError for one that lacks the template that ``chat`` needs.
    """
    if not any((directory / name).is_file() for name in FILES):
        return None
    auto = transformers(directory).AutoTokenizer
    with quiet(), refusals(directory, "a tokenizer that transformers can read"):
        if trust_remote_code and (directory / SETTINGS).is_file():
            refuse_elsewhere(json.loads((directory / SETTINGS).read_text(encoding="utf-8")), directory)
        inner = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    if chat and not inner.chat_template:
        raise InputError(f"chat: expected a tokenizer with a chat template in {directory}, found one without")
    return ForeignTokenizer(inner, directory, chat=chat)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
