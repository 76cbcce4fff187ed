"""The arms of an experiment: models that differ in their mixer and share their size."""

from dataclasses import replace
from functools import cache

import torch

from qed_probe.errors import InputError
from qed_probe.models.config import ModelConfig, preset
from qed_probe.models.language import LanguageModel


def arm(mixer: str, size: str = "tiny", *, lambda_max: float | None = None) -> ModelConfig:
    """A preset's sizes with this mixer and as many parameters as the preset has with ``qed``.

    Heads and hidden size stay; ``ffn`` takes the number that comes nearest, within half its parameters a unit (3·hidden a layer:
    0.05 % of ``tiny``). ``lambda_max`` is the upper end of λ, if not the usual one. Raises InputError for an unknown mixer or
    preset, for a ``lambda_max`` of a mixer that has no λ, and as ModelConfig does.
    """
    config, like = preset(size, mixer), preset(size, "qed")
    if lambda_max is not None and "lambda_max" not in config.used():
        raise InputError(f"lambda_max: expected none, as {mixer} adds no direction, found {lambda_max}")
    missing = parameters(like) - parameters(config)
    a_unit = parameters(replace(config, ffn=config.ffn + 1)) - parameters(config)
    sized = replace(config, ffn=config.ffn + round(missing / a_unit))
    return sized if lambda_max is None else replace(sized, lambda_max=lambda_max)


@cache
def parameters(config: ModelConfig) -> int:
    """How many trained numbers a model has."""
    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModel(config).parameters())
