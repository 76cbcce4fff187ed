"""From a trace's Dataset to a small Dataset of numbers: each analysis is an array function and one labelled function on top."""

from qed_probe.analyses.accuracy import accuracy, by_depth, usable_length
from qed_probe.analyses.blocks import Analysis
from qed_probe.analyses.bounds import eigenvalue_bounds
from qed_probe.analyses.budgets import gate_budgets
from qed_probe.analyses.changes import change_effects
from qed_probe.analyses.contrasts import contrast
from qed_probe.analyses.correction import correction_share
from qed_probe.analyses.decay import half_life
from qed_probe.analyses.difference import difference
from qed_probe.analyses.energy import energy_ledger
from qed_probe.analyses.geometry import address_geometry, isotropic_cosine
from qed_probe.analyses.heads import head_effects
from qed_probe.analyses.histograms import eigenvalues, rho, rho_read
from qed_probe.analyses.kinds import answer_kinds
from qed_probe.analyses.modes import modes
from qed_probe.analyses.patching import patch_effects
from qed_probe.analyses.published import PUBLISHED, check_unmixed, published, published_accuracy, published_contrast
from qed_probe.analyses.record_contrasts import record_contrast, record_quantiles
from qed_probe.analyses.saturation import gate_saturation
from qed_probe.analyses.statistics import binomial_interval, bootstrap_interval, holm, mcnemar, mean_interval, page
from qed_probe.analyses.strengths import strengths
from qed_probe.analyses.strip import token_strip
from qed_probe.analyses.summary import summary

__all__ = [
    "PUBLISHED",
    "Analysis",
    "accuracy",
    "address_geometry",
    "answer_kinds",
    "binomial_interval",
    "bootstrap_interval",
    "by_depth",
    "change_effects",
    "check_unmixed",
    "contrast",
    "correction_share",
    "difference",
    "eigenvalue_bounds",
    "eigenvalues",
    "energy_ledger",
    "gate_budgets",
    "gate_saturation",
    "half_life",
    "head_effects",
    "holm",
    "isotropic_cosine",
    "mcnemar",
    "mean_interval",
    "modes",
    "page",
    "patch_effects",
    "published",
    "published_accuracy",
    "published_contrast",
    "record_contrast",
    "record_quantiles",
    "rho",
    "rho_read",
    "strengths",
    "summary",
    "token_strip",
    "usable_length",
]
