"""The recurrence token by token, for decoding and short sequences: nothing is solved, coupled or kept, all sums are float32."""

import triton
import triton.language as tl

from qed_probe.kernels.programs.read import PARTS, cosines, norms
from qed_probe.kernels.programs.rows import edit_rows, given_rows, note, sizes, token_rows


@triton.jit
def recur(
    q, a, a_size, d, d_size, keys, v, w, g, lam, first, size, chunks, initial, by_q, cosine,
    y, heard, parts, found, starts, squares, final, step,
    H: tl.constexpr, HQ: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr,
    MAIN: tl.constexpr, ADDRESS: tl.constexpr, ADDED: tl.constexpr, PROBE: tl.constexpr, RECORD: tl.constexpr,
    STATES: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What ``scan`` and ``read`` give: ``y``, ``heard`` and ``parts``, the last states and ``squares`` of the chunks' norms.

    With STATES also ``starts`` and ``found``. Program (sequence, head, block of values).
    """
    sequence, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    channels, values, one = tl.arange(0, BK), part * BV + tl.arange(0, BV), tl.arange(0, 1)
    inside = channels[None, :] * V + values[:, None]
    square = (channels < K)[None, :] & (values < V)[:, None]
    state = tl.load(initial + (sequence * H + h) * K * V + inside, mask=square, other=0.0)
    for chunk in range(tl.load(chunks + sequence), tl.load(chunks + sequence + 1)):
        place, begin = chunk * H + h, tl.load(first + chunk)
        if STATES:
            tl.store(starts + place * K * V + inside, state.to(starts.dtype.element_ty), mask=square)
        for local in range(tl.load(size + chunk)):
            token, ok = begin + local + one, one == 0
            log = tl.load(g + (token * H + h)[:, None] * G + tl.where(G == 1, 0, channels)[None, :], mask=(channels < K)[None, :])
            state *= tl.exp(tl.where((channels < K)[None, :], log.to(tl.float32), 0.0))
            query = token_rows(q, token, ok, h // (H // HQ), HQ, K, channels)
            decayed = tl.sum(state * query, 1)
            reading, main, wrote_main, by_address = decayed, decayed, decayed, decayed
            for m in tl.static_range(M):
                if PROBE and m == MAIN:
                    direction = token_rows(d, token, ok, h, H, K, channels) * sizes(d_size, token, 0, ok, h, H, 1)
                    reading = tl.sum(state * direction, 1)
                reader = edit_rows(a, token, one + m, ok, h, H, M, K, channels) * sizes(a_size, token, m, ok, h, H, M)
                read = tl.sum(state * reader, 1)
                wrote = tl.sum(given_rows(v, w, token, one + m, ok, h, H, FIRST, N, GATE, V, values), 0) - read
                state += wrote[:, None] * edit_rows(keys, token, one + m, ok, h // (H // KEYS), KEYS, M, K, channels)
                if STATES:
                    tl.store(found + (place * ROWS + local * MP + m) * V + values, read, mask=values < V)
                if m == MAIN:
                    main, wrote_main = read, wrote
                if m == ADDRESS:
                    by_address = read
            output = tl.sum(state * query, 1)
            at = token * H + h
            tl.store(y + at * V + values, output, mask=values < V)
            if RECORD:
                notes = parts + (part * PARTS).to(tl.int64) * step + at
                notes = note(notes, norms(wrote_main[None, :]), ok, step)
                notes = note(notes, norms(output[None, :]), ok, step)
                if PROBE:
                    tl.store(heard + at * V + values, reading.to(heard.dtype.element_ty), mask=values < V)
                    without = output
                    if ADDED:
                        strength = tl.load(lam + h).to(tl.float32)
                        main -= strength * reading
                        without += strength * tl.load(by_q + at * M + MAIN) * reading
                    heard_norm, without_norm = norms(reading[None, :]), norms(without[None, :])
                    notes = note(notes, heard_norm, ok, step)
                    notes = note(notes, norms(main[None, :]), ok, step)
                    notes = note(notes, without_norm, ok, step)
                    notes = note(notes, cosines(reading[None, :], without[None, :], heard_norm, without_norm), ok, step)
                if ADDRESS >= 0:
                    if ADDRESS > MAIN:
                        by_address -= tl.load(cosine + at) * wrote_main
                    notes = note(notes, norms(decayed[None, :]), ok, step)
                    notes = note(notes, norms(by_address[None, :]), ok, step)
        tl.store(squares + place * tl.num_programs(2) + part, tl.sum(state * state))
    tl.store(final + (sequence * H + h) * K * V + inside, state, mask=square)
