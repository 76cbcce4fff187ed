"""Prompts and the files they come from; everything a user can get wrong in a prompt is refused here."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qed_probe.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """Token ids, int64 ``[T]``, and what a task knows about them.

    ``roles`` ``[T]`` names what each token is part of (needle, question, answer, noise …), ``answer`` the span of tokens that a
    model should predict, ``details`` holds numbers that belong to the whole prompt (length, depth …).
    """

    tokens: NDArray[np.int64]
    roles: NDArray[np.str_] | None = None
    answer: slice | None = None
    details: dict[str, float] = field(default_factory=dict)


class Tokenizer(Protocol):
    """Whatever turns text into token ids."""

    def encode(self, text: str, /) -> NDArray[np.int64]:
        """Token ids of a text, int64 ``[T]``."""


def text_prompts(texts: Iterable[str], tokenizer: Tokenizer | None) -> list[Prompt]:
    """One prompt a text.

    Raises InputError if there is no text or an empty one, or no tokenizer.
    """
    return _some([Prompt(_encode(text, tokenizer, f"text {i}")) for i, text in enumerate(texts, 1)], "--text")


def file_prompts(path: str | Path, tokenizer: Tokenizer | None) -> list[Prompt]:
    """One prompt a line of a UTF-8 file.

    A line is plain text, or, in a ``.jsonl`` file, an object with ``"text"`` or ``"tokens"``, a list of ids, which needs no
    tokenizer. Raises InputError, with file and line, for a file that cannot be read or is not UTF-8, an empty prompt and a line
    that holds no prompt.
    """
    path = Path(path)
    read = _json_line if path.suffix == ".jsonl" else _encode
    lines = enumerate(_lines(path), 1)
    return _some([Prompt(read(line, tokenizer, f"{path}, line {number}")) for number, line in lines], str(path))


def token_prompts(path: str | Path, vocab_size: int) -> list[Prompt]:
    """Prompts of a ``.npy`` file of integer ids: ``[T]`` is one prompt, ``[N, T]`` is one a row.

    Raises InputError for a file that is not such an array, an empty one, and ids outside ``[0, vocab_size)``.
    """
    prompts = [Prompt(row.astype(np.int64)) for row in np.atleast_2d(open_ids(path)) if row.size]
    check_prompts(_some(prompts, str(path)), vocab_size)
    return prompts


def check_prompts(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """Raise InputError for no prompts, one without tokens, and, with prompt and token, an id outside ``[0, vocab_size)``."""
    if not prompts:
        raise InputError("expected at least one prompt, found none")
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt.tokens):
            raise InputError(f"expected at least one token in each prompt, found none in prompt {number}")
        outside = np.flatnonzero((prompt.tokens < 0) | (prompt.tokens >= vocab_size))
        if outside.size:
            found = f"found {prompt.tokens[outside[0]]} in prompt {number}, token {outside[0]}"
            raise InputError(f"expected token ids from 0 to {vocab_size - 1}, the model's vocabulary; {found}")


def open_ids(path: str | Path) -> NDArray[np.integer]:
    """Memory-map a ``.npy`` file of integer token ids, ``[T]`` or ``[N, T]``, without reading it.

    Raises InputError for anything else.
    """
    try:
        ids = np.lib.format.open_memmap(str(path), mode="r")
    except OSError as error:
        raise InputError(f"expected a .npy file of token ids at {path}; {_reason(error)}") from error
    except ValueError as error:
        raise InputError(f"expected a .npy file of token ids, found something else in {path}: {error}") from error
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2):
        found = f"{ids.dtype} of shape {ids.shape}"
        raise InputError(f"expected integer token ids of shape [tokens] or [prompts, tokens], found {found} in {path}")
    return ids


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"expected a file of prompts at {path}; {_reason(error)}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"expected UTF-8 text, found byte 0x{error.object[error.start]:02x} in {path}, line {line}") from error
    return text.removesuffix("\n").replace("\r\n", "\n").split("\n") if text else []


def _json_line(line: str, tokenizer: Tokenizer | None, where: str) -> NDArray[np.int64]:
    expected = 'expected a JSON object with either "text" or "tokens"'
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{expected}, found no JSON in {where}: {error}") from error
    match item:
        case {"text": _, "tokens": _}:
            raise InputError(f"{expected}, found both in {where}")
        case {"text": str(text)}:
            return _encode(text, tokenizer, where)
        case {"tokens": [*tokens]}:
            return _ids(tokens, where)
    raise InputError(f"{expected}, a string or a list of integers; found {_short(item)} in {where}")


def _ids(tokens: list[object], where: str) -> NDArray[np.int64]:
    if not tokens:
        raise InputError(f"expected at least one token, found an empty prompt in {where}")
    for place, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < 2**63:
            raise InputError(f"expected token ids, integers from 0; found {_short(token)} at token {place} in {where}")
    return np.array(tokens, np.int64)


def _encode(text: str, tokenizer: Tokenizer | None, where: str) -> NDArray[np.int64]:
    if tokenizer is None:
        raise InputError(f"expected token ids, because the model has no tokenizer; found text in {where}")
    if not text:
        raise InputError(f"expected at least one character, found an empty prompt in {where}")
    try:
        return tokenizer.encode(text)
    except UnicodeEncodeError as error:
        raise InputError(f"expected text that UTF-8 can hold, found a lone surrogate in {where}") from error


def _some(prompts: list[Prompt], where: str) -> list[Prompt]:
    if not prompts:
        raise InputError(f"expected at least one prompt, found none in {where}")
    return prompts


def _reason(error: OSError) -> str:
    return f"found {(error.strerror or str(error)).lower()}"


def _short(item: object) -> str:
    shown = json.dumps(item)
    return shown if len(shown) <= 60 else shown[:57] + "..."
