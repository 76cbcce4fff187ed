"""What the erase would do in another direction: one step, and the whole trajectory."""

from qed_probe.replays.directions import Counterfactuals, counterfactuals, derangement
from qed_probe.replays.inputs import LayerInputs, captured_inputs, stored_inputs
from qed_probe.replays.layer import OWN, QUANTITIES, REGIMES, Match, Replay, replay_layer

__all__ = [
    "OWN", "QUANTITIES", "REGIMES", "Counterfactuals", "LayerInputs", "Match", "Replay", "captured_inputs", "counterfactuals",
    "derangement", "replay_layer", "stored_inputs",
]  # fmt: skip
