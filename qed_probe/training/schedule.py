"""The learning rate over training."""


def wsd(step: int, *, steps: int, warmup: int, decay: float) -> float:
    """Warm-up, stable, decay (WSD, arXiv 2404.06395): the share of the peak rate that step ``step`` = 0 … steps − 1 takes.

    It rises linearly over the first ``warmup`` steps, stays at 1, and falls linearly over the last ``decay`` of all steps; the
    step after the last would take 0.
    """
    falling = round(decay * steps)
    rise = (step + 1) / warmup if step < warmup else 1.0
    fall = (steps - step) / falling if step > steps - falling else 1.0
    return min(rise, fall)
