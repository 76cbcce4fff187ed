"""From a computed Dataset to a matplotlib Figure: a figure draws and never computes, and no pyplot knows of it."""

from qed_probe.figures.budgets import draw_gate_budgets
from qed_probe.figures.capacity import draw_capacity
from qed_probe.figures.contrasts import draw_contrast
from qed_probe.figures.curves import draw_accuracy, draw_strengths
from qed_probe.figures.depths import draw_depth
from qed_probe.figures.difference import draw_difference
from qed_probe.figures.dots import draw_dots
from qed_probe.figures.effects import draw_effects
from qed_probe.figures.eigen import draw_eigen_histogram, draw_eigen_maps, eigen_figures
from qed_probe.figures.eigen_growth import draw_eigen_growth
from qed_probe.figures.eigen_ranges import draw_eigen_ridge, draw_eigen_steps, draw_eigen_strength
from qed_probe.figures.energy import draw_energy
from qed_probe.figures.geometry import draw_address_geometry
from qed_probe.figures.growth import draw_growth
from qed_probe.figures.heads import draw_heads
from qed_probe.figures.histograms import draw_eigenvalues, draw_rho, draw_rho_read
from qed_probe.figures.maps import draw_correction_share, draw_half_life
from qed_probe.figures.modes import draw_modes
from qed_probe.figures.patching import draw_patches
from qed_probe.figures.recall import draw_recall
from qed_probe.figures.record_contrasts import draw_record_contrast, draw_record_quantiles
from qed_probe.figures.replays import draw_replay
from qed_probe.figures.saturation import draw_gate_saturation
from qed_probe.figures.sources import draw_read_map, draw_sources
from qed_probe.figures.strip import draw_token_strip
from qed_probe.figures.training import draw_lambda

__all__ = [
    "draw_accuracy",
    "draw_address_geometry",
    "draw_capacity",
    "draw_contrast",
    "draw_correction_share",
    "draw_depth",
    "draw_difference",
    "draw_dots",
    "draw_effects",
    "draw_eigen_growth",
    "draw_eigen_histogram",
    "draw_eigen_maps",
    "draw_eigen_ridge",
    "draw_eigen_steps",
    "draw_eigen_strength",
    "draw_eigenvalues",
    "draw_energy",
    "draw_gate_budgets",
    "draw_gate_saturation",
    "draw_growth",
    "draw_half_life",
    "draw_heads",
    "draw_lambda",
    "draw_modes",
    "draw_patches",
    "draw_read_map",
    "draw_recall",
    "draw_record_contrast",
    "draw_record_quantiles",
    "draw_replay",
    "draw_rho",
    "draw_rho_read",
    "draw_sources",
    "draw_strengths",
    "draw_token_strip",
    "eigen_figures",
]
