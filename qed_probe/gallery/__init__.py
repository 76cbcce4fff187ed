"""From stores to figures in files."""

from qed_probe.gallery.drawing import plot
from qed_probe.gallery.outcomes import contrast, contrast_published
from qed_probe.gallery.traces import DIAGNOSTICS, contrast_traces, diff, skipped

__all__ = ["DIAGNOSTICS", "contrast", "contrast_published", "contrast_traces", "diff", "plot", "skipped"]
