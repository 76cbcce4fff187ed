"""Where e lies: by head against λ, by layer of several runs, over training; the Dataset is described in figures/eigen.py."""

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import axes, runs, style
from qed_probe.figures import eigen_parts as parts

STANDING = {"inside": style.BLUE, "rounding": style.ORANGE, "outside": style.VERMILION}
FEW = 7
"""Up to so many runs have a colour each, more are shaded in order."""


def has_strength(ds: xr.Dataset) -> bool:
    """Whether any head adds a direction, so that bounds can depend on its λ."""
    return parts.has(ds, parts.USED) and bool((ds["lambda"].fillna(0) != 0).any())


@style.styled
def draw_eigen_strength(ds: xr.Dataset) -> Figure:
    """A panel a run that adds a direction: from smallest to largest e of each head at its λ, and theory's bounds over λ.

    A head is drawn by where its values lie: inside its bounds, outside as used but not with the key renormalised, outside with
    both. Bounds are joined between the heads' own, and left out where infinite.
    """
    shown = [(name, run) for name, run in parts.each_run(ds) if (run["lambda"].fillna(0) != 0).any()]
    across = axes.columns(len(shown))
    figure, panels = axes.panels(len(shown), across, 1.6, style.COLUMN if len(shown) == 1 else style.PAGE)
    heads = dict.fromkeys(STANDING, 0)
    for panel, (name, run) in zip(panels, shown, strict=True):
        lam = run["lambda"].transpose("layer", "head").values
        low, high = parts.extremes(run, parts.USED)
        outside, real = (
            run["outside"].sel(quantity=quantity).transpose("layer", "head").values > 0
            for quantity in (parts.USED, parts.judged(run))
        )
        drawn = np.isfinite(lam) & np.isfinite(low)
        for standing, mine in {"inside": ~outside, "rounding": outside & ~real, "outside": real}.items():
            mine = mine & drawn
            heads[standing] += int(mine.sum())
            colour = STANDING[standing]
            panel.vlines(lam[mine], low[mine], high[mine], color=colour, linewidth=1.0, zorder=2)
            panel.plot(np.tile(lam[mine], 2), np.append(low[mine], high[mine]), ".", color=colour, markersize=2.5)
        _draw_bounds_over(panel, lam[drawn], run, drawn)
        panel.set_title(runs.shorten(name, 40 if across < 3 else 24), pad=3)
        panel.margins(x=0.06)
    axes.label_outside(panels, across, "λ of the head", "e, smallest to largest")
    words = {"inside": "inside the bounds", "rounding": "outside by rounding", "outside": "outside"}
    marks = [
        axes.entry(f"{words[key]}: {heads[key]:,}", color=STANDING[key]) for key in STANDING if heads[key] or key == "inside"
    ]
    axes.legend(figure, [*marks, axes.entry("theory's bounds", **axes.DASHED)])
    idle = ds.sizes["run"] - len(shown)
    lines = ["A line a head, from its smallest to its largest e as used. The legend counts heads by where all their values lie."]
    lines += [f"Not drawn: {style.counted(idle, 'run')} without an added direction."] * bool(idle)
    parts.write_below(figure, ds, lines)
    return figure


def _draw_bounds_over(panel: Axes, lam: parts.Array, run: xr.Dataset, drawn: NDArray[np.bool_]) -> None:
    order = np.argsort(lam)
    for name in ("low", "high"):
        ends = run[name].transpose("layer", "head").values[drawn][order]
        if np.isfinite(ends).any():
            ends = np.where(np.isfinite(ends), ends, np.nan)
            panel.plot(lam[order], ends, marker="_", markevery=[0, -1], zorder=1.5, **axes.DASHED)  # where all λ are alike too


@style.styled
def draw_eigen_ridge(ds: xr.Dataset) -> Figure:
    """A row a layer and a line a run: the histogram of e as used, of all heads, as shares of the run's values in this layer.

    The lines of a row are scaled to the highest of them, so that they compare; tails are what ``draw_eigen_histogram`` shows.
    """
    layers, found = ds["layer"].values, parts.each_run(ds)
    colours = _colours([name for name, _ in found])
    named = list(colours)[:: -(-len(colours) // FEW)]
    figure = style.new_figure(style.COLUMN, 0.6 + 0.12 * len(named) + float(np.clip(0.3 * len(layers), 0.8, 7.5)))
    panel = figure.subplots()
    ends = [0.0, 1.0]
    for row in range(len(layers)):
        bars = {name: parts.e_bars(run.isel(layer=row), parts.USED) for name, run in found}
        peak = max((counts.max() / counts.sum() for counts, _, _ in bars.values() if counts.size), default=1)
        for name, (counts, edges, _) in bars.items():
            if counts.size:
                heights = row + 0.45 - 0.85 * counts / counts.sum() / peak
                panel.stairs(heights, edges, baseline=row + 0.45, color=colours[name], linewidth=0.8, zorder=2)
                ends += [edges[0], edges[-1]]
    parts.draw_bounds(panel, ds)
    ends += filter(np.isfinite, parts.bounds(ds))
    margin = 0.03 * (max(ends) - min(ends))
    panel.set_xlim(min(ends) - margin, max(ends) + margin)
    panel.set_ylim(len(layers) - 0.5, -0.5)
    style.label_rows(panel.yaxis, layers, most=24)
    panel.set_ylabel("layer")
    panel.set_xlabel("e = 1 − aᵀk, all heads")
    entries = [axes.entry(runs.shorten(name, 40), color=colours[name]) for name in named]
    axes.legend(figure, [*entries, axes.entry("theory's bounds, the widest of all runs", **axes.DASHED)])
    lines = ["Each row is scaled to its highest bar; a line is a run's shares of its own values of that layer, as used."]
    parts.write_below(figure, ds, lines)
    return figure


def _colours(names: list[str]) -> dict[str, str]:
    """A colour a run, or where there are many a shade that goes with their order."""
    if len(names) <= FEW:
        return dict(zip(names, runs.FREE, strict=False))
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.95, len(names)))
    return {name: mpl.colors.to_hex(shade) for name, shade in zip(names, shades, strict=True)}


def has_steps(ds: xr.Dataset) -> bool:
    """Whether any model was looked at after two or more numbers of training steps."""
    return parts.has(ds, parts.USED) and bool(_trained(ds))


@style.styled
def draw_eigen_steps(ds: xr.Dataset) -> Figure:
    """A panel a model of which there are several training steps: the range of e over all heads, and of each layer, by step.

    Needs ``steps(run)``; runs of one ``mixer`` and ``seed`` are one model. The band is from the smallest to the largest e of all
    heads as used, lines are the ends of each layer, dashed the widest of theory's bounds, which move with λ.
    """
    models = _trained(ds)
    across = axes.columns(len(models))
    figure, panels = axes.panels(len(models), across, 1.6, style.COLUMN if len(models) == 1 else style.PAGE)
    layers = ds["layer"].values
    shades = axes.shades(len(layers))
    for panel, (title, model) in zip(panels, models.items(), strict=True):
        steps = model["steps"].values
        ends = np.stack([np.stack(parts.extremes(run, parts.USED)) for _, run in parts.each_run(model)])  # [step, 2, layer, head]
        low, high = np.fmin.reduce(ends[:, 0], (1, 2)), np.fmax.reduce(ends[:, 1], (1, 2))
        panel.fill_between(steps, low, high, color=style.EMPTY, linewidth=0, zorder=1)
        for layer, shade in enumerate(shades):
            for side, pick in ((0, np.fmin), (1, np.fmax)):
                panel.plot(steps, pick.reduce(ends[:, side, layer], 1), ".-", color=shade, linewidth=0.7, markersize=2)
        for end in np.array([parts.bounds(run) for _, run in parts.each_run(model)]).T:
            if np.isfinite(end).any():
                panel.plot(steps, np.where(np.isfinite(end), end, np.nan), **axes.DASHED)
        panel.set_title(f"{title}: {parts.written(np.fmin.reduce(low))} to {parts.written(np.fmax.reduce(high))}", pad=3)
    axes.label_outside(panels, across, "training steps", "e, smallest and largest")
    every = -(-len(layers) // 6)
    named = [axes.entry(f"layer {layers[i]}", color=shades[i]) for i in range(0, len(layers), every)]
    axes.legend(figure, [*named, axes.entry("all", color=style.EMPTY, linewidth=4), axes.entry("theory's bounds", **axes.DASHED)])
    parts.write_below(figure, ds, ["Smallest and largest e of each layer, all heads, as used; a mark a checkpoint."])
    return figure


def _trained(ds: xr.Dataset) -> dict[str, xr.Dataset]:
    """By mixer and seed the runs, in order of their steps, of models with more than one number of them."""
    if "steps" not in ds:
        return {}
    known = ds.isel(run=np.isfinite(ds["steps"].values) & (ds["steps"].values >= 0)).sortby("steps")
    seeds = known["seed"].values if "seed" in known else np.full(known.sizes["run"], -1)
    keys = [
        f"{mixer}, seed {seed}" if seed >= 0 else str(mixer) for mixer, seed in zip(known["mixer"].values, seeds, strict=True)
    ]
    found = {key: known.isel(run=[i for i, other in enumerate(keys) if other == key]) for key in dict.fromkeys(keys)}
    return {key: model for key, model in found.items() if len(set(model["steps"].values)) > 1}
