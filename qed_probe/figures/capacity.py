"""How much of memories is used: ranks, singular values and norms of states by position."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import axes, style

TITLES = {
    "effective_rank": "effective rank",
    "stable_rank": "stable rank, ‖S‖²/σ₁²",
    "capacity_norm": "‖S‖, mean over prompts",
    "capacity_norm_variance": "‖S‖, standard deviation over prompts",
}
FLOOR = 1e-4


@style.styled
def draw_capacity(ds: xr.Dataset) -> Figure:
    """Effective and stable rank, mean and standard deviation of ‖S‖ by position, and singular values of the last states.

    Takes the part ``capacity`` of ``inspect_memory``. Thin lines are heads, thick ones their mean; a colour a layer. A
    dashed line marks the length of the prompts that the model was trained on, where that is known.
    """
    layers = ds["layer"].values
    figure = style.new_figure(style.PAGE, 3.6)
    grid = figure.add_gridspec(2, 6)
    places = {"effective_rank": grid[0, :2], "stable_rank": grid[0, 2:4], "capacity_norm": grid[1, :3]}
    panels = {name: figure.add_subplot(place) for name, place in (places | {"capacity_norm_variance": grid[1, 3:]}).items()}
    colours = axes.shades(len(layers))
    tokens = ds["capacity_tokens"].max("layer").values
    for name, panel in panels.items():
        x = ds[name] ** 0.5 if name.endswith("variance") else ds[name]
        _draw_lines(panel, tokens, x.transpose("layer", "head", "capacity_position").values, colours)
        if not np.isfinite(x.values).any():
            axes.label_gap(panel, "one prompt" if name.endswith("variance") else "no ranks")
        axes.length_axis(panel, np.unique(tokens[np.isfinite(tokens)]), 8)
        axes.from_zero(panel)
        panel.set_title(TITLES[name], pad=3)
        panel.set_xlabel("tokens seen")
    spectrum = figure.add_subplot(grid[0, 4:])
    last = ds["singular_values"].isel(capacity_position=-1).transpose("layer", "head", "singular").values
    _draw_lines(spectrum, ds["singular"].values, last, colours)
    spectrum.set_yscale("log")
    spectrum.set_ylim(FLOOR, 1.5)
    spectrum.set_title(f"σᵢ/σ₁ after {axes.length_label(tokens[-1])} tokens", pad=3)
    spectrum.set_xlabel("i")
    few = sorted({0, len(layers) // 2, len(layers) - 1}) if len(layers) > 8 else range(len(layers))
    trained = axes.draw_trained(panels.values(), ds)
    axes.legend(figure, [axes.entry(f"layer {layers[i]}", color=colours[i]) for i in few], trained)
    style.write_below(figure, _note(ds, bool(trained)))
    return figure


def _draw_lines(panel: Axes, at: NDArray[np.float64], x: NDArray[np.float64], colours: NDArray[np.float64]) -> None:
    """A thin line a head, and a thick one their mean, ``[layer, head, position]``."""
    marker = "o" if len(at) == 1 else None
    for heads, colour in zip(x, colours, strict=True):
        panel.plot(at, heads.T, color=colour, linewidth=0.4, alpha=0.6, marker=marker, markersize=1.5)
        panel.plot(at, heads.mean(0), color=colour, linewidth=1.3, marker=marker, markersize=3)


def _note(ds: xr.Dataset, trained: bool) -> list[str]:
    """Over how many prompts, of how many possible ranks, and what has none."""
    n, undefined = ds["capacity_n"].values, int(ds["capacity_undefined"].sum())
    lines = [
        f"{axes.about(ds)} {axes.span(n, 'prompts')} a position. A prompt's last state counts at the next of 64, 128, 256 … "
        "tokens, and stands at the mean of what was seen.",
        f"Effective rank exp(−Σ p ln p), p = σ/Σσ (Roy and Vetterli, 2007), at most {ds.sizes['singular']}. "
        "Thin lines: heads; thick: their mean.",
    ]
    empty = [f"{undefined:,} states are 0 or not finite and have no ranks."] * bool(undefined)
    unknown = ["At which length the model was trained is not known here."] * (not trained)
    return lines + [" ".join(empty + unknown)] * bool(empty or unknown)
