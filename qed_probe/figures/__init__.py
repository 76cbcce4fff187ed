"""From a computed Dataset to a matplotlib Figure: a figure draws and never computes, and no pyplot knows of it."""

from qed_probe.figures.difference import draw_difference
from qed_probe.figures.histograms import draw_eigenvalues, draw_rho, draw_rho_read
from qed_probe.figures.maps import draw_correction_share, draw_half_life
from qed_probe.figures.strip import draw_token_strip

__all__ = [
    "draw_correction_share",
    "draw_difference",
    "draw_eigenvalues",
    "draw_half_life",
    "draw_rho",
    "draw_rho_read",
    "draw_token_strip",
]
