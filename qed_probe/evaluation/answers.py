"""What a model says after a prompt, and how likely it finds what is there."""

import torch
from torch import Tensor
from torch.nn import functional as F

from qed_probe.models.model import Model

LOGITS = 1 << 26
"""Scores that are held at once."""


@torch.inference_mode()
def read_answers(model: Model, tokens: Tensor, answer: int) -> tuple[Tensor, Tensor]:
    """The last ``answer`` tokens as the model would write them, ``[B, answer]``, and −ln p of all but the first, ``[B, T − 1]``.

    From one pass over ``tokens`` ``[B, T]``, prompts with their answers. Greedy decoding is fed its own tokens instead of the
    answer's, but these are the same up to its first mistake, and after that the answer is wrong either way: what is written is
    what decoding writes up to there.
    """
    hidden, targets = model(tokens)[:, :-1], tokens[:, 1:]
    likeliest, nll = [], []
    columns = max(LOGITS // (len(tokens) * model.config.vocab_size), 1)
    for states, following in zip(torch.split(hidden, columns, 1), torch.split(targets, columns, 1), strict=True):
        logits = model.logits(states).float()
        nll.append(F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none").view_as(following))
        likeliest.append(logits.argmax(-1))
    written = torch.cat(likeliest, 1)
    return written[:, written.shape[1] - answer :], torch.cat(nll, 1)
