"""What every layer feeds its memory while a model runs, pack after pack, and what is known of the run."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from qed_probe.models.capture import Captured
from qed_probe.models.device import enough_memory
from qed_probe.replays.inputs import LayerInputs, captured_inputs
from qed_probe.tracing.passes import forward
from qed_probe.tracing.plan import Plan
from qed_probe.tracing.run import Progress

KEPT = ("mixer", "checkpoint", "checkpoint_digest", "dtype", "strength", "direction", "at", "mode", "lambda_max", "gate_max")
"""Attributes of a trace that what is made of it has too."""


def kept(attrs: Mapping[str, object]) -> dict[str, object]:
    """Those of ``KEPT`` that there are."""
    return {name: attrs[name] for name in KEPT if name in attrs}


def run_model(plan: Plan, take: Callable[[LayerInputs], None], progress: Progress | None) -> dict[str, object]:
    """Hand the inputs of each layer of a plan over each pack to ``take``; returns what is known of the run."""
    layout, done, total = plan.layout, 0, len(plan.layout.layers) * plan.layout.sizes["token"]
    for pack in plan.packs:

        def sink(captured: Captured, _: int, numbers: range = range(pack.start, pack.stop)) -> None:
            nonlocal done
            take(captured_inputs(captured, numbers))
            done += captured.output.shape[1]
            if progress is not None:
                progress(done, total)

        ids = np.concatenate([prompt.tokens for prompt in plan.prompts[pack]])
        with enough_memory(f"prompts {pack.start + 1} to {pack.stop}, in one pass"), torch.inference_mode():
            forward(plan, pack, torch.from_numpy(ids).to(plan.model.device), sink)
    counts = {"tokens": layout.sizes["token"], "tokens_incomplete": 0, "source": "model"}
    return kept({**layout.attrs, **layout.provenance}) | counts
