"""The states, chunk after chunk: the serial part, which a long sequence is cut into runs."""

import triton
import triton.language as tl

from qed_probe.kernels.programs.rows import given_rows, product, row


@triton.jit
def scan(
    seen, found, leaving, total, v, w, first, size, chunks, initial, starts, final, squares,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Chunk by chunk: P = found + seen S; S ← Diag(total) S + leavingᵀ(U − P). Program (run, head, block of values).

    ``chunks`` ``[runs + 1]`` marks each run's chunks, ``initial`` and ``final`` are ``[runs, H, K, V]``. P takes the
    place of ``found``; ``starts`` is S before each chunk, ``squares`` ``[chunks, H, blocks]`` each block's part of ‖S‖² after it.
    Products are of the dtype of ``seen``.
    """
    run, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, channels, values = tl.arange(0, ROWS), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    square = (channels < K)[:, None] & (values < V)[None, :]
    inside = channels[:, None] * V + values[None, :]
    state = tl.load(initial + (run * H + h) * K * V + inside, mask=square, other=0.0)
    begin, end = tl.load(chunks + run), tl.load(chunks + run + 1)
    for chunk in range(begin, end):
        place = chunk * H + h
        token, edit, ok = row(rows, tl.load(size + chunk), M, MP)
        begin = tl.load(first + chunk)
        tl.store(starts + place * K * V + inside, state.to(starts.dtype.element_ty), mask=square)
        of_v = found + place * ROWS * V + rows[:, None] * V + values[None, :]
        given = given_rows(v + begin * H * N * V, w + begin * H * W, token, edit, ok, h, H, FIRST, N, GATE, V, values)
        read = tl.load(of_v, mask=(values < V)[None, :], other=0.0)
        state, read = _step(state, read, given, seen, leaving, total, place, K, channels, PRECISION, ROWS)
        tl.store(of_v, read, mask=(values < V)[None, :])
        tl.store(squares + place * tl.num_programs(2) + part, tl.sum(state * state))
    tl.store(final + (run * H + h) * K * V + inside, state, mask=square)


@triton.jit
def _step(state, read, given, seen, leaving, total, place, K, channels, PRECISION: tl.constexpr, ROWS: tl.constexpr):
    """The state after a chunk, and what its edits read."""
    kept = seen.dtype.element_ty
    of_k = tl.arange(0, ROWS)[:, None] * K + channels[None, :]
    x = tl.load(seen + place * ROWS * K + of_k, mask=(channels < K)[None, :], other=0.0)
    read += product(x, state.to(kept), PRECISION)
    wrote = given - read
    y = tl.trans(tl.load(leaving + place * ROWS * K + of_k, mask=(channels < K)[None, :], other=0.0))
    decay = tl.load(total + place * K + channels, mask=channels < K, other=0.0)
    near = wrote.to(kept)
    state = state * decay[:, None] + product(y, near, PRECISION)
    if kept == tl.bfloat16:  # what was written is rounded once more in the sum of a long sequence
        state += product(y, (wrote - near.to(tl.float32)).to(kept), PRECISION)
    return state, read


@triton.jit
def summarize(
    seen, found, leaving, total, v, w, first, size, chunks, transitions, gains,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What a run of chunks does to any state, S ← transition·S + gain.

    The gain is the state that it makes of nothing, the transition that of I where nothing is given. ``transitions`` are
    ``[runs, H, K, K]``, ``gains`` ``[runs, H, K, V]``. Program (run, head, block of values and then of channels).
    """
    run, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    # Of values there are none for a program of the transition, of its channels none for one of the gain.
    gaining = part < tl.cdiv(V, BV)
    part -= tl.where(gaining, 0, tl.cdiv(V, BV))
    rows, channels, values = tl.arange(0, ROWS), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    all_values, all_channels = tl.where(gaining, V, 0), tl.where(gaining, 0, K)
    state = tl.where((channels[:, None] == values[None, :]) & (values < all_channels)[None, :], 1.0, 0.0)
    begin, end = tl.load(chunks + run), tl.load(chunks + run + 1)
    for chunk in range(begin, end):
        place = chunk * H + h
        token, edit, ok = row(rows, tl.load(size + chunk), M, MP)
        begin = tl.load(first + chunk)
        here = (values < all_values)[None, :]
        given = given_rows(v + begin * H * N * V, w + begin * H * W, token, edit, ok, h, H, FIRST, N, GATE, V, values)
        given = tl.where(here, given, 0.0)
        read = tl.load(found + place * ROWS * V + rows[:, None] * V + values[None, :], mask=here, other=0.0)
        state, read = _step(state, read, given, seen, leaving, total, place, K, channels, PRECISION, ROWS)
    line, there = (run * H + h) * K + channels[:, None], (channels < K)[:, None]
    tl.store(gains + line * V + values[None, :], state, mask=there & (values < all_values)[None, :])
    tl.store(transitions + line * K + values[None, :], state, mask=there & (values < all_channels)[None, :])


@triton.jit
def join(
    transitions, gains, sequences, state, initial,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The state before each run, ``initial`` ``[runs, H, K, V]``, from those before each sequence.

    ``sequences`` ``[N + 1]`` marks each sequence's runs, ``state`` ``[N, H, K, V]`` is before its first. Program (sequence, head,
    block of values).
    """
    sequence, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    channels, values = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    square = (channels < K)[:, None] & (values < V)[None, :]
    inside = channels[:, None] * V + values[None, :]
    now = tl.load(state + (sequence * H + h) * K * V + inside, mask=square, other=0.0)
    begin, end = tl.load(sequences + sequence), tl.load(sequences + sequence + 1)
    for run in range(begin, end):
        place = run * H + h
        tl.store(initial + place * K * V + inside, now, mask=square)
        within = (channels < K)[:, None] & (channels < K)[None, :]
        step = tl.load(transitions + place * K * K + channels[:, None] * K + channels[None, :], mask=within, other=0.0)
        gain = tl.load(gains + place * K * V + inside, mask=square, other=0.0)
        now = gain + tl.dot(step, now, input_precision=PRECISION)
