"""The learning rate over a run."""

from __future__ import annotations

import math

from recover.train.config import Config

LOWEST_LR = 0.1  # fraction of the highest rate at which the cosine ends


def lr_factor(config: Config, done: int) -> float:
    """Fraction of the highest learning rate after this many committed steps: linear warm-up, then a cosine."""
    if done < config.warmup_steps:
        return (done + 1) / config.warmup_steps
    way = min(1.0, (done - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    return LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * way))
