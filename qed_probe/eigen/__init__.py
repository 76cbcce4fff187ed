"""The eigenvalue claim, judged: erase factors tallied in constant memory, put together from parts, and held against claims."""

from qed_probe.eigen.claims import Claim, parse_claim
from qed_probe.eigen.parts import merge_eigen
from qed_probe.eigen.run import tally_eigen, tally_eigen_store
from qed_probe.eigen.table import Verdict, compare_eigen, verdicts

__all__ = [
    "Claim",
    "Verdict",
    "compare_eigen",
    "merge_eigen",
    "parse_claim",
    "tally_eigen",
    "tally_eigen_store",
    "verdicts",
]
