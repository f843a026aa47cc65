"""The keys of `recover train`: each with its default, its meaning and its limits, and the checks between keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic import model_validator as validator

from recover.checkpoint.object_storage import check_url
from recover.gradients.exponents import refuse_batch
from recover.job.config_keys import Keys, nearest, parse_keys
from recover.job.spec import LEAST_LINK_TIMEOUT
from recover.policy import DEFAULT_POLICY

MODELS = {"tiny": 128, "small": 256, "1b": 4096, "7b": 4096}  # with their sequence lengths
SEQ_LEN = 128  # default of a model from a file


# Keys that a resumed run may change, and that the update of a step depends on.
OF_UPDATES = (
    "steps",
    "lr",
    "warmup_steps",
    "clip",
    "dtype",
    "skip_limit",
    "compile",
    "recompute",
    "reduction",
    "reduction_bits",
    "parallel",
    "shard",
    "tp",
    "pp",
    "ep",
    "schedule",
)


class Data(Keys):
    path: str | None = Field(
        default=None,
        description="text files, a folder, .jsonl, .npy or .bin tokens, or hf:NAME; null: the sources of Python's "
        "standard library",
    )


class Eval(Keys):
    every: NonNegativeInt = Field(
        default=0, description="steps between evaluations on held-out data; 0: never"
    )
    batches: PositiveInt = Field(default=8, description="microbatches in an evaluation")
    fraction: float = Field(default=0.02, gt=0, lt=1, description="part of the corpus that is held out")


class Checkpoint(Keys):
    every: NonNegativeInt = Field(
        default=50, description="steps between checkpoints; 0: only when a run is stopped early"
    )
    keep: PositiveInt = Field(default=2, description="number of checkpoints that stay on disk, and in `dir`")
    dir: str | None = Field(
        default=None,
        description="a URL to upload checkpoints to, as s3://BUCKET/PREFIX: docs/guides/object-storage.md",
    )


class Straggler(Keys):
    evict: float | None = Field(
        default=None,
        ge=2,
        description="the others go on without a replica that takes so many times as long as they do; null: never",
    )
    every: PositiveInt = Field(default=100, description="steps between two such evictions, at least")


class Log(Keys):
    tensorboard: bool = Field(default=True, description="write TensorBoard events")
    wandb: str | None = Field(
        default=None, description="the Weights & Biases project to log to (pip install wandb)"
    )


class Config(Keys):
    model: str = Field(
        default="tiny",
        description=f"{', '.join(MODELS)}, or the path of a Hugging Face config.json of a LLaMA",
    )
    steps: PositiveInt = Field(default=60, description="optimizer steps")
    replicas: PositiveInt = Field(default=4, description="number of replicas at the start")
    accum: PositiveInt = Field(default=4, description="microbatches per replica and step")
    global_batch: PositiveInt = Field(
        default=16, description="B, microbatches per step; default: replicas x accum"
    )
    microbatch_size: PositiveInt = Field(default=1, description="sequences in a microbatch")
    seq_len: PositiveInt = Field(
        default=SEQ_LEN, description="tokens in a sequence; default of small: 256, of 1b and 7b: 4096"
    )
    parallel: Literal["ddp", "hsdp", "3d"] = Field(
        default="ddp",
        description="how a replica is built inside: ddp, one process; hsdp, ranks that hold a shard each; 3d, a grid "
        "of tensor, pipeline and expert parallelism",
    )
    shard: PositiveInt | None = Field(
        default=None, description="hsdp: ranks that share one copy of the model"
    )
    tp: PositiveInt = Field(default=1, description="3d: ranks that share each matrix")
    pp: PositiveInt = Field(default=1, description="3d: ranks that share the layers, as stages of a pipeline")
    ep: PositiveInt = Field(default=1, description="3d: ranks that share the experts and the rows")
    schedule: Literal["1f1b", "gpipe", "interleaved"] = Field(
        default="1f1b", description="3d: how microbatches go through the pipeline"
    )
    experts: NonNegativeInt = Field(
        default=0, description="feed-forward networks per layer that tokens are routed to; 0: one for all"
    )
    top_k: PositiveInt = Field(default=2, description="experts per token")
    recompute: bool = Field(
        default=False,
        description="recompute activations inside blocks in backward (activation checkpointing)",
    )
    policy: Literal["balanced", "paced", "static", "adaptive"] = Field(
        default=DEFAULT_POLICY, description="how microbatches are distributed: docs/explanation/policy.md"
    )
    samples: Literal["exact", "partitioned"] = Field(
        default="exact",
        description="exact: survivors run the samples of lost replicas; partitioned: these are dropped",
    )
    reduction: Literal["fast", "reproducible"] = Field(
        default="fast",
        description="reproducible: the same bits for any losses and any number of replicas",
    )
    reduction_bits: Literal[64, 32] = Field(
        default=64,
        description="bits of the words of reproducible sums; 32: half the traffic and less memory, for at most 256 "
        "microbatches a step",
    )
    verify: NonNegativeInt = Field(
        default=0,
        description="microbatches of each step that a second replica computes as well; a replica with wrong gradients "
        "is evicted. Above 0, reproducible sums are checked, too",
    )
    join: Literal["pause", "instalments"] = Field(
        default="pause",
        description="how a rejoining replica gets the state: all of it between two steps, or a few parameters with "
        "each step, while the others train on",
    )
    threads: PositiveInt = Field(default=1, description="compute threads per rank; the bits depend on it")
    data: Data = Data()
    tokenizer: str = Field(default="bytes", description="bytes, or a tokenizers file")
    lr: PositiveFloat = Field(default=1e-3, description="the highest learning rate")
    warmup_steps: NonNegativeInt = Field(
        default=10, description="steps of linear warm-up; then a cosine to a tenth of lr"
    )
    eval: Eval = Eval()
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="the optimizer")
    clip: PositiveFloat | None = Field(
        default=1.0, description="limit of the gradient norm; null: no clipping"
    )
    skip_limit: NonNegativeInt = Field(
        default=50,
        description="skipped steps in a row (the gradient is not finite) after which the run ends; 0: never",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="data type of forward and backward"
    )
    compile: bool = Field(
        default=False, description="torch.compile of the model's blocks; the first step takes longer"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: CUDA where there is one"
    )
    pace: float = Field(
        default=0.0,
        ge=0,
        description="minimum seconds per microbatch, by waiting: for comparisons on few cores",
    )
    seed: NonNegativeInt = Field(
        default=0, description="seed of the weights, the order of the data and dropout"
    )
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    min_replicas: PositiveInt = Field(
        default=1, description="with fewer replicas, save a checkpoint and end with exit code 3"
    )
    straggler: Straggler = Straggler()
    faults: str | None = Field(
        default=None,
        description="a schedule of faults in YAML (`recover faults make`): docs/guides/fault-injection.md",
    )
    timeout: NonNegativeFloat = Field(
        default=1800, description="seconds without progress after which the run is ended; 0: never"
    )
    carrier: Literal["auto", "mpi", "gloo", "nccl"] = Field(
        default="auto", description="transport between replicas: docs/guides/gpu.md"
    )
    bucket_mb: float | None = Field(
        default=None,
        gt=0,
        description="size of a gradient bucket, which is reduced in one operation; null: 25, on a GPU 50",
    )
    hang_limit: float | None = Field(
        default=None,
        ge=1,
        description="seconds after which a hung rank that others wait for is declared dead; null: 10 if its process "
        "does not run, 60 or ten steps if it does",
    )
    link_timeout: float | None = Field(
        default=None,
        ge=LEAST_LINK_TIMEOUT,
        description="seconds after which a reduction that moves no data while all ranks wait in it is aborted, as over "
        "a broken link; null: 60",
    )

    @validator(mode="before")
    @classmethod
    def _batch(cls, given: dict[str, Any]) -> dict[str, Any]:
        """B = replicas x accum. If a run is resumed with another number of replicas, B stays and accum follows."""
        named = {name: _count(given, name) for name in ("replicas", "accum", "global_batch")}
        if any(given.get(name) is not None and count is None for name, count in named.items()):
            return given  # not a count: the check of the field itself reports it
        replicas = named["replicas"] or cls.model_fields["replicas"].default
        accum, batch = named["accum"], named["global_batch"]
        if batch is None:
            batch = replicas * (accum or cls.model_fields["accum"].default)
        even = -(-batch // replicas)
        if accum is not None and accum != even:
            raise ValueError(
                f"accum={accum} with replicas={replicas} makes {replicas * accum} microbatches a step, but "
                f"global_batch is {batch}; leave accum out"
            )
        return {**given, "accum": even, "global_batch": batch}

    @validator(mode="before")
    @classmethod
    def _sequence(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"seq_len": MODELS.get(given.get("model", "tiny"), SEQ_LEN), **given}

    @validator(mode="after")
    def _check_model(self) -> Self:
        if self.model not in MODELS and not Path(self.model).is_file():
            hint = nearest(self.model, MODELS, f"choose one of {', '.join(MODELS)}, or an existing file")
            raise ValueError(f"model={self.model!r} is neither a size nor a file; {hint}")
        return self

    @validator(mode="after")
    def _check_checkpoint_url(self) -> Self:
        check_url("checkpoint.dir", self.checkpoint.dir)
        return self

    @validator(mode="after")
    def _check_policy(self) -> Self:
        if self.policy == "static" and self.samples == "exact":
            raise ValueError(
                "policy='static' does not go with samples='exact': a spare's samples are almost never the ones that a "
                "dead replica leaves behind; add samples=partitioned, or use policy=balanced"
            )
        if self.verify and self.samples != "exact":
            raise ValueError(
                f"verify={self.verify} needs samples=exact: with samples={self.samples} no second replica can compute "
                "the same microbatch; use samples=exact, or verify=0"
            )
        if self.verify > self.global_batch:
            raise ValueError(
                f"verify={self.verify} is more than the {self.global_batch} microbatches of a step; lower it"
            )
        if self.replicas > self.global_batch:
            raise ValueError(
                f"replicas={self.replicas} are more than the {self.global_batch} microbatches of a step; use fewer"
            )
        if self.min_replicas > self.replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas} is more than replicas={self.replicas}; lower it"
            )
        return self

    @field_validator("reduction_bits", mode="before")
    @classmethod
    def _as_number(cls, value: Any) -> Any:
        """Values are text, and pydantic compares choices without parsing them."""
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else value

    @validator(mode="after")
    def _check_words(self) -> Self:
        if self.reduction_bits != 64 and self.reduction == "fast":
            raise ValueError(
                f"reduction_bits={self.reduction_bits} belongs to reduction=reproducible, and reduction is fast, which "
                "sums float32; leave reduction_bits out, or use reduction=reproducible"
            )
        if self.reduction == "reproducible":
            refuse_batch(self.global_batch, self.reduction_bits)
        return self

    @validator(mode="after")
    def _check_shards(self) -> Self:
        if (self.parallel == "hsdp") != (self.shard is not None):
            raise ValueError(
                "parallel='hsdp' needs the number of ranks to a replica; add shard=2"
                if self.shard is None
                else f"shard={self.shard} belongs to parallel=hsdp, not to parallel={self.parallel}; leave one out"
            )
        if self.shard and self.microbatch_size % self.shard:
            raise ValueError(
                f"microbatch_size={self.microbatch_size} sequences cannot be shared among the shard={self.shard} ranks "
                f"of a replica; make it a multiple, as microbatch_size={self.shard}"
            )
        return self

    @validator(mode="after")
    def _check_grid(self) -> Self:
        grid = {"tp": self.tp, "pp": self.pp, "ep": self.ep}
        if self.parallel != "3d" and (wrong := [f"{name}={n}" for name, n in grid.items() if n > 1]):
            raise ValueError(
                f"{', '.join(wrong)}: a grid belongs to parallel=3d, not to parallel={self.parallel}; say parallel=3d"
            )
        if self.parallel == "3d" and self.replica_size == 1:
            raise ValueError("parallel='3d' needs a grid of more than one rank; add tp=2, pp=2 or both")
        for name, number, ranks in (
            ("seq_len", self.seq_len, "tp"),
            ("microbatch_size", self.microbatch_size, "ep"),
        ):
            if number % grid[ranks]:
                raise ValueError(
                    f"{name}={number} cannot be shared among the {ranks}={grid[ranks]} ranks of a replica; make it a "
                    "multiple"
                )
        return self

    @validator(mode="after")
    def _check_device(self) -> Self:
        if self.compile and self.reduction == "reproducible":
            raise ValueError(
                "compile=true does not go with reduction=reproducible: the compiler tries out kernels on each rank, "
                "and may choose others, with other bits; leave one of them out"
            )
        if self.compile and self.verify:
            raise ValueError(
                f"compile=true does not go with verify={self.verify}: the compiler tries out kernels on each rank, and "
                "may choose others, with other bits; leave one of them out"
            )
        if self.compile and (self.tp > 1 or self.experts):
            what = f"experts={self.experts}" if self.experts else f"tp={self.tp}"
            raise ValueError(
                f"compile=true does not work with {what}: torch cannot compile blocks that are cut or whose shapes "
                "depend on the data, here; leave compile out"
            )
        if self.carrier == "nccl" and self.device == "cpu":
            raise ValueError(
                "carrier=nccl moves the memory of GPUs, not of device=cpu; use carrier=mpi or gloo"
            )
        return self

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.shard or self.tp * self.pp * self.ep

    @property
    def tokens_per_microbatch(self) -> int:
        return self.microbatch_size * self.seq_len

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def parse(given: Mapping[str, Any]) -> Config:
    """Build a checked configuration from dotted keys. Raises ConfigError."""
    return parse_keys(Config, given, "recover train")


def _count(given: Mapping[str, Any], name: str) -> int | None:
    """A positive number that others depend on; None if it is missing or invalid."""
    try:
        number = int(given[name])
    except (KeyError, TypeError, ValueError):
        return None
    return number if number > 0 else None
