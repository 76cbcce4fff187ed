"""A layer's pass by Triton programs: what ``chunked`` and ``records`` do, on a GPU."""

import itertools
from typing import Any

import torch
import triton
from torch import Tensor

from qed_probe.kernels.chunked import states
from qed_probe.kernels.erase import ERASE
from qed_probe.kernels.mixers import Mixer, Tokens, edits, removal_read, to_heads
from qed_probe.kernels.packing import chunk_table, grid, runs
from qed_probe.kernels.programs import prepare as preparing
from qed_probe.kernels.programs import read as reading
from qed_probe.kernels.programs.couple import BLOCK, couple, couple_deep, invert
from qed_probe.kernels.programs.prepare import decay, prepare
from qed_probe.kernels.programs.read import PARTS, conclude, read
from qed_probe.kernels.programs.recur import recur
from qed_probe.kernels.programs.scan import join, scan, summarize
from qed_probe.kernels.programs.solve import solve

PROGRAMS, RUN = 384, 16
"""Instances of the scan that a GPU runs well side by side, and the fewest chunks that are worth an instance."""
PART, SHORT = 16, 64
"""Values that a program shares in where there are few, and tokens up to which sequences are gone through one by one."""
GATES, SOURCES = ("none", "scalar", "channel", "in-context"), (None, "query", "random")


class Pass(dict[str, Any]):
    """Everything that the programs of one pass are given, by the names of their arguments."""

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor for a program to fill."""
        made: Tensor = self["q"].new_empty(shape, dtype=dtype)
        return made

    def given(self, given: Tensor | None) -> Tensor:
        """What tokens have ``[T, H, ...]``, contiguous; q where a mixer has none: no program looks at it."""
        found: Tensor = self["q"] if given is None else to_heads(given, self["H"]).flatten(0, 1).contiguous()
        return found

    def drop(self, *names: str) -> None:
        """Let go of what no later program asks for."""
        for name in names:
            del self[name]

    def launch(self, program: Any, *programs: int, **choices: Any) -> None:  # noqa: ANN401
        """Run instances of a program on what it asks for; what it does not ask for tells the compiler how.

        Multiply-adds are not fused, or the bits of the output would hang on what else is asked for.
        """
        given, asked = self | choices, program.arg_names
        options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False} | {
            name: x for name, x in choices.items() if name not in asked
        }
        program[programs](*[given[name] for name in asked], **options)


def run(
    mixer: Mixer, tokens: Tokens, state: Tensor, ends: tuple[int, ...], states_at: tuple[int, ...], *, record: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs, states and records by name, and the last state, of tokens as ``checked`` returns them.

    At most four edits a token, K and V at most 256, and no gradient. Where v is float32 products are exact. Where it has 16 bits,
    so has what goes from program to program, and products are of 16 bits or TF32. Sums, the running state and what is returned
    are float32.
    """
    x = _inputs(mixer, tokens, ends, record=record)
    x |= {"v": x.given(tokens.v), "w": x.given(tokens.beta if tokens.b is None else tokens.w), "STATES": bool(states_at)}
    _prepare(x)
    if max(b - a for a, b in itertools.pairwise(ends)) <= SHORT:
        _recur(x, state.contiguous())
    else:
        _decay(x)
        _couple(x)
        _scan(x, state.contiguous(), ends)
        _read(x)
    shape, rows = tokens.v.shape[:3], x["ROWS"] // x["MP"]
    found = {"y": x["y"].view(*shape, -1), "states": _states(mixer, tokens, x["starts"], x["found"], ends, rows, states_at)}
    return found | (_records(mixer, x, shape, ends) if record else {}), x["final"]


def erase(mixer: Mixer, tokens: Tokens, ends: tuple[int, ...]) -> dict[str, Tensor]:
    """The records of the erase factors, as ``run`` makes them, from its first program alone."""
    x = _inputs(mixer, tokens, ends, record=True)
    x["LEAVE"] = False
    _prepare(x)
    found = _prepared(x, tokens.v.shape[:3])
    return {name: found[name] for name in ERASE if name in found}


def _inputs(mixer: Mixer, tokens: Tokens, ends: tuple[int, ...], *, record: bool) -> Pass:
    """What ``prepare`` is given, and sizes."""
    (H, N, V), K, how = tokens.v.shape[2:], tokens.q.shape[-1], mixer.recorded_direction
    q, k = tokens.q.flatten(0, 1).contiguous(), tokens.k.flatten(0, 1).contiguous()
    in_context = mixer.gate == "in-context"
    address = -1 if mixer.address is None else N if mixer.address_last else 0
    M, first = N + (address >= 0 or in_context), int(address == 0 or in_context)
    width, exact = 1 << (M - 1).bit_length(), tokens.v.dtype == torch.float32
    # Exact products are unrolled by the compiler: smaller blocks of them, or it takes a minute.
    rows = 32 if exact else 64
    table = chunk_table(ends, rows // width, q.device)
    x = Pass(
        q=q, k=k, dtype=tokens.v.dtype, first=table.first, size=table.size, chunks=table.chunks,
        H=H, HQ=q.shape[1], HK=k.shape[1], K=K, V=V, W=V if mixer.gate == "channel" else N,
        N=N, M=M, MP=width, G=1 if tokens.g is None else tokens.g.shape[-1], step=len(q) * H,
        ROWS=rows, READS=max(16, rows // width), BLOCK=BLOCK, PRECISION="ieee" if exact else "tf32",
        GATE=GATES.index(mixer.gate), FIRST=first, MAIN=0 if in_context else first + N - 1, ADDRESS=address,
        ADDED=mixer.direction is not None, SOURCE=SOURCES.index(how and how.source), GATED=how is not None and how.gated,
        PROJECTED=how is not None and how.projected, UNIT=tokens.unit_key, RECORD=record, PROBE=record and how is not None,
        LEAVE=True,
    )  # fmt: skip
    addressed, fixed = tokens.removal_key if in_context else tokens.address, {"lam": tokens.lam, "z": tokens.direction}
    x |= {
        "g": q.new_zeros(len(q), H, 1) if tokens.g is None else x.given(tokens.g),
        "gate": x.given(tokens.beta if tokens.b is None else tokens.b),
        "address": x.given(addressed), "gamma": x.given(tokens.gamma), "rate": x.given(tokens.in_context_rate),
    }  # fmt: skip
    x |= {name: q if each is None else to_heads(each, H, 0).contiguous() for name, each in fixed.items()}
    if in_context:
        removal_read(x["address"].float(), x["g"].float())  # refuses what prepare, which computes it too, would not
    return x


def _block(size: int, largest: int) -> int:
    """A power of two from 16 to ``largest`` that holds ``size`` channels or part of them."""
    return min(max(16, 1 << (size - 1).bit_length()), largest)


def _prepare(x: Pass) -> None:
    T, n, H, K, M, blocks = len(x["q"]), len(x["first"]), x["H"], x["K"], x["M"], x["ROWS"] // BLOCK
    kept, noted = x["dtype"], (T, H) if x["RECORD"] else (0, 0)
    left, probed = (T, H) if x["LEAVE"] else (0, 0), noted if x["LEAVE"] else (0, 0)
    scaled, own = torch.float32 if kept == torch.float32 else torch.float16, x["ADDRESS"] >= 0 or x["GATE"] == 3
    x |= {
        "a": x.new(*left, M, K, dtype=scaled), "a_size": x.new(*left, M), "d": x.new(*probed, K, dtype=scaled),
        "d_size": x.new(*probed), "keys": x.new(*left, M, K, dtype=kept) if own else x["k"], "KEYS": H if own else x["HK"],
        "by_q": x.new(*left, M), "by_d": x.new(*probed, M), "edit_eigenvalue": x.new(*noted, M),
        "edit_eigenvalue_unit": x.new(*noted, M), "prepared": x.new(len(preparing.NOTES), *noted),
    }  # fmt: skip
    x.launch(prepare, n * blocks, H, BK=_block(K, 256))


def _decay(x: Pass) -> None:
    T, n, H, G, blocks = len(x["q"]), len(x["first"]), x["H"], x["G"], x["ROWS"] // BLOCK
    x |= {"since": x.new(T, H, G), "until": x.new(T, H, G), "totals": x.new(n, H, blocks, G), "least": x.new(n, H, blocks)}
    x.launch(decay, n * blocks, H, BG=1 << (G - 1).bit_length(), num_warps=1)


def _couple(x: Pass) -> None:
    n, exact = len(x["first"]), x["PRECISION"] == "ieee"
    H, K, V, rows, reads = (x[name] for name in ("H", "K", "V", "ROWS", "READS"))
    x["coupled_a"], x["coupled_q"] = x.new(n, H, rows, rows), x.new(n, H, reads, rows)
    x["coupled_d"] = x.new(n, H, reads, rows) if x["PROBE"] else x["coupled_q"]
    BK, BV = (_block(size, 32 if exact else 64) for size in (K, V))
    readers = 3 if x["PROBE"] else 2
    x.launch(couple, n * readers, H, BK=BK, READERS=readers)
    x.launch(couple_deep, n * rows // BLOCK, H, BK=_block(K, 256), num_warps=2)
    x.launch(invert, n * H, num_warps=1)
    kept = x["dtype"]
    x |= {name: x.new(n, H, rows, K, dtype=kept) for name in ("seen", "leaving")}
    x |= {"found": x.new(n, H, rows, V), "total": x.new(n, H, K)}
    x.launch(solve, n, H, triton.cdiv(K, BK) + triton.cdiv(V, BV), BK=BK, BV=BV, num_warps=4 if exact else 8)
    x.drop("a", "a_size", "keys", "until", "coupled_a")


def _scan(x: Pass, state: Tensor, ends: tuple[int, ...]) -> None:
    (N, H, K, V), n, exact, table = state.shape, len(x["first"]), x["PRECISION"] == "ieee", x["chunks"]
    # Where few sequences run side by side, many programs share the values of each, and the chunks of each in runs.
    few = N * H < 64
    part = _block(V, 16 if exact else PART if few else 64)
    parts, size = triton.cdiv(V, part), x["ROWS"] // x["MP"]
    chunks = chunk_table(ends, size, table.device).longest
    longest = max(triton.cdiv(chunks * N * H * parts, PROGRAMS), RUN)
    wide = {"BK": _block(K, 256), "BV": part}
    x |= {"starts": x.new(n, H, K, V, dtype=x["dtype"]), "squares": x.new(n, H, parts)}
    if not few or chunks < 2 * longest:
        x |= {"initial": state, "final": x.new(N, H, K, V)}
        x.launch(scan, N, H, parts, num_stages=1 if exact else 2, **wide)
        return
    series = runs(ends, size, longest, table.device)
    S = len(series.chunks) - 1
    x |= {"chunks": series.chunks, "sequences": series.sequences, "state": state, "transitions": x.new(S, H, K, K)}
    x |= {name: x.new(S, H, K, V) for name in ("gains", "initial", "final")}
    x.launch(summarize, S, H, parts + triton.cdiv(K, part), num_stages=1 if exact else 2, **wide)
    x.launch(join, N, H, parts, PRECISION="ieee" if exact else "tf32x3", **wide)
    x.launch(scan, S, H, parts, num_stages=1 if exact else 2, **wide)
    x["final"] = x["final"][series.sequences[1:] - 1]


def _read(x: Pass) -> None:
    x.drop("seen", "leaving", "total")
    BK, BV = _block(x["K"], 32 if x["PRECISION"] == "ieee" else 64), _block(x["V"], 64)
    blocks = _outputs(x, BV)
    x.launch(read, len(x["first"]), x["H"], blocks, BK=BK, BV=BV)
    _conclude(x, blocks)


def _recur(x: Pass, state: Tensor) -> None:
    (N, H, K, V), n, states = state.shape, len(x["first"]), x["STATES"]
    BK, BV = _block(K, 256), _block(V, 32)
    blocks = _outputs(x, BV)
    x |= {"initial": state, "final": x.new(N, H, K, V), "squares": x.new(n, H, blocks)}
    x |= {"found": x.new(n if states else 0, H, x["ROWS"], V), "starts": x.new(n if states else 0, H, K, V)}
    x.launch(recur, N, H, blocks, BK=BK, BV=BV)
    _conclude(x, blocks)


def _outputs(x: Pass, BV: int) -> int:
    """Room for what is read, in blocks of values; the number of blocks."""
    blocks: int = -(-x["V"] // BV)
    T, H, V, place = len(x["q"]), x["H"], x["V"], preparing.NOTES.index("address_cosine")
    noted = (T, H) if x["RECORD"] else (0, 0)
    x |= {"y": x.new(T, H, V), "heard": x.new(T if x["PROBE"] else 0, H, V)}
    x |= {"parts": x.new(blocks, PARTS.value, *noted), "noted": x.new(len(reading.NOTES), *noted)}
    x |= {"cosine": x["prepared"][place], "query": x["prepared"][place + 1]}
    return blocks


def _conclude(x: Pass, blocks: int) -> None:
    if x["RECORD"]:
        x.launch(conclude, triton.cdiv(x["step"], 512), BLOCKS=blocks, BN=512)


def _records(mixer: Mixer, x: Pass, shape: tuple[int, ...], ends: tuple[int, ...]) -> dict[str, Tensor]:
    found, probed, addressed = _prepared(x, shape), bool(x["PROBE"]), x["ADDRESS"] >= 0
    names = reading.NOTES[: 2 + 4 * probed + 3 * addressed]
    found |= {name: note.view(shape) for name, note in zip(names, x["noted"], strict=False)}
    marked = chunk_table(ends, x["ROWS"] // x["MP"], x["q"].device).marked
    found["state_norm"] = x["squares"].sum(-1).sqrt()[marked]
    if probed:
        found["read"] = x["heard"].view(*shape, -1)
    if mixer.gate == "in-context":
        del found["budget_erase"]
    return found


def _prepared(x: Pass, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The records that need no memory."""
    names = preparing.NOTES[: 14 + bool(x["PROBE"]) + 3 * (x["ADDRESS"] >= 0)]
    found = {name: note.view(shape) for name, note in zip(names, x["prepared"], strict=False)}
    several = ("edit_eigenvalue", "edit_eigenvalue_unit") if x["M"] > 1 else ()
    return found | {name: x[name].view(*shape, -1) for name in several}


def _states(
    mixer: Mixer, tokens: Tokens, starts: Tensor, found: Tensor, ends: tuple[int, ...], size: int, states_at: tuple[int, ...]
) -> Tensor:
    """The state after each of these tokens, from those before their chunks."""
    if not states_at:
        return starts[:0].float()
    ready, layout = edits(mixer, tokens), grid(ends, size, starts.device)
    g, k, u = (x.flatten(0, 1) for x in (ready.g, ready.k, ready.u))
    n, H, _, V = found.shape
    read_by_edits = layout.take(found.view(n, H, size, -1, V)[..., : u.shape[2], :])
    return states(layout, states_at, starts.float(), g, k, u - read_by_edits)
