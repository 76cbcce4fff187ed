"""Vectors made unit vectors by a Triton program, against PyTorch's own arithmetic, on a GPU and in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("C", [1, 7, 64, 130])
def test_vectors_that_lie_anywhere_in_a_wider_tensor_get_unit_length(C: int, dtype: torch.dtype, device: str) -> None:
    from qed_probe.kernels.norm import unit

    rng = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 5, 3 * 3 * C, generator=rng).to(device, dtype)
    x = torch.unflatten(wide[..., 3 * C : 6 * C], -1, (3, C))
    x[1, 2, 1] = 0
    found, exact = unit(x, 1e-6, torch.float32), x.double()
    exact = exact / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert found.is_contiguous()
    for each in (found, unit(x.mT.contiguous().mT, 1e-6, torch.float32)):
        torch.testing.assert_close(each.double(), exact, rtol=1e-6, atol=0)  # sums of up to 130 squares, a root, a product
    bits = 8 if device == "cuda" else 7  # of which the interpreter rounds none, but cuts the rest off
    torch.testing.assert_close(unit(x, 1e-6, torch.bfloat16).double(), exact, rtol=2.0**-bits, atol=0)
