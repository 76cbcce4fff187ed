"""A checkpoint and prompts go in, a store comes out."""

from qed_probe.tracing.plan import Settings
from qed_probe.tracing.run import Estimate, estimate, trace

__all__ = ["Estimate", "Settings", "estimate", "trace"]
