"""Text as bytes: the tokenizer of the tiny models."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ByteTokenizer:
    """One token a byte of UTF-8; the id is the byte."""

    vocab_size = 256

    def encode(self, text: str, /) -> NDArray[np.int64]:
        """The bytes of ``text``, ``[T]`` int64; raises UnicodeEncodeError for a lone surrogate."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int] | NDArray[np.int64], /) -> str:
        """The text of these bytes; what is not UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids).decode(errors="replace")

    def pieces(self, ids: Sequence[int] | NDArray[np.int64], /) -> list[str]:
        r"""One printable string a token: the ASCII character, else a backslash escape such as ``\n`` or ``\xe4``."""
        return [_PIECES[int(i)] for i in ids]


_PIECES = [chr(i) if 32 <= i < 127 else chr(i).encode("unicode_escape").decode() for i in range(256)]
