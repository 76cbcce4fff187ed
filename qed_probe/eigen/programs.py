"""What ``counts.Counts`` keeps of many values by Triton programs, where PyTorch would go through them dozens of times."""

import triton
import triton.language as tl


@triton.jit
def _add(numbers, happened, there):
    tl.atomic_add(numbers, tl.sum(happened.to(tl.int32), 0).to(tl.int64), mask=there, sem="relaxed")


@triton.jit
def count(
    x, tokens, theory, margins, numbers, sums, minimum, maximum, first_nonfinite, counts, T, Q, L, EIGENVALUES,
    H: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, BINS: tl.constexpr, BINS_OF_ONE: tl.constexpr, LAST: tl.constexpr,
    LIMIT: tl.constexpr, STEP: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Add ``x`` ``[Q, L, T, H]`` of packed ``tokens`` to a tally's numbers, as ``Counts.count`` does.

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
    tl.atomic_add(sums + at, tl.sum(whole.to(tl.int64), 0), mask=there, sem="relaxed")
    tl.atomic_add(sums + size + at, tl.sum(((scaled - whole) * REST).to(tl.int64), 0), mask=there, sem="relaxed")
    tl.atomic_min(minimum + at, tl.min(tl.where(good, value, float("inf")), 0), mask=there, sem="relaxed")
    tl.atomic_max(maximum + at, tl.max(tl.where(good, value, float("-inf")), 0), mask=there, sem="relaxed")
    place = tl.load(tokens + token, mask=token < T, other=0)[:, None] * H + head[None, :]
    tl.atomic_min(first_nonfinite + row, tl.min(tl.where(ok & (good == 0), place, LAST)), sem="relaxed")
    bins = tl.minimum(tl.maximum(tl.ceil(exact * BINS_OF_ONE) + (BINS // 2 - 1), 0), BINS - 1).to(tl.int32)
    octaves = tl.maximum(value, 0.0).to(tl.int32, bitcast=True) >> 19
    places = tl.where(signed, bins, octaves)
    # Many sizes are 0: summed first, or all would wait for each other at one number.
    zeros = tl.sum((good & (places == 0)).to(tl.int32)).to(tl.int64)
    tl.atomic_add(counts + row * BINS, zeros, sem="relaxed")
    tl.atomic_add(counts + row * BINS + places, tl.full([BT, BH], 1, tl.int64), mask=good & (places > 0), sem="relaxed")


@triton.jit
def _excess(x, low, high):
    """By how much values are beyond their ends, -inf where they are no number."""
    x = x.to(tl.float64)
    found = tl.maximum(low - x, x - high)
    return tl.where(found == found, found, float("-inf"))


@triton.jit
def hold(
    used, alone, ends, prompts, violations, rounding, prompt_violations, keys, T, L, H,
    M: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, STRICT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Hold a claim against values ``[L, T, H, M]``, W of a token and layer, as ``Counts.hold`` does; the ``keys`` in their order.

    Program (block of tokens, layer).
    """
    layer, token, column = tl.program_id(1), tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BW)
    there, ok = column < W, (token < T)[:, None] & (column < W)[None, :]
    at, head = (layer.to(tl.int64) * T + token)[:, None] * W + column[None, :], layer * H + column // M
    low = tl.load(ends + head, mask=there, other=0.0)[None, :]
    high = tl.load(ends + L * H + head, mask=there, other=0.0)[None, :]
    excess = _excess(tl.load(used + at, mask=ok, other=0.0), low, high)
    lasting = tl.minimum(excess, _excess(tl.load(alone + at, mask=ok, other=0.0), low, high))
    violated, real = ok & (excess >= 0 if STRICT else excess > 0), ok & (lasting >= 0 if STRICT else lasting > 0)
    _add(violations + head, violated, there)
    _add(violations + L * H + head, real, there)
    rounded = tl.max(tl.where(violated & (real == 0), excess, float("-inf")))
    tl.atomic_max(rounding, rounded, mask=rounded > float("-inf"), sem="relaxed")
    found = tl.sum(real.to(tl.int32), 1)
    prompt = tl.load(prompts + token, mask=token < T, other=0)
    tl.atomic_add(prompt_violations + prompt, found.to(tl.int64), mask=found > 0, sem="relaxed")
    size = lasting.to(tl.float32)
    bits = tl.where(size == 0, 0.0, size).to(tl.int32, bitcast=True).to(tl.int64)
    place = (token.to(tl.int64)[:, None] * L + layer) * W + column[None, :]
    tl.store(keys + at, (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 31) + (LAST - place), mask=ok)
