"""Made ``v1.zarr``, the golden store of schema version 1, once; later versions must read that file, not make it again.

``python tests/golden/make_v1.py PATH``. The formulas are repeated in ``tests/test_store_golden.py``.
"""

import sys

import numpy as np

from qed_probe.store import schema, writer
from qed_probe.store.layout import Layout
from qed_probe.tasks import Prompt

RECORDS = ("rho", "eigenvalue", "log_decay", "output_norm", "edit_eigenvalue")
INPUTS = ("inputs/q", "inputs/g", "inputs/k", "inputs/a", "inputs/u", "inputs/o")


def ramp(layer: int, places: np.ndarray, *shape: int) -> np.ndarray:
    """``[places, *shape]``: (100·layer + place)/64 − i/8, i counting the elements of ``shape``."""
    i = np.arange(int(np.prod(shape))).reshape(shape)
    return ((100 * layer + places.reshape(-1, *[1] * len(shape))) / 64 - i / 8).astype(np.float32)


def main(path: str) -> None:
    ids = np.arange(80) % 64 + 32
    roles = np.array(["noise"] * 40 + ["needle"] * 30 + ["question"] * 6 + ["answer"] * 4)
    prompts = [Prompt(ids[:70], roles[:70]), Prompt(ids[70:], roles[70:])]
    layout = Layout(
        names=(*RECORDS, "read", "state_norm", "nll", "token_text", "correct", *INPUTS, "states/state"),
        layers=(0, 3),
        heads=2,
        key=3,
        value=4,
        edits=2,
        prompts=prompts,
        lengths=np.array([70, 10]),
        fingerprints=np.array([prompt.fingerprint for prompt in prompts]),
        roles=True,
        details={"length": np.array([70, 10]), "depth": np.array([0.25, 1.0])},
        lam=np.array([[0.125, 0.25], [0.5, 1.0]]),
        snapshots=np.array([9, 79]),
        attrs={"mixer": "eda-qed", "checkpoint_digest": "golden", "dtype": "float32", "strength": 1.0, "gate_max": 1.0},
        provenance={"checkpoint": "golden", "command": "make_v1.py"},
    )
    tokens = np.arange(80)
    axes: dict[str, tuple[int, ...]] = {
        "edit_eigenvalue": (2,),
        "read": (4,),
        "inputs/q": (3,),
        "inputs/g": (3,),
        "inputs/o": (4,),
    }
    axes |= {"inputs/k": (2, 3), "inputs/a": (2, 3), "inputs/u": (2, 4)}
    with writer.create(path, layout) as out:
        for layer in layout.layers:
            for name in (*RECORDS, "read", *INPUTS):
                out.write(name, ramp(layer, tokens, 2, *axes.get(name, ())), layer=layer, start=0)
            out.write_marks("state_norm", ramp(layer, schema.mark_tokens(layout.lengths), 2), layer=layer, start=0)
            out.write_marks("states/state", ramp(layer, layout.snapshots, 2, 3, 4), layer=layer, start=0)
        out.write_tokens("nll", np.where(np.isin(tokens, [0, 70]), np.nan, tokens / 16), start=0)
        out.write_tokens("token_text", [chr(c) for c in ids], start=0)
        out.write_prompts("correct", np.array([1.0, 0.0]), start=0)
        out.commit(80)
        out.finish()


if __name__ == "__main__":
    main(sys.argv[1])
