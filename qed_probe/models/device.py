"""Where a model runs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from qed_probe.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a model can run in."""


def find_dtype(name: str) -> torch.dtype:
    """The dtype of this name; raises InputError for one that no model runs in."""
    if name not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {name!r}")
    return DTYPES[name]


def find_device(name: str | torch.device) -> torch.device:
    """The device of this name, its index filled in; raises InputError if it is not there."""
    try:
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise InputError(f"device: expected one that is there, found {str(name)!r}") from error
    if found.type == "meta":
        raise InputError("device: expected one that computes, found 'meta'")
    return found


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """A thread for each core, and one core for each: of many small matrices LAPACK takes one after another, best on one core."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)  # a thread begins with the number that was set last, whichever thread set it


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Raise InputError, naming what needed it, where memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch has a type for a full GPU and, before 2.13 at least, none for a full host.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise InputError(f"{what}: expected enough memory for it, found too little") from error
        raise
