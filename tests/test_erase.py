"""The erase factors' records alone: those of a pass, to the bit; and renormalised, what no rounding takes beyond the gates."""

from dataclasses import replace

import pytest
import torch

from qed_probe.kernels import MIXERS, Choice, erase, run
from qed_probe.kernels.erase import ERASE
from tests.recurrences import make_tokens, place


@pytest.mark.parametrize("mixer", MIXERS)
def test_without_the_memory_they_have_the_bits_of_a_pass(mixer: str) -> None:
    tokens = make_tokens(mixer, T=1100, H=2, Hk=1)  # more than a CPU works on at once
    seen, found = run(MIXERS[mixer], tokens, record=True, backend="torch").records, erase(MIXERS[mixer], tokens)
    assert set(found) == set(ERASE) & set(seen)
    assert [name for name, x in found.items() if not torch.equal(x, seen[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_programs_too(mixer: str, dtype: torch.dtype, device: str) -> None:
    pytest.importorskip("triton")
    sizes = [(300, 4, 2, 128), (70, 2, 1, 40)] if device == "cuda" else [(19, 2, 1, 8)]
    for T, H, Hk, K in sizes:
        tokens, how = place(make_tokens(mixer, T=T, H=H, Hk=Hk, K=K, dtype=dtype), device), MIXERS[mixer]
        seen, found = run(how, tokens, record=True, backend="triton").records, erase(how, tokens, backend="triton")
        assert set(found) == set(ERASE) & set(seen)
        assert [name for name, x in found.items() if not torch.equal(x, seen[name])] == []


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mixer", ["gdn", "gdn2", "deltaproduct", "eda-gdn2"])
def test_open_gates_and_rounded_keys_stay_within_one(mixer: str, backend: Choice) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the programs are compiled for the GPU here")
    tokens = make_tokens(mixer, T=300 if backend == "torch" else 40, H=1, K=24, gate=1.0, dtype=torch.bfloat16)
    doubled = {name: 2 * getattr(tokens, name) for name in ("beta", "b") if getattr(tokens, name) is not None}
    found = erase(MIXERS[mixer], replace(tokens, **doubled), backend=backend)
    assert (found["eigenvalue"] < -1).any()
    assert (found["eigenvalue_unit"] == -1).all()
    if "edit_eigenvalue_unit" in found:
        assert (found["edit_eigenvalue_unit"].abs() <= 1).all()


def test_a_key_of_nothing_erases_nothing() -> None:
    for mixer in ("gdn", "gdn2", "eda", "qed-noproj"):
        tokens = make_tokens(mixer, T=3)
        found = erase(MIXERS[mixer], replace(tokens, k=torch.zeros_like(tokens.k)))
        assert (found["eigenvalue_unit"] == 1).all()
