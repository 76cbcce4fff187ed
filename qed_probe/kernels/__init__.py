"""The recurrence of the delta-rule family: the oracle, the chunked form, and what is recorded on the way.

Shapes everywhere: B rows (1 when sequences are packed), T tokens, H value heads, Hk key heads, K key channels, V value channels,
M edits a token, P probes, N sequences.
"""

from qed_probe.kernels.backend import Choice
from qed_probe.kernels.chunked import Read, recurrence
from qed_probe.kernels.mixers import MIXERS, Direction, Edits, Mixer, Tokens, cut, edits
from qed_probe.kernels.observation import Observation, erase, merged, run, run_edits
from qed_probe.kernels.reference import Reference, reference, replay
from qed_probe.kernels.sources import Factors, factor, weights

__all__ = [
    "MIXERS",
    "Choice",
    "Direction",
    "Edits",
    "Factors",
    "Mixer",
    "Observation",
    "Read",
    "Reference",
    "Tokens",
    "cut",
    "edits",
    "erase",
    "factor",
    "merged",
    "recurrence",
    "reference",
    "replay",
    "run",
    "run_edits",
    "weights",
]
