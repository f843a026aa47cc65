"""`--dry-run`: the grid, the memory per rank and the plan, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator

from recover.models import LlamaConfig
from recover.policy import get_policy
from recover.train.config import Config
from recover.train.plan import Plan
from recover.train.shape import parameters_of, shape_of

SHOWN = 8  # losses that are told one by one


def tell(plan: Plan) -> Iterator[str]:
    config = plan.config
    shape = shape_of(config, plan.stream.vocab)
    batch, tokens = config.global_batch, config.global_batch * config.tokens_per_microbatch
    yield f"grid      {config.replicas} replicas of 1 rank: {config.replicas} processes"
    size = parameters_of(shape) / 1e6
    yield f"model     {config.model}: {size:,.1f} M parameters, {shape.layers} layers of {shape.dim}"
    yield f"data      {plan.stream.description}"
    yield f"step      {batch} microbatches of {config.microbatch_size} x {config.seq_len}: {tokens:,} tokens"
    passes = config.steps * batch / len(plan.stream)
    yield f"run       {config.steps} steps, {config.steps * tokens:,} tokens, {passes:.2f} passes over the corpus"
    yield "memory per rank"
    memory = list(memory_per_rank(config, shape))
    for name, size in [*memory, ("together, about", sum(size for _, size in memory))]:
        yield f"          {name:<34}{size / 1e6:10,.1f} MB"
    yield f"plan      policy {config.policy}, samples {config.samples}"
    policy = get_policy(config.policy, config.replicas)
    for alive in range(config.replicas, max(0, config.replicas - SHOWN), -1):
        layout = policy.layout(range(alive), batch)
        roles = ", ".join(
            f"{count} {role} x {next(len(s.run) for s in layout.shares if s.role is role)}"
            for role, count in layout.roles().items()
        )
        yield f"          {alive:>4} alive: {roles} = {layout.committed}"
    if config.replicas > SHOWN:
        yield f"          and so on; `recover plan --replicas {config.replicas} --accum {config.accum}` shows more"
    for kill in plan.kills:
        yield f"kill      {kill}"
    yield f"run dir   {plan.run_dir}"


def memory_per_rank(config: Config, shape: LlamaConfig) -> Iterator[tuple[str, float]]:
    """Bytes. Activations are an estimate, the rest is what the trainer allocates."""
    weights = 4.0 * parameters_of(shape)
    moments = 2 if config.optimizer == "adamw" else 1
    yield "weights", weights
    exact = config.reduction == "reproducible"
    yield (
        "gradients, local and reduced",
        (5 if exact else 2) * weights,
    )  # two in float64, and one for the optimizer
    yield f"optimizer ({config.optimizer})", moments * weights
    yield "copy while a checkpoint is saved", (1 + moments) * weights
    tokens, width = config.tokens_per_microbatch, 2 if config.dtype == "bfloat16" else 4
    kept = 8 * shape.dim + 4 * shape.hidden  # per token and layer: inputs of norms, projections and products
    yield "activations of a microbatch", tokens * (shape.layers * kept * width + shape.vocab * 12.0)
