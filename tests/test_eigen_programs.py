"""What Triton counts of many values against what PyTorch counts, on a GPU and in the interpreter."""

import numpy as np
import pytest
import torch

from qed_probe.eigen.claims import parse_claims
from qed_probe.eigen.counts import Counts, Subject
from qed_probe.kernels import MIXERS

pytest.importorskip("triton")
KEPT = ("counts", "numbers", "sums", "minimum", "maximum", "first_nonfinite")
JUDGED = ("violations", "rounding", "prompt_violations")
ODD = [0.0, -0.0, 1, -1, 0.1, 1e-3, 2.0**-9, 1e-45, 1 + 2.0**-23, torch.inf, -torch.inf, torch.nan]


def values(rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Of every size, every fifth of them odd."""
    x = rng.normal(0.5, 1, shape) * rng.choice([1e-4, 1, 1e3, 1e38], shape)
    return torch.from_numpy(np.where(rng.random(shape) < 0.2, rng.choice(ODD, shape), x)).float()


@pytest.mark.parametrize(("mixer", "edits", "heads", "tokens"), [("qed", 1, 3, 2), ("kda", 1, 1, 700), ("eda", 2, 17, 300)])
def test_triton_counts_what_pytorch_does(mixer: str, edits: int, heads: int, tokens: int, device: str) -> None:
    rng, layers = np.random.default_rng(0), (2, 5)
    lam = rng.uniform(0, 0.25, (2, heads))
    subject = Subject(MIXERS[mixer], edits, 1.0, layers, lam, np.array([0, tokens]), parse_claims([]))
    shape = (len(subject.quantities), 2, tokens, heads)
    x = values(rng, shape)
    found, expected, order = Counts(subject, layers, device), Counts(subject, layers, device), rng.permutation(tokens)
    for part in np.array_split(order, 2):
        given = x[:, :, part].to(device), torch.from_numpy(part).to(device)
        found.count_by_triton(*given)
        expected.count(*given)
    for name in KEPT:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")  # NumPy's, of inf - inf
@pytest.mark.parametrize("claim", ["abs<=1", "e>-1", "e<=0", "range=-0.25,1.25", "theory", "projection-effect<1e-3"])
@pytest.mark.parametrize(("edits", "heads", "tokens"), [(1, 3, 2), (1, 1, 700), (2, 17, 300)])
def test_triton_judges_as_pytorch_does(claim: str, edits: int, heads: int, tokens: int, device: str) -> None:
    rng, layers, bounds = np.random.default_rng(0), (2, 5), np.array([0, 1, 1, tokens])
    lam = rng.uniform(0, 0.25, (2, heads))
    subject = Subject(MIXERS["qed"], edits, 1.0, layers, lam, bounds, parse_claims(["norm<=2", claim]))
    used = values(rng, (2, tokens, heads, edits))
    alone = used.where(torch.from_numpy(rng.random(used.shape) < 0.5), values(rng, tuple(used.shape)))
    found, expected = Counts(subject, layers, device), Counts(subject, layers, device)
    used, alone, order = used.to(device), alone.to(device), torch.from_numpy(rng.permutation(tokens)).to(device)
    for part in (slice(tokens // 2), slice(tokens // 2, None)):
        given = used[:, part], alone[:, part], order[part]
        keys = found.hold_by_triton(1, *given), expected.hold(1, *given)
        assert torch.equal(*(each.sort().values for each in keys))
    for name in JUDGED:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
