"""Without a GPU, Triton programs run in Triton's interpreter, which has to be said before they are compiled."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Where Triton programs run: on a GPU, by the tests marked so, or in the interpreter."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if name == "cpu" and torch.cuda.is_available():
        pytest.skip("the programs are compiled for the GPU here")
    return name
