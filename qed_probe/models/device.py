"""Where a model runs."""

import torch

from qed_probe.errors import InputError


def find_device(name: str | torch.device) -> torch.device:
    """The device of this name, its index filled in; raises InputError if it is not there."""
    try:
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise InputError(f"device: expected one that is there, found {str(name)!r}") from error
    if found.type == "meta":
        raise InputError("device: expected one that computes, found 'meta'")
    return found
