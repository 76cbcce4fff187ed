"""What a model gets right: answers, and losses, sample by sample; what a part of one run does in another."""

from qed_probe.evaluation.answers import read_answers, read_losses
from qed_probe.evaluation.evaluate import LENGTHS, evaluate
from qed_probe.evaluation.patching import patch

__all__ = ["LENGTHS", "evaluate", "patch", "read_answers", "read_losses"]
