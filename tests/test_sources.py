"""The recurrence read backwards: weights of everything written, against the same by the token, and against what is read."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from qed_probe.kernels import factor, recurrence, weights
from tests.recurrences import error

SHAPES = [(1, 2, 1, 5, 3, 5), (63, 1, 1, 8, 4, 1), (100, 3, 2, 8, 8, 8), (200, 2, 3, 16, 5, 16), (130, 2, 4, 8, 3, 1)]
"""T, H, M, K, V and the channels of the decay."""


def make(T: int, H: int, M: int, K: int, V: int, G: int, *, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    g = -2 * torch.rand(T, H, G, generator=rng, dtype=torch.float64)
    g[torch.rand(T, H, G, generator=rng) < 0.05] = -torch.inf
    k = torch.nn.functional.normalize(normal(T, H, M, K), dim=-1)
    a = k * torch.rand(T, H, M, K, generator=rng, dtype=torch.float64) + 0.1 * normal(T, H, M, K)
    return {"g": g, "k": k, "a": a, "u": normal(T, H, M, V), "p": normal(7, H, K), "state": normal(H, K, V)}


def backwards(x: dict[str, Tensor], token: int, probe: Tensor, head: int, seen: int) -> tuple[Tensor, Tensor]:
    """One read by the token, from the last edit that it sees to the first."""
    k, a, g = x["k"][:, head], x["a"][:, head], x["g"][:, head]
    found, z = torch.zeros(k.shape[:2], dtype=torch.float64), probe.clone()
    for t in range(token, -1, -1):
        for m in reversed(range(seen if t == token else k.shape[1])):
            found[t, m] = z @ k[t, m]
            z = z - a[t, m] * found[t, m]
        z = z * g[t].exp()
    return found, z


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_of_a_walk_back_by_the_token(shape: tuple[int, ...]) -> None:
    x = make(*shape)
    tokens = torch.randint(shape[0], (7,), generator=torch.Generator().manual_seed(1))
    factors = factor(x["g"], x["k"], x["a"])
    for seen in range(shape[2] + 1):
        found, (left,) = weights(factors, tokens[None], x["p"][None], seen)
        assert found.shape == (7, shape[1], shape[0], shape[2])
        for i, token in enumerate(tokens.tolist()):
            for head in range(shape[1]):
                expected, z = backwards(x, token, x["p"][i, head], head, seen)
                torch.testing.assert_close(found[i, head], expected, rtol=0, atol=1e-11)  # sums of hundreds of numbers near 1
                torch.testing.assert_close(left[i, head], z, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_written_adds_up_to_what_is_read(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = {name: y.to(dtype) for name, y in make(*shape, seed=2).items()}
    q = torch.randn(shape[0], shape[1], shape[3], generator=torch.Generator().manual_seed(3), dtype=dtype)
    read = recurrence(*(y[None] for y in (q, x["g"], x["k"], x["a"], x["u"])), initial_state=x["state"][None])
    found, (left,) = weights(factor(x["g"], x["k"], x["a"]), torch.arange(shape[0])[None], q[None], shape[2])
    total = torch.einsum("phtm,thmv->phv", found, x["u"]) + torch.einsum("phk,hkv->phv", left, x["state"])
    assert error(total, read.y[0]) <= (1e-5 if dtype == torch.float32 else 1e-13)


def test_two_tokens_in_fractions() -> None:
    """Of keys (1, 0) and (3/5, 4/5) with β = 1/2, decay 1/2, read by (0, 1): the second write, and what it left of the first."""
    half = Fraction(1, 2)
    k1, k2, q = (Fraction(1), Fraction(0)), (Fraction(3, 5), Fraction(4, 5)), (Fraction(0), Fraction(1))
    second = sum(a * b for a, b in zip(q, k2, strict=True))
    left = [(a - half * b * second) * half for a, b in zip(q, k2, strict=True)]
    first = sum(a * b for a, b in zip(left, k1, strict=True))
    assert (first, second) == (Fraction(-3, 25) * 1, Fraction(4, 5))
    k = torch.tensor([[float(x) for x in key] for key in (k1, k2)], dtype=torch.float64)[:, None, None]
    g = torch.full((2, 1, 1), 0.5, dtype=torch.float64).log()
    probe = torch.tensor([[[float(x) for x in q]]], dtype=torch.float64)
    found, _ = weights(factor(g, k, k / 2), torch.tensor([[1]]), probe[None], 1)
    assert found.flatten().tolist() == pytest.approx([float(first), float(second)], abs=1e-15)


def test_what_is_later_has_no_weight() -> None:
    x = make(100, 2, 2, 8, 4, 8)
    found, _ = weights(factor(x["g"], x["k"], x["a"]), torch.tensor([[0, 40, 63, 64]]), x["p"][None, :4], 1)
    for i, token in enumerate((0, 40, 63, 64)):
        assert (found[i, :, token + 1 :] == 0).all()
        assert (found[i, :, token, 1] == 0).all()
        assert (found[i, :, token, 0] != 0).all()


@pytest.mark.parametrize("lengths", [(100, 3, 64, 1, 200), (70, 70), (1, 1, 1), (5,)])
def test_packed_sequences_are_read_as_each_alone(lengths: tuple[int, ...]) -> None:
    ends = (0, *itertools.accumulate(lengths))
    x = make(ends[-1], 2, 2, 8, 4, 8)
    rng = torch.Generator().manual_seed(4)
    tokens = torch.stack([torch.randint(length, (3,), generator=rng) for length in lengths])
    probes = torch.randn(len(lengths), 3, 2, 8, generator=rng, dtype=torch.float64)
    found, left = weights(factor(x["g"], x["k"], x["a"], ends), tokens, probes, 1)
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        alone = factor(x["g"][begin:end], x["k"][begin:end], x["a"][begin:end])
        expected = weights(alone, tokens[i, None], probes[i, None], 1)
        torch.testing.assert_close(found[:, :, begin:end], expected[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(left[i, None], expected[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("first", [101, 130])
def test_what_overflows_later_leaves_a_read_alone(first: int) -> None:
    """In the read's own chunk too, where what was read of it is coupled to what comes later."""
    x = make(200, 1, 1, 8, 4, 8)
    x["a"][first:], x["k"][first:] = -1e300, 1e10 * x["k"][first:]
    found, (left,) = weights(factor(x["g"], x["k"], x["a"]), torch.tensor([[5, 100]]), x["p"][None, :2, :1], 1)
    alone = weights(factor(x["g"][:101], x["k"][:101], x["a"][:101]), torch.tensor([[5, 100]]), x["p"][None, :2, :1], 1)
    torch.testing.assert_close(found[:, :, :101], alone[0], rtol=0, atol=1e-13)
    assert (found[:, :, 101:] == 0).all()
    torch.testing.assert_close(left, alone[1][0], rtol=0, atol=1e-13)


def test_no_reads() -> None:
    x = make(5, 2, 1, 8, 4, 8)
    found, (left,) = weights(factor(x["g"], x["k"], x["a"]), torch.zeros(1, 0, dtype=torch.int64), x["p"][None, :0], 1)
    assert found.shape == (0, 2, 5, 1)
    assert left.shape == (0, 2, 8)
