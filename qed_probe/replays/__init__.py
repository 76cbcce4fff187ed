"""What the erase would do in another direction: one step, and the whole trajectory."""

from qed_probe.replays.directions import Counterfactuals, counterfactuals, derangement
from qed_probe.replays.inputs import LayerInputs, captured_inputs, stored_inputs
from qed_probe.replays.layer import OWN, QUANTITIES, REGIMES, Match, Replay, replay_layer
from qed_probe.replays.run import against_actual, over_layers, replay, replay_store
from qed_probe.replays.tally import summarise

__all__ = [
    "OWN", "QUANTITIES", "REGIMES", "Counterfactuals", "LayerInputs", "Match", "Replay", "against_actual", "captured_inputs",
    "counterfactuals", "derangement", "over_layers", "replay", "replay_layer", "replay_store", "stored_inputs", "summarise",
]  # fmt: skip
