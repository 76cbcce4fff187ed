"""The recurrence by Triton programs that a gradient can flow through: what training on a GPU runs."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from qed_probe.kernels.mixers import Mixer, Tokens, edits
from qed_probe.kernels.packing import ChunkTable, chunk_table
from qed_probe.kernels.programs import backward

ROWS = 16
"""Edits a chunk: what couples the rows of a chunk grows with it, the states between chunks that are read and written shrink."""


def run(mixer: Mixer, tokens: Tokens, state: Tensor, ends: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs, no states, and the last state, float32 and differentiable, of tokens as ``checked`` returns them; there are some.

    The edits are PyTorch's, the recurrence is Triton's. Products are as exact as float32 where the values are that, else TF32,
    which rounds less than 16 bits do.
    """
    ready = edits(mixer, tokens)
    precision = "tf32x3" if tokens.v.dtype == torch.float32 else "tf32"
    y, final = recurrence(ready.q, ready.g, ready.k, ready.a, ready.u, state, ends, precision)
    return {"y": y, "states": state[:0]}, final


def recurrence(
    q: Tensor, g: Tensor, k: Tensor, a: Tensor, u: Tensor, state: Tensor, ends: tuple[int, ...], precision: str
) -> tuple[Tensor, Tensor]:
    """Output ``[B, T, H, V]`` and last state ``[N, H, K, V]`` of ``chunked.recurrence``; inputs, N sequences and theirs as there.

    At most four edits a token, K and V at most 256. The backward pass keeps the inputs alone and computes the rest again.
    """
    (B, T, H, K), (M, V) = q.shape, u.shape[-2:]
    width = triton.next_power_of_2(M)
    plan = _Plan(chunk_table(ends, ROWS // width, q.device), H, K, V, M, width, g.shape[-1], precision)
    given = (x.flatten(0, 1).contiguous() for x in (q, g, k, a, u))
    y, final = _Recurrence.apply(plan, *given, state.contiguous())  # type: ignore[no-untyped-call]
    return y.view(B, T, H, V), final


@dataclass(frozen=True)
class _Plan:
    """What the programs are compiled for and launched over: the chunks, the sizes, and how exact products are."""

    table: ChunkTable
    H: int
    K: int
    V: int
    M: int
    width: int
    G: int
    precision: str

    def launch(self, program: Any, *tensors: Tensor, most: tuple[int, int], over: str) -> None:  # noqa: ANN401
        """Run a program over each chunk or sequence, each head and, as ``over`` says, each block of keys or values.

        ``most`` is how many key and value channels a program holds at once.
        """
        BK, BV = (min(max(16, triton.next_power_of_2(size)), limit) for size, limit in zip((self.K, self.V), most, strict=True))
        rows = len(self.table.chunks) - 1 if "sequences" in over else len(self.table.first)
        parts = triton.cdiv(self.K, BK) if "keys" in over else triton.cdiv(self.V, BV) if "values" in over else 1
        accepted: dict[str, Any] = {"M": self.M, "MP": self.width, "G": self.G, "LEVELS": ROWS.bit_length() - 1}
        fixed = {name: value for name, value in accepted.items() if name in program.arg_names}
        # Fewer warps than four are faster, but Triton 3.6 then gets products of 16 rows with 16 wrong.
        fixed |= {"PRECISION": self.precision, "num_warps": 4, "num_stages": 3 if "sequences" in over else 1}
        program[rows, self.H, parts](*tensors, self.H, self.K, self.V, BK=BK, BV=BV, ROWS=ROWS, **fixed)


class _Solved(NamedTuple):
    """What ``backward.solve`` gives."""

    inverse: Tensor
    by_q: Tensor
    seen: Tensor
    written: Tensor
    asking: Tensor
    leaving: Tensor
    total: Tensor


def _solve(plan: _Plan, q: Tensor, g: Tensor, k: Tensor, a: Tensor, u: Tensor) -> _Solved:
    def new(*shape: int) -> Tensor:
        return q.new_empty(len(plan.table.first), plan.H, *shape)

    of_keys, square = (ROWS, plan.K), (ROWS, ROWS)
    solved = _Solved(new(*square), new(*square), new(*of_keys), new(ROWS, plan.V), new(*of_keys), new(*of_keys), new(plan.K))
    given = (q, g, k, a, u, plan.table.first, plan.table.size)
    plan.launch(backward.solve, *given, *solved, most=(32, 64), over="chunks")
    return solved


def _scan(plan: _Plan, solved: _Solved, initial: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk, ``[chunks, H, K, V]``, and after the last."""
    starts, final = initial.new_empty(len(plan.table.first), *initial.shape[1:]), torch.empty_like(initial)
    given = (solved.seen, solved.written, solved.leaving, solved.total, plan.table.chunks, initial)
    plan.launch(backward.scan, *given, starts, final, most=(256, 32), over="sequences, values")
    return starts, final


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *given: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        *inputs, initial = given
        solved, table = _solve(plan, *inputs), plan.table
        starts, final = _scan(plan, solved, initial)
        y = initial.new_empty(len(inputs[0]), plan.H, plan.V)
        reading = (solved.asking, solved.by_q, solved.seen, solved.written, starts, table.first, table.size, y)
        plan.launch(backward.read, *reading, most=(64, 64), over="chunks, values")
        ctx.plan = plan
        ctx.save_for_backward(*given)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        plan: _Plan = ctx.plan
        q, g, k, a, u, initial = ctx.saved_tensors
        table, d_y = plan.table, d_y.contiguous()
        found = _solve(plan, q, g, k, a, u)
        starts, _ = _scan(plan, found, initial)
        ends, d_wrote, d_initial = torch.empty_like(starts), torch.empty_like(found.written), torch.empty_like(d_final)
        running = (found.asking, found.by_q, found.seen, found.leaving, found.total, table.first, table.size, table.chunks)
        into = (d_y, d_final.contiguous(), ends, d_wrote, d_initial)
        plan.launch(backward.scan_back, *running, *into, most=(256, 32), over="sequences, values")
        wrote, d_u, d_lower, d_by_q = (torch.empty_like(x) for x in (found.written, u, found.inverse, found.by_q))
        solving = (found.inverse, found.seen, found.written, starts, table.first, table.size, d_y, d_wrote)
        plan.launch(backward.solve_back, *solving, wrote, d_u, d_lower, d_by_q, most=(64, 64), over="chunks")
        d_q, d_g, d_k, d_a = (torch.empty_like(x) for x in (q, q, k, a))
        coupling = (q, g, k, a, table.first, table.size, starts, ends, wrote, d_y, d_u, d_lower, d_by_q)
        plan.launch(backward.couple_back, *coupling, d_q, d_g, d_k, d_a, most=(64, 64), over="chunks, keys")
        return None, d_q, d_g.sum(-1, keepdim=True) if plan.G < plan.K else d_g, d_k, d_a, d_u, d_initial
