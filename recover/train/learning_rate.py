"""The learning rate over a run."""

from __future__ import annotations

import math

from recover.train.config import Config

LOWEST_LR = 0.1  # of the highest: where the cosine ends


def lr_factor(config: Config, done: int) -> float:
    """Of the highest learning rate, after so many committed steps: linear warm-up, then a cosine."""
    if done < config.warmup_steps:
        return (done + 1) / config.warmup_steps
    way = min(1.0, (done - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    return LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * way))
