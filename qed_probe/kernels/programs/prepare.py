"""What a token's edits read, and the records that need no memory, from what the layer gave."""

import triton
import triton.language as tl

from qed_probe.kernels.programs.rows import note, scale

NOTES = (
    "rho", "eigenvalue", "eigenvalue_projected", "eigenvalue_unit", "key_norm", "operator_norm", "operator_norm_base",
    "retention", "budget_decay", "log_decay", "log_decay_min", "log_decay_max", "budget_delta", "budget_erase",
    "direction_norm", "address_cosine", "query_address", "cross_term",
)  # fmt: skip
"""The records in the order in which ``prepare`` notes them."""


@triton.jit
def _lost(g):
    """1 − exp g, without cancellation."""
    series = 1 + g * (1 / 2) * (1 + g * (1 / 3) * (1 + g * (1 / 4) * (1 + g * (1 / 5) * (1 + g * (1 / 6) * (1 + g * (1 / 7))))))
    return tl.where(g > -0.25, -g * series, 1 - tl.exp(g))


@triton.jit
def _operator_norm(k, a, overlap, key_norm, K):
    """As ``erase.operator_norm``."""
    square = tl.where(key_norm > 0, key_norm * key_norm, 1.0)
    across = a - (overlap / square)[:, None] * k
    across = key_norm * tl.sqrt(tl.sum(across * across, 1))
    both = tl.sqrt(overlap * overlap + across * across) + tl.sqrt((2 - overlap) * (2 - overlap) + across * across)
    return tl.where(K == 1, tl.abs(1 - overlap), both / 2)


@triton.jit
def _unit_overlap(overlap, key, opened, inside):
    """As ``erase._unit_overlaps``: the gate's mean over channels, which no rounding takes beyond the gate's own ends."""
    square = tl.sum(key * key, 1)
    least = tl.min(tl.where(inside, opened, float("inf")), 1)
    most = tl.max(tl.where(inside, opened, float("-inf")), 1)
    mean = tl.minimum(tl.maximum(overlap / tl.where(square > 0, square, 1.0), least), most)
    return tl.where(square > 0, mean, 0.0)


@triton.jit
def decay(
    g, first, size, since, until, totals, least,
    H: tl.constexpr,
    MP: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """How tokens decay, in the form of ``rows``: ``since`` and ``until`` ``[T, H, G]``, ``totals`` ``[chunks, H, blocks, G]``.

    ``least`` ``[chunks, H, blocks]`` is the smallest ``since`` of each block. Program (chunk · block, head).
    """
    blocks: tl.constexpr = ROWS // BLOCK
    BT: tl.constexpr = BLOCK // MP
    chunk, block, h = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks, tl.program_id(1)
    begin, count, channels = tl.load(first + chunk), tl.load(size + chunk), tl.arange(0, BG)
    summed = tl.zeros([BG], tl.float32)
    for i in tl.static_range(BT):
        at = ((begin + block * BT + i) * H + h) * G + channels
        there = channels < tl.where(block * BT + i < count, G, 0)
        summed += tl.load(g + at, mask=there, other=0.0).to(tl.float32)
        tl.store(since + at, tl.exp(summed), mask=there)
    place = (chunk * H + h) * blocks + block
    tl.store(totals + place * G + channels, tl.exp(summed), mask=channels < G)
    tl.store(least + place, tl.min(tl.exp(summed)))
    summed = tl.zeros([BG], tl.float32)
    for back in tl.static_range(BT):
        i = BT - 1 - back
        at = ((begin + block * BT + i) * H + h) * G + channels
        there = channels < tl.where(block * BT + i < count, G, 0)
        tl.store(until + at, tl.exp(summed), mask=there)
        summed += tl.load(g + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _leave(x, value, mask, LEAVE: tl.constexpr):
    """Store what is of use to what comes later, if anything does."""
    if LEAVE:
        tl.store(x, value, mask=mask)


@triton.jit
def prepare(
    q, k, g, gate, lam, z, address, gamma, rate, first, size,
    a, a_size, keys, d, d_size, by_q, by_d, edit_eigenvalue, edit_eigenvalue_unit, prepared, step,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, K: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, SOURCE: tl.constexpr,
    GATED: tl.constexpr, PROJECTED: tl.constexpr, ADDED: tl.constexpr, ADDRESS: tl.constexpr, UNIT: tl.constexpr,
    RECORD: tl.constexpr, LEAVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What the edits read; with RECORD, also d and the records that need no memory.

    Without LEAVE no program follows, and of the records only those of the erase factors are made.

    ``a``, divided by ``a_size`` ``[T, H, M]``, and, where they are not k alone, ``keys`` are ``[T, H, M, K]``; ``by_q``
    ``[T, H, M]`` is qᵀk_m. With RECORD also ``d`` ``[T, H, K]``, divided by ``d_size``, ``by_d`` ``[T, H, M]`` = dᵀk_m, and the
    notes, ``prepared`` ``[len(NOTES), T, H]``.

    GATE is 0 for none, 1 for β, 2 for b and 3 in context, where ``address`` is κ and ``rate`` η; SOURCE of d is 0 for none, 1 for
    the query and 2 for ``z``; ADDRESS is the index of the address edit, −1 without one. Program (chunk · block, head).
    """
    blocks: tl.constexpr = ROWS // BLOCK
    BT: tl.constexpr = BLOCK // MP
    chunk, block, h = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks, tl.program_id(1)
    local, channels = block * BT + tl.arange(0, BT), tl.arange(0, BK)
    token, ok = tl.load(first + chunk) + local, local < tl.load(size + chunk)
    inside = ok[:, None] & (channels < K)[None, :]
    at, hk, hq = token * H + h, h // (H // HK), h // (H // HQ)
    of_k = at[:, None] * K + channels[None, :]
    query = tl.load(q + ((token * HQ + hq)[:, None] * K + channels[None, :]), mask=inside, other=0.0).to(tl.float32)
    of_g = at[:, None] * G + tl.where(G == 1, 0, channels)[None, :]
    log = tl.load(g + of_g, mask=inside, other=0.0).to(tl.float32)
    to = at[:, None] * M * K + channels[None, :]
    direction = tl.zeros([BT, BK], tl.float32)
    beta = tl.zeros([BT], tl.float32)
    if GATE == 3:
        removal = tl.load(address + of_k, mask=inside, other=0.0).to(tl.float32)
        key = removal * tl.load(rate + of_k, mask=inside, other=0.0).to(tl.float32)
        base = removal * tl.exp(-log)
        written = tl.load(k + ((token * HK + hk)[:, None] * K + channels[None, :]), mask=inside, other=0.0).to(tl.float32)
        size = scale(base)
        _leave(a + to, base * (1 / size)[:, None], inside, LEAVE)
        _leave(a_size + at * M, size, ok, LEAVE)
        _leave(a_size + at * M + 1, size, ok, LEAVE)
        _leave(a + to + K, tl.zeros([BT, BK], tl.float32), inside, LEAVE)
        _leave(keys + to, key, inside, LEAVE)
        _leave(keys + to + K, written, inside, LEAVE)
        _leave(by_q + at * M + 1, tl.sum(query * written, 1), ok, LEAVE)
        if RECORD:
            tl.store(edit_eigenvalue + at * M + 1, tl.full([BT], 1.0, tl.float32), mask=ok)
            tl.store(edit_eigenvalue_unit + at * M + 1, tl.full([BT], 1.0, tl.float32), mask=ok)
        read, main = base, 0
    else:
        for n in tl.static_range(N):
            edit = n + (1 if ADDRESS == 0 else 0)
            key = tl.load(k + (((token * HK + hk) * N + n)[:, None] * K + channels[None, :]), mask=inside, other=0.0)
            key = key.to(tl.float32)
            opened = tl.zeros([BT, BK], tl.float32)
            if GATE == 1:
                beta = tl.load(gate + at * N + n, mask=ok, other=0.0).to(tl.float32)
                opened += beta[:, None]
            elif GATE == 2:
                opened = tl.load(gate + of_k, mask=inside, other=0.0).to(tl.float32)
            base = opened * key
            read = base
            if n == N - 1 and SOURCE > 0:
                if SOURCE == 1:
                    direction = query
                else:
                    direction = tl.load(z + h * K + channels, mask=channels < K, other=0.0).to(tl.float32)[None, :]
                    direction = tl.broadcast_to(direction, [BT, BK])
                if GATED:
                    direction = opened * direction
                if PROJECTED:
                    direction = direction - key * tl.sum(key * direction, 1)[:, None]
                if ADDED:
                    read = base + tl.load(lam + h).to(tl.float32) * direction
            size = scale(read)
            _leave(a + to + edit * K, read * (1 / size)[:, None], inside, LEAVE)
            _leave(a_size + at * M + edit, size, ok, LEAVE)
            if ADDRESS >= 0:
                _leave(keys + to + edit * K, key, inside, LEAVE)
            if n < N - 1:
                _leave(by_q + at * M + edit, tl.sum(query * key, 1), ok, LEAVE)
                if RECORD:
                    overlap = tl.sum(read * key, 1)
                    tl.store(edit_eigenvalue + at * M + edit, 1 - overlap, mask=ok)
                    if UNIT:
                        overlap = _unit_overlap(overlap, key, opened, inside)
                    tl.store(edit_eigenvalue_unit + at * M + edit, 1 - overlap, mask=ok)
        main = N - 1 + (1 if ADDRESS == 0 else 0)
    rho, overlap = tl.sum(query * key, 1), tl.sum(read * key, 1)
    _leave(by_q + at * M + main, rho, ok, LEAVE)
    erased = tl.zeros([BT], tl.float32)
    if ADDRESS >= 0:
        erased = tl.load(gamma + at, mask=ok, other=0.0).to(tl.float32)
        aimed = tl.load(address + of_k, mask=inside, other=0.0).to(tl.float32)
        by_address = tl.sum(query * aimed, 1)
        size = scale(aimed)
        _leave(a + to + ADDRESS * K, aimed * (1 / size)[:, None], inside, LEAVE)
        _leave(a_size + at * M + ADDRESS, size, ok, LEAVE)
        _leave(keys + to + ADDRESS * K, erased[:, None] * aimed, inside, LEAVE)
        _leave(by_q + at * M + ADDRESS, erased * by_address, ok, LEAVE)
    if RECORD:
        key_norm = tl.sqrt(tl.sum(key * key, 1))
        along = tl.sum(base * key, 1)
        norm = _operator_norm(key, read, overlap, key_norm, K)
        alone = overlap
        if UNIT:
            if GATE == 3:
                square = tl.sum(removal * removal, 1)
                alone = along / tl.where(square > 0, square, 1.0)
            else:
                alone = _unit_overlap(along, key, opened, inside)
                if ADDED and not PROJECTED:
                    alone += (overlap - along) / tl.where(key_norm > 0, key_norm, 1.0)
        _leave(prepared + at, rho, ok, LEAVE)
        notes = note(prepared + at + step, 1 - overlap, ok, step)
        notes = note(notes, 1 - along, ok, step)
        notes = note(notes, 1 - alone, ok, step)
        notes = note(notes, key_norm, ok, step)
        notes = note(notes, norm, ok, step)
        notes = note(notes, _operator_norm(key, base, along, key_norm, K) if ADDED else norm, ok, step)
        if M > 1:
            tl.store(edit_eigenvalue + at * M + main, 1 - overlap, mask=ok)
            tl.store(edit_eigenvalue_unit + at * M + main, 1 - alone, mask=ok)
        if ADDRESS >= 0:
            square = tl.sum(aimed * aimed, 1)
            tl.store(edit_eigenvalue + at * M + ADDRESS, 1 - erased * square, mask=ok)
            alone = erased * square
            if UNIT:
                alone = tl.where(square > 0, erased, 0.0)
            tl.store(edit_eigenvalue_unit + at * M + ADDRESS, 1 - alone, mask=ok)
    if RECORD and LEAVE:
        lost = tl.sum(tl.where(inside, _lost(log), 0.0), 1) / K
        retained = tl.sum(tl.where(inside, tl.exp(log), 0.0), 1) / K
        if GATE != 1:
            beta = along
        notes = note(notes, retained, ok, step)
        notes = note(notes, lost, ok, step)
        notes = note(notes, tl.sum(log, 1) / K, ok, step)
        notes = note(notes, tl.min(tl.where(inside, log, float("inf")), 1), ok, step)
        notes = note(notes, tl.max(tl.where(inside, log, float("-inf")), 1), ok, step)
        notes = note(notes, retained * beta, ok, step)
        notes = note(notes, retained * erased, ok, step)
        if SOURCE > 0:
            size = scale(direction)
            tl.store(d + of_k, direction * (1 / size)[:, None], mask=inside)
            tl.store(d_size + at, size, mask=ok)
            notes = note(notes, tl.sqrt(tl.sum(direction * direction, 1)), ok, step)
            for n in tl.static_range(N - 1):
                early = tl.load(k + (((token * HK + hk) * N + n)[:, None] * K + channels[None, :]), mask=inside, other=0.0)
                tl.store(by_d + at * M + n, tl.sum(direction * early.to(tl.float32), 1), mask=ok)
        if ADDRESS >= 0:
            cosine = tl.sum(aimed * key, 1)
            if SOURCE > 0:
                tl.store(by_d + at * M + ADDRESS, erased * tl.sum(direction * aimed, 1), mask=ok)
            notes = note(notes, cosine, ok, step)
            notes = note(notes, by_address, ok, step)
            notes = note(notes, erased * beta * tl.abs(cosine), ok, step)
