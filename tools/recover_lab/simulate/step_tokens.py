"""Tokens of a step: those that are usual for a model's size, and the microbatches per replica that make them."""

from __future__ import annotations

import math
from typing import Any

from recover.job.config_keys import ConfigError
from recover_lab.simulate.number_words import figure, quantity
from recover_lab.simulate.scenario import Scenario

TOKENS_PER_STEP = "job.tokens_per_step"
# Published tokens of a step, by the parameters below which they count: "0.5M" and "1M" (Brown et al. 2020,
# arXiv:2005.14165), "4M" (Touvron et al. 2023, arXiv:2307.09288) and "16M" (Llama Team 2024, arXiv:2407.21783), taken
# as powers of two. The limits lie between the sizes of the published models.
_USUAL = (
    (1e9, 2**19, "GPT-3 of 125M to 760M parameters"),
    (3e9, 2**20, "GPT-3 of 1.3B and 2.7B parameters"),
    (170e9, 2**22, "Llama 2 of 7B to 70B parameters"),
    (math.inf, 2**24, "Llama 3 of 405B parameters"),
)
_FAR = 4  # times the usual, from which on the answer warns


def usual_tokens(parameters: float) -> tuple[int, str]:
    """Tokens of a step that are usual for a model of this size, and the published models that had them."""
    return next((tokens, models) for below, tokens, models in _USUAL if parameters < below)


def usual_accum(scenario: Scenario) -> int:
    """Microbatches per replica whose step is nearest to the usual one."""
    return max(1, round(usual_tokens(scenario.job.parameters)[0] / _one_round(scenario)))


def accum_of(scenario: Scenario, given: Any) -> int:
    """Microbatches per replica that make a step of so many tokens. Raises ConfigError where none do."""
    try:
        value = float(str(given).replace(",", "").replace("_", ""))
        if not 0 < value < 1e15 or value % 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{TOKENS_PER_STEP}={given!r} must be a whole number above 0, such as {TOKENS_PER_STEP}=4194304"
        ) from None
    tokens, one = int(value), _one_round(scenario)
    if tokens % one == 0:
        return tokens // one
    less, more = tokens // one * one, -(-tokens // one) * one
    cause = (
        f"{TOKENS_PER_STEP}={tokens} is not a whole number of microbatches on each replica: one on each of "
        f"{scenario.replicas:,} replicas (job.replica_gpus={scenario.job.replica_gpus}) with "
        f"job.tokens={scenario.job.tokens} makes {one:,} tokens"
    )
    if less:
        raise ConfigError(f"{cause}; use {TOKENS_PER_STEP}={less} or {more}")
    raise ConfigError(
        f"{cause}; use at least {TOKENS_PER_STEP}={more}, or smaller microbatches (job.tokens), or fewer, larger "
        "replicas (job.replica_gpus)"
    )


def far_above_usual(scenario: Scenario) -> str:
    """A warning where the step has many times the usual tokens; "" elsewhere."""
    if scenario.job.microbatch_s is not None:
        return ""
    usual, models = usual_tokens(scenario.job.parameters)
    times = scenario.tokens_per_step / usual
    if times <= _FAR:
        return ""
    return (
        f"Unusual: {quantity(scenario.tokens_per_step)} tokens per step are {figure(times)} times those of published "
        f"models of this size ({quantity(usual)}: {models}). Larger steps favour ReCoVer, which votes once per step; "
        f"give {TOKENS_PER_STEP}, or job.accum, job.tokens and job.replica_gpus of your job."
    )


def _one_round(scenario: Scenario) -> int:
    """Tokens of one microbatch on each replica."""
    return scenario.replicas * scenario.job.tokens
