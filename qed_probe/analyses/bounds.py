"""Where theory lets the erase factor's eigenvalue lie."""

import math

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS


def eigenvalue_bounds(mixer: str, gate_max: float, strength: float) -> tuple[float, float]:
    """The open interval that holds e = 1 − aᵀk, for unit q and k, gate channels in (0, B) and a strength |λ| = ``strength``.

    With B = ``gate_max``:

    - no added direction, or a projected one: dᵀk = 0 for a unit key, so e = 1 − Σ b_i k_i² and Σ k_i² = 1 give (1 − B, 1);
    - neither gated nor projected: e = 1 − Σ b_i k_i² − λ qᵀk with |qᵀk| ≤ 1 gives (1 − B − λ, 1 + λ);
    - gated, not projected: e = 1 − Σ b_i (k_i² + λ q_i k_i) is linear in b, so its ends are at b_i ∈ {0, B}. With I the
      channels where b_i = B and s = ‖k_I‖, the sum over I lies in [s² − λs, s² + λs] (Cauchy–Schwarz, ‖q_I‖ ≤ 1). It is at most
      1 + λ, and at least −λ²/4, at s = λ/2 (1 − λ at s = 1 if λ > 2): e in (1 − B(1 + λ), 1 + Bλ²/4);
    - ``linear``: a = 0 and e = 1;
    - ``comba``: what reads before the decay has gates of any size here, (−∞, 1); of the whole step, decay and edit, the
      eigenvalue e·exp g is exp g − β‖k‖², in (−1, 1);
    - ``rwkv7``: e = 1 − Σ κ_i² η_i exp(−g_i) with rates in (0, B) and its own decay g > −exp(−½) gives (1 − B exp(exp(−½)), 1).

    A gate that saturates in floating point reaches the ends, and a rounded key (‖k‖ ≠ 1) can pass them. Raises InputError for an
    unknown mixer. Sources: QED arXiv 2608.13668, Sec. 6 (whose [−0.25, 1.25] is the second case); RWKV-7 arXiv 2503.14456.
    """
    if mixer not in MIXERS:
        raise InputError(f"expected a mixer among {', '.join(MIXERS)}; found {mixer!r}")
    row, size = MIXERS[mixer], abs(strength)
    if row.gate == "none":
        return 1.0, 1.0
    if mixer == "comba":
        return -math.inf, 1.0
    if row.gate == "in-context":
        return 1 - gate_max * math.exp(math.exp(-0.5)), 1.0
    if row.direction is None or row.direction.projected:
        return 1 - gate_max, 1.0
    if not row.direction.gated:
        return 1 - gate_max - size, 1 + size
    over = size * size / 4 if size <= 2 else size - 1
    return 1 - gate_max * (1 + size), 1 + gate_max * over
