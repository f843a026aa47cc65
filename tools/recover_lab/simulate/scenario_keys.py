"""The keys of a scenario, by group: the cluster, its failures, the job, and the costs of each part of a recovery.

Every key has a default, a unit and a meaning.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from recover.job.config_keys import Keys
from recover.policy import DEFAULT_POLICY

DAY, HOUR = 86400.0, 3600.0
SYSTEMS = {
    "restart": "checkpoint-restart, best interval",
    "restart-paper": "checkpoint-restart, one checkpoint per failure",
    "restart-memory": "checkpoint-restart from memory",
    "recover": "ReCoVer, no rejoins, restarts with repaired nodes",
    "recover-return": "ReCoVer, replicas rejoin",
    "torchft": "step discarded, batch shrinks",
    "torchft-spares": "step discarded, spares keep the batch",
    "replication": "every microbatch on several replicas",
    "stacked": "stacked shards, reordered",
}


class Machinery(Keys):
    nodes: PositiveInt = Field(default=2048, description="nodes that the job is given at its start")
    gpus_per_node: PositiveInt = Field(default=8, description="GPUs in a node")
    spares: NonNegativeInt = Field(default=0, description="spare nodes; their GPU time is paid for, too")
    nodes_per_rack: NonNegativeInt = Field(
        default=0, description="nodes that fail with their rack; 0: no racks"
    )
    nodes_per_switch: NonNegativeInt = Field(
        default=0, description="nodes that fail with their switch; 0: no switches"
    )


class Failures(Keys):
    per_node_day: NonNegativeFloat = Field(default=0.0065, description="failures per node and day")
    process: Literal["poisson", "weibull", "regular"] = Field(
        default="poisson",
        description="time between failures: poisson; weibull (shape below 1: in bursts); regular: constant",
    )
    shape: PositiveFloat = Field(default=1.0, description="of weibull")
    transient: float = Field(
        default=0.0, ge=0, le=1, description="share of failures after which the node is healthy again at once"
    )
    silent: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of failures that only a lease or a timeout detects, not a closed connection",
    )
    per_rack_day: NonNegativeFloat = Field(default=0.0, description="failures per rack and day")
    per_switch_day: NonNegativeFloat = Field(default=0.0, description="failures per switch and day")
    burst: float = Field(
        default=0.0, ge=0, le=1, description="share of node failures in which neighbours fail, too"
    )
    burst_nodes: PositiveInt = Field(default=2, description="nodes that such a burst loses in total")
    repair_hours: NonNegativeFloat = Field(
        default=24.0, description="mean hours until a broken node is repaired"
    )
    repair: Literal["exponential", "fixed"] = Field(
        default="exponential", description="distribution of repair times"
    )


class SlowNodes(Keys):
    per_node_day: NonNegativeFloat = Field(
        default=0.0, description="nodes that become slow, per node and day"
    )
    factor: float = Field(
        default=1.5,
        ge=1,
        description="time of a microbatch on a slow node, over that on the others: the steps of the job are as much "
        "longer, or less with job.policy=paced",
    )
    minutes: PositiveFloat = Field(default=30.0, description="minutes for which a node is slow")
    old_share: float = Field(
        default=0.0, ge=0, le=1, description="share of the replicas that run on an older generation of nodes"
    )
    old_factor: float = Field(
        default=1.5, ge=1, description="time of a microbatch there, over that on the newest generation"
    )


class TrainingJob(Keys):
    replica_gpus: PositiveInt = Field(default=128, description="GPUs that hold one copy of the model")
    accum: PositiveInt = Field(
        default=16,
        description="microbatches that each replica accumulates in a step; without it and job.tokens_per_step, as many "
        "as make the usual step of a model of this size (the default, where job.microbatch_s is given)",
    )
    tokens: PositiveInt = Field(default=8192, description="tokens in a microbatch")
    microbatch_s: PositiveFloat | None = Field(
        default=None, description="seconds of a microbatch; null: from parameters, mfu and peak_tflops"
    )
    parameters: PositiveFloat = Field(
        default=405e9, description="parameters that each token is multiplied with"
    )
    mfu: float = Field(default=0.4, gt=0, le=1, description="share of the peak FLOP/s that training reaches")
    gpu: str = Field(default="NVIDIA H100 80GB HBM3", description="its name, for its peak and its memory")
    gpu_gigabytes: PositiveFloat | None = Field(
        default=None, description="memory of a GPU; null: the data sheet's, where it is known"
    )
    bytes_per_parameter: PositiveFloat = Field(
        default=16.0,
        description="of weights, gradients and optimizer together; a model that does not fit is refused",
    )
    peak_tflops: PositiveFloat | None = Field(
        default=None, description="peak of a GPU; null: the data sheet's, where it is known"
    )
    overhead_s: NonNegativeFloat = Field(
        default=0.0, description="seconds of a step in addition to microbatches and reduction"
    )
    policy: Literal["balanced", "paced", "static"] = Field(
        default=DEFAULT_POLICY, description="how ReCoVer distributes a step: docs/explanation/policy.md"
    )
    budget: PositiveFloat = Field(default=15e12, description="tokens to train on")


class Reducing(Keys):
    gigabytes: NonNegativeFloat = Field(
        default=0.0, description="GB of gradients that each rank reduces across replicas"
    )
    gigabytes_per_s: PositiveFloat = Field(default=40.0, description="bandwidth of a rank's link (beta)")
    alpha_ms: NonNegativeFloat = Field(default=0.1, description="latency of a message (alpha)")
    hidden: float = Field(
        default=0.0, ge=0, le=1, description="share of the reduction that overlaps with the backward pass"
    )


class Recovering(Keys):
    """Of ReCoVer: measured by `recover bench recovery` and `repair` on few ranks, an assumption for many."""

    detect_s: NonNegativeFloat = Field(
        default=0.1, description="seconds until a closed connection is noticed"
    )
    lease_s: NonNegativeFloat = Field(default=10.0, description="seconds until a silent loss is noticed")
    repair_s: NonNegativeFloat = Field(
        default=0.1, description="seconds to agree on the members and to build a new carrier"
    )
    repair_ms_per_replica: NonNegativeFloat = Field(
        default=0.0, description="milliseconds of repair for each replica, in addition"
    )
    restore_s: NonNegativeFloat = Field(default=0.0, description="seconds to restore gradients")
    vote_s: NonNegativeFloat = Field(
        default=0.03,
        description="that a step takes longer than in stock torch, without failures, of ReCoVer and of systems that "
        "discard the step; measured: 0.005 (28M parameters) to 0.032 (1B) on a GPU",
    )
    restart_at: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="without rejoins: share of the replicas below which the whole job is restarted; null: the best; "
        "0: never",
    )
    checkpoint_every_s: PositiveFloat = Field(default=6 * HOUR, description="seconds between checkpoints")


class Joining(Keys):
    """Rejoining replicas."""

    start_s: NonNegativeFloat = Field(
        default=300.0,
        description="seconds from free nodes to a replica that asks to join; training continues meanwhile",
    )
    stall_s: NonNegativeFloat = Field(
        default=0.15, description="seconds that all replicas wait for a join, in addition to the transfer"
    )
    state_gigabytes: NonNegativeFloat = Field(
        default=0.0, description="GB of state that each joining rank receives"
    )
    gigabytes_per_s: PositiveFloat = Field(default=40.0, description="bandwidth of its link")
    standby: NonNegativeInt = Field(
        default=0, description="replicas (placed together) kept warm on spares, ready to join at once"
    )


class Saving(Keys):
    save_s: PositiveFloat = Field(default=10.0, description="seconds that training waits for a checkpoint")
    every_s: PositiveFloat | None = Field(
        default=None, description="seconds between checkpoints; null: the best"
    )
    memory_save_s: PositiveFloat = Field(
        default=1.0, description="seconds that training waits for a checkpoint to the memory of neighbours"
    )
    memory_load_s: NonNegativeFloat = Field(default=5.0, description="seconds to load from there")
    memory_copies: PositiveInt = Field(
        default=2,
        description="nodes that hold a checkpoint in memory; if all are lost at once, the last one on disk is loaded",
    )


class Restarts(Keys):
    """Restarts of checkpoint-restart, replication and stacking, and of ReCoVer as a whole."""

    detect_s: NonNegativeFloat = Field(
        default=60.0, description="seconds until all ranks know of the failure"
    )
    schedule_s: NonNegativeFloat = Field(
        default=120.0, description="seconds until nodes are found and processes start"
    )
    start_s: NonNegativeFloat = Field(
        default=300.0, description="seconds of imports, groups, compilation, the first step"
    )
    load_s: NonNegativeFloat = Field(default=60.0, description="seconds to load the checkpoint")
    struck: Literal["again", "goes-on"] = Field(
        default="again",
        description="a failure during a restart: it begins again, or goes on without those nodes",
    )

    @property
    def seconds(self) -> float:
        return self.detect_s + self.planned

    @property
    def planned(self) -> float:
        """Seconds of a restart that no failure has caused, such as one with repaired nodes."""
        return self.schedule_s + self.start_s + self.load_s


class Discarding(Keys):
    """Systems that discard the step of a failure, and continue with a smaller batch or with spares."""

    timeout_s: NonNegativeFloat = Field(default=5.0, description="seconds until the reduction times out")
    quorum_s: NonNegativeFloat = Field(
        default=0.5,
        description="seconds to agree on the members and to build new groups, in addition to repair_ms_per_replica",
    )
    start_s: NonNegativeFloat = Field(default=300.0, description="seconds until a lost replica is back")
    stall_s: NonNegativeFloat = Field(
        default=0.5, description="seconds that all replicas wait for a join, in addition to the transfer"
    )
    spare_replicas: PositiveInt | None = Field(
        default=None,
        description="replicas that compute and do not count, to keep the batch; null: one of fifty",
    )


class Copies(Keys):
    copies: int = Field(default=2, ge=2, description="replicas that compute the same")
    stack: int | None = Field(
        default=None,
        ge=2,
        description="shards in each stack of a stacked system; null: log2(replicas) + 0.833",
    )


class Verifying(Keys):
    """Verified gradients of ReCoVer: time until a device that errs is found."""

    slots: NonNegativeInt = Field(
        default=0, description="microbatches of a step that two replicas compute (verify=K)"
    )
    errs: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="probability with which a device that errs does so in a microbatch",
    )


class Playing(Keys):
    days: PositiveFloat = Field(default=30.0, description="simulated days")
    seeds: PositiveInt = Field(default=16, description="runs of each system, each with a seed of its own")
    first_seed: NonNegativeInt = Field(default=0, description="the first of them")
    systems: str = Field(
        default="all", description=f"systems to compare: all, or some of {', '.join(SYSTEMS)}"
    )
