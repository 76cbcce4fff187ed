"""What moves while a model is trained."""

from functools import partial

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from qed_probe.figures import axes, style

FEW = (style.BLUE, style.VERMILION, style.GREEN, style.ORANGE, style.PURPLE, style.SKY)


@style.styled
def draw_lambda(ds: xr.Dataset) -> Figure:
    """λ of each layer and head over training, as a share of its bound (left) and of where it began (right).

    ``lambda``, dims (step, layer, head), and the attributes ``lambda_max`` and ``lambda_init``, both above 0; an attribute
    ``subject`` says what was trained. A colour a layer and a line a head.
    """
    bound, start = float(ds.attrs["lambda_max"]), float(ds.attrs["lambda_init"])
    share = ds["lambda"].transpose("step", "layer", "head").values / bound
    layers = ds["layer"].values
    figure = style.new_figure(style.COLUMN, 2.1)
    panel = figure.subplots()
    shades = FEW if len(layers) <= len(FEW) else mpl.colormaps["viridis"](np.linspace(0, 0.95, len(layers)))
    width = 0.7 if share.shape[1] * share.shape[2] <= 24 else 0.4
    for i, shade in zip(range(len(layers)), shades, strict=False):
        panel.plot(ds["step"], share[:, i], color=shade, linewidth=width, marker="." * (ds.sizes["step"] == 1))
    panel.axhline(start / bound, **axes.DASHED)
    panel.set_ylim(0, 1.08 * share[np.isfinite(share)].max(initial=1.5 * start / bound))
    panel.set_xlabel("training step")
    panel.set_ylabel("λ / λ$_{max}$")
    right = panel.secondary_yaxis("right", functions=(partial(np.multiply, bound / start), partial(np.multiply, start / bound)))
    right.set_ylabel("λ / λ$_{init}$")
    step = -(-len(layers) // len(FEW)) or 1
    named = [axes.entry(f"layer {layers[i]}", color=shades[i]) for i in range(0, len(layers), step)]
    axes.legend(figure, [*named, axes.entry("start", **axes.DASHED)])
    heads = f"{len(layers)} layers of {ds.sizes['head']} heads, a line each".replace("1 layers", "1 layer")
    counts = f"{heads}, {ds.sizes['step']:,} steps recorded; λ_init = {start:.3g}, λ_max = {bound:.3g}."
    style.write_below(figure, [*([f"{ds.attrs['subject']}."] if "subject" in ds.attrs else []), counts])
    return figure
