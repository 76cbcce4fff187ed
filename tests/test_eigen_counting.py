"""What Triton counts of many values against what PyTorch counts, on a GPU and in the interpreter."""

import numpy as np
import pytest
import torch

from qed_probe.eigen.claims import parse_claims
from qed_probe.eigen.tally import Counts, Subject
from qed_probe.kernels import MIXERS

KEPT = ("counts", "numbers", "sums", "minimum", "maximum", "first_nonfinite")


@pytest.mark.parametrize(("mixer", "edits", "heads", "tokens"), [("qed", 1, 3, 2), ("kda", 1, 1, 700), ("eda", 2, 17, 300)])
def test_triton_counts_what_pytorch_does(mixer: str, edits: int, heads: int, tokens: int, device: str) -> None:
    rng, layers = np.random.default_rng(0), (2, 5)
    lam = rng.uniform(0, 0.25, (2, heads))
    subject = Subject(MIXERS[mixer], edits, 1.0, layers, lam, np.array([0, tokens]), parse_claims([]))
    shape = (len(subject.quantities), 2, tokens, heads)
    x = torch.from_numpy(rng.normal(0.5, 1, shape) * rng.choice([1e-4, 1, 1e3, 1e38], shape)).float()
    odd = [0.0, -0.0, 1, -1, 0.1, 1e-3, 2.0**-9, 1e-45, torch.inf, -torch.inf, torch.nan]
    x.view(-1)[torch.from_numpy(rng.choice(x.numel(), x.numel() // 5, replace=False))] = torch.tensor(
        rng.choice(odd, x.numel() // 5), dtype=torch.float32
    )
    found, expected, order = Counts(subject, layers, device), Counts(subject, layers, device), rng.permutation(tokens)
    for part in np.array_split(order, 2):
        given = x[:, :, part].to(device), torch.from_numpy(part).to(device)
        found.launch(*given)
        expected.add(*given)
    for name in KEPT:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
