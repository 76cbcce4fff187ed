"""What ``tally.Counts`` keeps of many values by one Triton program, where PyTorch would go through them dozens of times."""

import triton
import triton.language as tl


@triton.jit
def _add(numbers, happened, there):
    tl.atomic_add(numbers, tl.sum(happened.to(tl.int32), 0).to(tl.int64), mask=there)


@triton.jit
def count(
    x, tokens, theory, margins, numbers, sums, minimum, maximum, first_nonfinite, counts, T, Q, L, EIGENVALUES,
    H: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, BINS: tl.constexpr, BINS_OF_ONE: tl.constexpr, LAST: tl.constexpr,
    LIMIT: tl.constexpr, STEP: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Add ``x`` ``[Q, L, T, H]`` of packed ``tokens`` to a tally's numbers, as ``Counts.reduce`` does.

    Program (block of tokens, layer, quantity). An atomic smallest of floats takes -0 for less than any other: there is none.
    """
    layer, quantity = tl.program_id(1), tl.program_id(2)
    row, size, signed = quantity * L + layer, Q * L * H, quantity < EIGENVALUES
    token, head = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BH)
    there, ok = head < H, (token < T)[:, None] & (head < H)[None, :]
    given = tl.load(x + (row.to(tl.int64) * T + token)[:, None] * H + head[None, :], mask=ok, other=0.0)
    good = ok & (tl.abs(given) < float("inf"))
    value = tl.where(good & (given != 0), given, 0.0)
    exact, at = value.to(tl.float64), row * H + head
    low = tl.load(theory + layer * H + head, mask=there, other=0.0)[None, :]
    high = tl.load(theory + (L + layer) * H + head, mask=there, other=0.0)[None, :]
    _add(numbers + at, good, there)
    _add(numbers + size + at, ok & (good == 0), there)
    _add(numbers + 2 * size + at, good & ((exact < low) | (exact > high)) & (quantity < 2), there)
    _add(numbers + 3 * size + at, tl.where(signed, value < 0, value > tl.load(margins)), there)
    _add(numbers + 4 * size + at, tl.where(signed, value > 1, value > tl.load(margins + 1)), there)
    _add(numbers + 5 * size + at, tl.where(signed, tl.abs(value) > 1, value > tl.load(margins + 2)), there)
    exact = tl.minimum(tl.maximum(exact, -LIMIT), LIMIT)
    scaled = exact * STEP
    whole = tl.floor(scaled)
    tl.atomic_add(sums + at, tl.sum(whole.to(tl.int64), 0), mask=there)
    tl.atomic_add(sums + size + at, tl.sum(((scaled - whole) * REST).to(tl.int64), 0), mask=there)
    tl.atomic_min(minimum + at, tl.min(tl.where(good, value, float("inf")), 0), mask=there)
    tl.atomic_max(maximum + at, tl.max(tl.where(good, value, float("-inf")), 0), mask=there)
    place = tl.load(tokens + token, mask=token < T, other=0)[:, None] * H + head[None, :]
    tl.atomic_min(first_nonfinite + row, tl.min(tl.where(ok & (good == 0), place, LAST)))
    bins = tl.minimum(tl.maximum(tl.ceil(exact * BINS_OF_ONE) + (BINS // 2 - 1), 0), BINS - 1).to(tl.int32)
    octaves = tl.maximum(value, 0.0).to(tl.int32, bitcast=True) >> 19
    places = tl.where(good, tl.where(signed, bins, octaves), 0)
    found = tl.histogram(tl.reshape(places, [BT * BH]), BINS)
    found -= tl.where(tl.arange(0, BINS) == 0, BT * BH - tl.sum(good.to(tl.int32)), 0)
    # Sums first: most values lie in few bins, at which those of all programs would wait for each other.
    tl.atomic_add(counts + row * BINS + tl.arange(0, BINS), found.to(tl.int64), mask=found > 0)
