"""What decay and edits take from the memory's energy and put into it, by layer and role."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import axes, style

LOOKS = {"decay": style.GREY, "address": style.ORANGE, "edit's erase": style.BLUE, "edit's write": style.SKY}


@style.styled
def draw_energy(ds: xr.Dataset) -> Figure:
    """Energy gained and lost at a token, as a part of what the memory held before it: a panel a role, a stacked bar a layer.

    Takes what ``analyses.energy_ledger`` returns. What puts energy in stands on 0, what takes it hangs from there, and a line
    marks the sum. Several edits are one part.
    """
    roles, layers = [str(role) for role in ds["role"].values], ds["layer"].values
    if len(roles) == 2 and bool((ds["n"].isel(role=0) == ds["n"].isel(role=1)).all()):
        roles = roles[1:]
    across = axes.columns(len(roles))
    wide = across > 1 or len(layers) > 12
    figure, panels = axes.panels(len(roles), across, 1.35, style.PAGE if wide else style.COLUMN)
    shares = _shares(ds.transpose("layer", "role", "part", ...))
    for panel, role in zip(panels, roles, strict=True):
        _draw_role(panel, {name: x.sel(role=role).values for name, x in shares.items()})
        _label_gaps(panel, ds["held"].sel(role=role).sum("head").values, ds["n"].sel(role=role).sum("head").values)
        panel.set_title(f"{'all tokens' if role == 'all' else role} ({_tokens(ds, role)})", pad=3)
    style.label_rows(panels[0].xaxis, layers, most=max(4, 24 // across))
    axes.label_outside(panels, across, "layer", "change of ‖S‖² (%)")
    bars = [axes.entry(name, color=LOOKS[name], linewidth=4) for name in shares]
    axes.legend(figure, [*bars, axes.entry("net", color="black", linewidth=1.2)])
    style.write_below(figure, [*_lines(ds, {name: x.sel(role="all") for name, x in shares.items()}), style.note(ds)])
    return figure


def _shares(ds: xr.Dataset) -> dict[str, xr.DataArray]:
    """Per cent of the energy held, ``(layer, role)``, of each part that is drawn."""
    edits = [part for part in ds["part"].values if part not in ("decay", "address")]
    found = {name: 100 * ds["erase_share"].sel(part=name) for name in ("decay", "address") if name in ds["part"].values}
    for name in ("erase", "write"):
        found[f"edit's {name}"] = 100 * ds[f"{name}_share"].sel(part=edits).sum("part", skipna=False)
    return found


def _draw_role(panel: Axes, shares: dict[str, NDArray[np.float64]]) -> None:
    """The bars of one role, ``[layer]`` each."""
    stacked = np.stack(list(shares.values()))
    at = np.arange(stacked.shape[1])
    above, below = np.zeros(len(at)), np.zeros(len(at))
    for name, x in shares.items():
        panel.bar(at, x, 0.8, np.where(x > 0, above, below), color=LOOKS[name], linewidth=0)
        above += np.where(x > 0, x, 0)
        below += np.where(x < 0, x, 0)
    panel.axhline(0, color=style.INK, linewidth=0.5)
    panel.hlines(stacked.sum(0), at - 0.2, at + 0.2, color="black", linewidth=1.2, zorder=3)
    panel.set_xlim(-0.6, len(at) - 0.4)
    panel.grid(axis="y", color="0.9", linewidth=0.4)
    panel.set_axisbelow(True)


def _label_gaps(panel: Axes, held: NDArray[np.float64], n: NDArray[np.int64]) -> None:
    """Say why a layer has no bar."""
    for layer in np.flatnonzero(held == 0):
        axes.label_gap(panel, "held nothing" if n[layer] else "no tokens", float(layer))


def _tokens(ds: xr.Dataset, role: str) -> str:
    """How many tokens a layer and head has of the role."""
    n = ds["n"].sel(role=role).values
    return axes.span(np.array([n.min(), n.max()]), "tokens")


def _lines(ds: xr.Dataset, shares: dict[str, xr.DataArray]) -> list[str]:
    """What a bar is, how large, what it means, and how far the ledger closes."""
    prompts, left_out = axes.span(np.array([ds.attrs["prompts"]]), "prompts"), ds.attrs["left_out"]
    without = f" Heads over prompts that are left out, for inputs that are not finite: {left_out:,}." if left_out else ""
    error = ds["closing_error"].values
    closes = f"closes to {np.nanmax(error):.1g} of its largest amount" if np.isfinite(error).any() else "is empty"
    return [
        "Change at a token over the ‖S‖² held before it: sums over tokens and heads. Erase: S − k(Sᵀa)ᵀ; write: + k uᵀ.",
        f"All tokens, by layer: {', '.join(_range(name, x.values) for name, x in shares.items())}.",
        "Decay and erase take only what lies in their way: how far a gate opens does not tell how much.",
        f"Replayed in float64 over {prompts}; the ledger {closes}.{without}",
    ]


def _range(name: str, x: NDArray[np.float64]) -> str:
    """The smallest and the largest of these per cent."""
    known = x[np.isfinite(x)]
    if not known.size:
        return f"{name} unknown"
    ends = list(dict.fromkeys(f"{end:+.2g}".replace("-", "−") for end in (known.min(), known.max())))
    return f"{name} {' to '.join(ends)} %"
