"""`--dry-run`: the grid, the memory per rank and the plan, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recover.job.gpus import gpus_on_host
from recover.policy import get_policy
from recover.train.config import Config
from recover.train.model_shape import parameters_of, shape_of
from recover.train.models import LlamaConfig
from recover.train.preparation import PreparedRun

SHOWN = 8  # losses that are listed one by one
SAVED = "copy while a checkpoint is saved"
CONTEXT = 0.6e9  # bytes of GPU memory that CUDA takes per process, approximately


def tell(prepared: PreparedRun) -> Iterator[str]:
    config = prepared.config
    shape = shape_of(config, prepared.stream.vocab)
    batch, tokens = config.global_batch, config.global_batch * config.tokens_per_microbatch
    ranks = f"{config.replica_size} rank{'s' if config.replica_size > 1 else ''}"
    if config.parallel == "3d":
        ranks += f" (tp {config.tp} x pp {config.pp} x ep {config.ep}, {config.schedule})"
    yield f"grid      {config.replicas} replicas of {ranks}: {config.replicas * config.replica_size} processes"
    size = parameters_of(shape) / 1e6
    yield f"model     {config.model}: {size:,.1f} M parameters, {shape.layers} layers of {shape.dim}"
    yield f"data      {prepared.stream.description}"
    yield f"step      {batch} microbatches of {config.microbatch_size} x {config.seq_len}: {tokens:,} tokens"
    passes = config.steps * batch / len(prepared.stream)
    yield f"run       {config.steps} steps, {config.steps * tokens:,} tokens, {passes:.2f} passes over the corpus"
    yield "memory per rank"
    memory = list(memory_per_rank(config, shape))
    for name, size in [*memory, ("together, about", sum(size for _, size in memory))]:
        yield f"          {name:<38}{size / 1e6:10,.1f} MB"
    if config.device == "cuda" or (config.device == "auto" and gpus_on_host()):
        yield memory_per_gpu(config, memory, gpus_on_host())
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
        yield "          and so on; `recover plan` with the same keys shows more"
    for kill in prepared.kills:
        yield f"kill      {kill}"
    yield f"run dir   {prepared.run_dir}"
    for doubt in prepared.doubts:
        yield f"not here  {doubt}"


def memory_per_gpu(config: Config, memory: Sequence[tuple[str, float]], gpus: int) -> str:
    """Memory of the ranks that share one GPU of a host; without a visible GPU, each rank has its own."""
    ranks = config.replicas * config.replica_size
    share = -(-ranks // gpus) if gpus else 1
    of_one = sum(size for name, size in memory if name != SAVED)
    who = f"{share} ranks share one" if share > 1 else "one for each rank"
    return (
        f"GPUs      {who}: about {share * of_one / 1e9:,.1f} GB on each, and CUDA's own "
        f"{share * CONTEXT / 1e9:.1f} GB (copies for checkpoints are on the host)"
    )


def memory_per_rank(config: Config, shape: LlamaConfig) -> Iterator[tuple[str, float]]:
    """The bytes of each part. Activations are an estimate, the rest is what the trainer allocates."""
    weights = 4.0 * parameters_per_rank(config, shape)
    moments = 2 if config.optimizer == "adamw" else 1
    yield "weights", weights
    # Exact sums in words of 64 bits: two in float64, and one for the optimizer. In words of 32 bits, and of fast
    # sums, the optimizer gets the memory of the reduced one.
    wide = config.reduction == "reproducible" and config.reduction_bits == 64
    yield "gradients, local and reduced", (5 if wide else 2) * weights
    if config.ep > 1:
        yield "gradients shared over ep, of one round", (2 if wide else 1) * weights
    yield f"optimizer ({config.optimizer})", moments * weights
    yield SAVED, (1 + moments) * weights
    if config.parallel == "hsdp":
        yield "one block, gathered, and its gradient", 8.0 * parameters_of(shape) / (shape.layers + 1)
    width = 2 if config.dtype == "bfloat16" else 4
    tokens = config.tokens_per_microbatch // (config.replica_size // config.pp)
    # Per token and layer: inputs of norms, projections and products, or of the block alone where they are recomputed.
    kept = (
        shape.dim
        if config.recompute
        else 8 * shape.dim + 4 * shape.hidden * (shape.top_k if shape.experts else 1)
    )
    layers = -(-shape.layers // config.pp)
    flying = config.accum if config.schedule == "gpipe" and config.pp > 1 else min(config.pp, config.accum)
    name = f"activations of {flying} microbatch{'es' if flying > 1 else ''}"
    yield name, tokens * (layers * flying * kept * width + shape.vocab * 12.0)
    if config.pp > 1:
        # torch keeps one buffer per microbatch of a round, for each direction that a stage receives from.
        yield "buffers between stages", 4.0 * config.accum * tokens * shape.dim * min(2, config.pp - 1)


def parameters_per_rank(config: Config, shape: LlamaConfig) -> float:
    """Parameters on the fullest rank: the first and last stages of a pipeline also hold the embedding and the
    output."""
    if config.parallel != "3d":
        return parameters_of(shape) / config.replica_size
    ends = shape.vocab * shape.dim
    experts = 3 * shape.dim * shape.hidden * shape.experts
    block = (parameters_of(shape) - ends * (1 if shape.tied else 2)) / shape.layers - experts
    layers = -(-shape.layers // config.pp)
    outside = ends * (2 if config.pp == 1 and not shape.tied else 1)
    return (layers * (block + experts / config.ep) + outside) / config.tp
