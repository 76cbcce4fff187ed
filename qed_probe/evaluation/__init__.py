"""What a model gets right: answers, and losses, sample by sample."""

from qed_probe.evaluation.answers import read_answers, read_losses
from qed_probe.evaluation.evaluate import LENGTHS, evaluate

__all__ = ["LENGTHS", "evaluate", "read_answers", "read_losses"]
