"""One pass: whole prompts packed in one call, or one prompt and, a call each, the tokens that the model goes on with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qed_probe.models.capture import Captured, capture
from qed_probe.tracing.plan import Plan

Sink = Callable[[Captured, int], None]
"""Called with what was seen of one layer in one call, and the packed token that the call began at."""


def forward(plan: Plan, pack: slice, prompts: Tensor, sink: Sink) -> tuple[Tensor, Tensor]:
    """Run the prompts of a pack, ``[T]``; returns all ids, ``[T + generated]``, and hidden states, ``[T + generated, hidden]``.

    With tokens to generate, the pack is one prompt: its call fills a cache, and each token after it, the likeliest to follow, is
    a call that goes on with that cache. So is the last, which has every record like the others; what it predicts is dropped.
    """
    layout, model = plan.layout, plan.model
    begin = int(layout.cu_seqlens[pack.start])

    def call(ids: Tensor, start: int, **how: Any) -> Tensor:  # noqa: ANN401 - what the model takes
        kept = layout.snapshots[slice(*np.searchsorted(layout.snapshots, [start, start + len(ids)]))]
        with capture(
            model, lambda captured: sink(captured, start), layout.layers, states_at=tuple(int(token) - start for token in kept)
        ):
            hidden: Tensor = model(ids[None], **how)[0]
        return hidden

    if not layout.generated:
        boundaries = torch.from_numpy(layout.cu_seqlens[pack.start : pack.stop + 1] - begin)
        return prompts, call(prompts, begin, cu_seqlens=boundaries)
    cache = model.new_cache(1)
    ids, hidden = [prompts], [call(prompts, begin, cache=cache)]
    for token in range(begin + len(prompts), begin + len(prompts) + layout.generated):
        ids.append(model.logits(hidden[-1][-1:]).argmax(-1).to(prompts.device))
        hidden.append(call(ids[-1], token, cache=cache))
    return torch.cat(ids), torch.cat(hidden)
