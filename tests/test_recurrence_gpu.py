"""The chunked form on a CUDA device, against the same float64 oracle."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qed_probe.kernels import MIXERS, Tokens, reference, run
from tests.recurrences import error, make_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_gpu(tokens: Tokens) -> Tokens:
    moved: dict[str, Any] = {f.name: x.cuda() for f in fields(tokens) if isinstance(x := getattr(tokens, f.name), Tensor)}
    return replace(tokens, **moved)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_and_record_on_the_gpu(mixer: str) -> None:
    tokens, ends = make_tokens(mixer, T=199, K=64, V=64), torch.tensor([0, 0, 5, 70, 199])
    expected = reference(mixer, tokens, cu_seqlens=ends)
    seen = run(MIXERS[mixer], on_gpu(tokens), record=True, cu_seqlens=ends.cuda())
    # IEEE float32 products, PyTorch's default: the same bound as on a CPU.
    assert error(seen.y.cpu(), expected.y) < 1e-5
    for name, wanted in expected.records.items():
        assert error(seen.records[name].cpu(), wanted) < 1e-5, name
