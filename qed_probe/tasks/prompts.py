"""Prompts and the files they come from; everything a user can get wrong in a prompt is refused here."""

import contextlib
import hashlib
import io
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO, Protocol, overload

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

    @property
    def fingerprint(self) -> int:
        """64 bits that tell this prompt from others; neither the integer type nor the width of a string matters."""
        known = (len(self.tokens), self.answer and (self.answer.start, self.answer.stop), sorted(self.details.items()))
        digest = hashlib.sha256(repr(known).encode())
        digest.update(np.asarray(self.tokens, "<i8").tobytes())
        if self.roles is not None:
            roles = np.asarray(self.roles)
            begun = np.flatnonzero(np.append(True, roles[1:] != roles[:-1]))
            digest.update(begun.astype("<i8").tobytes())
            digest.update("\0".join(roles[begun]).encode())
        return int.from_bytes(digest.digest()[:8], "little", signed=True)


@dataclass(frozen=True, eq=False)
class LazyPrompts(Sequence[Prompt]):
    """``length`` prompts of which ``make(index)`` makes one whenever it is asked for; none is kept."""

    length: int
    make: Callable[[int], Prompt]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.make, range(self.length))

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> "LazyPrompts": ...
    def __getitem__(self, index: int | slice) -> "Prompt | LazyPrompts":
        which = range(self.length)[index]
        return self.make(which) if isinstance(which, int) else LazyPrompts(len(which), lambda at: self.make(which[at]))


class Tokenizer(Protocol):
    """Whatever turns text into token ids."""

    def encode(self, text: str, /) -> NDArray[np.int64]:
        """Token ids of a text, int64 ``[T]``."""


def text_prompts(texts: Iterable[str], tokenizer: Tokenizer | None) -> Sequence[Prompt]:
    """One prompt a text.

    Raises InputError if there is no text or an empty one, or no tokenizer.
    """
    return _some([Prompt(_encode(text, tokenizer, f"text {i}")) for i, text in enumerate(texts, 1)], "the texts")


def file_prompts(path: str | Path, tokenizer: Tokenizer | None, *, ids: bool = True) -> Sequence[Prompt]:
    """One prompt a line of a UTF-8 file, which is read again for each prompt that is asked for.

    A line is plain text, or, in a ``.jsonl`` file, an object with ``"text"`` or ``"tokens"``, a list of ids, which needs no
    tokenizer; without ``ids`` such a line is refused. Empty lines at the end are ignored. Raises InputError, with file and line,
    for a file that cannot be read or is not UTF-8, an empty prompt and a line that holds no prompt.
    """
    path = Path(path)
    opened, starts = _opener(path), array("q")
    read = partial(_json_line, ids=ids) if path.suffix == ".jsonl" else _encode

    def parse(line: bytes, index: int) -> Prompt:
        where = f"{path}, line {index + 1}"
        return Prompt(read(_text(line, index, where), tokenizer, where))

    def make(index: int) -> Prompt:
        with opened() as file:
            file.seek(starts[index])
            return parse(file.readline(), index)

    start = 0
    with opened() as file:
        for index, line in enumerate(file):
            if line not in (b"\n", b"\r\n"):
                if len(starts) < index:
                    parse(b"", len(starts))  # an empty line before this one, which is refused
                parse(line, index)
                starts.append(start)
            start += len(line)
    return _some(LazyPrompts(len(starts), make), str(path))


def token_prompts(path: str | Path, vocab_size: int) -> Sequence[Prompt]:
    """Prompts of a memory-mapped ``.npy`` file of integer ids: ``[T]`` is one prompt, ``[N, T]`` is one a row.

    Raises InputError for a file that is not such an array, an empty one, and ids outside ``[0, vocab_size)``.
    """
    rows = np.atleast_2d(open_ids(path))
    prompts = LazyPrompts(len(rows) if rows.size else 0, lambda index: Prompt(rows[index].astype(np.int64)))
    check_prompts(_some(prompts, str(path)), vocab_size)
    return prompts


def check_prompts(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """Raise InputError for prompts that ``checked`` refuses."""
    for _ in checked(prompts, vocab_size):
        pass


def checked(prompts: Sequence[Prompt], vocab_size: int) -> Iterator[Prompt]:
    """Each prompt, once it is known to be sound.

    Raises InputError for no prompts, one without tokens or with more or fewer roles, and, with prompt and token, an id outside
    ``[0, vocab_size)``.
    """
    if not len(prompts):
        raise InputError("expected at least one prompt, found none")
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt.tokens):
            raise InputError(f"expected at least one token in each prompt, found none in prompt {number}")
        if prompt.tokens.dtype != np.int64:
            raise InputError(f"expected int64 token ids, found {prompt.tokens.dtype} in prompt {number}")
        if prompt.roles is not None and len(prompt.roles) != len(prompt.tokens):
            raise InputError(f"prompt {number}: expected {len(prompt.tokens)} roles, one a token, found {len(prompt.roles)}")
        outside = np.flatnonzero((prompt.tokens < 0) | (prompt.tokens >= vocab_size))
        if outside.size:
            found = f"found {prompt.tokens[outside[0]]} in prompt {number}, token {outside[0]}"
            raise InputError(f"expected token ids from 0 to {vocab_size - 1}, the model's vocabulary; {found}")
        yield prompt


def open_ids(path: str | Path) -> NDArray[np.integer]:
    """Memory-map a ``.npy`` file of integer token ids, ``[T]`` or ``[N, T]``, without reading it.

    Raises InputError for anything else.
    """
    try:
        ids = np.lib.format.open_memmap(str(path), mode="r")
    except OSError as error:
        raise InputError(f"expected a .npy file of token ids at {path}; {_reason(error)}") from error
    except (ValueError, SyntaxError, TokenError) as error:  # its header is read as Python
        hint = "; JSON Lines go to --prompts" if Path(path).suffix == ".jsonl" else ""
        raise InputError(f"expected a .npy file of token ids, found something else in {path}: {error}{hint}") from error
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        found = f"{ids.dtype} of shape {ids.shape}"
        raise InputError(f"expected integer token ids of shape [tokens] or [prompts, tokens], found {found} in {path}")
    return ids


def _opener(path: Path) -> Callable[[], AbstractContextManager[BinaryIO]]:
    """What opens the file, as often as it is called; a pipe, which can be read only once, is kept."""
    with _opened(path) as file:
        if file.seekable():
            return partial(_opened, path)
        kept = file.read()
    return lambda: io.BytesIO(kept)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"expected a file of prompts at {path}; {_reason(error)}") from error


def _text(line: bytes, index: int, where: str) -> str:
    """A line without its end, and the first one without its byte order mark."""
    try:
        return line.removesuffix(b"\r\n").removesuffix(b"\n").decode("utf-8" if index else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"expected UTF-8 text, found byte 0x{error.object[error.start]:02x} in {where}") from error


def _json_line(line: str, tokenizer: Tokenizer | None, where: str, *, ids: bool) -> NDArray[np.int64]:
    expected = 'expected a JSON object with either "text" or "tokens"' if ids else 'expected a JSON object with "text"'
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{expected}, found no JSON in {where}: {error}") from error
    match item:
        case {"text": _, "tokens": _}:
            raise InputError(f"{expected}, found both in {where}")
        case {"text": str(text)}:
            return _encode(text, tokenizer, where)
        case {"tokens": [*tokens]} if ids:
            return _ids(tokens, where)
    raise InputError(f"{expected}, a string{' or a list of integers' if ids else ''}; found {_short(item)} in {where}")


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


def _some(prompts: Sequence[Prompt], where: str) -> Sequence[Prompt]:
    if not prompts:
        raise InputError(f"expected at least one prompt, found none in {where}")
    return prompts


def _reason(error: OSError) -> str:
    return f"found {(error.strerror or str(error)).lower()}"


def _short(item: object) -> str:
    shown = json.dumps(item)
    return shown if len(shown) <= 60 else shown[:57] + "..."
