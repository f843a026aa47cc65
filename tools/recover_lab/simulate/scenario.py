"""The scenario of `recover simulate`: its keys, the checks between them, and the quantities that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator as validator

from recover.job.config_keys import Keys, describe, flatten, nearest, parse_keys
from recover.job.gpus import peak_of
from recover_lab.simulate import memory
from recover_lab.simulate.scenario_keys import (
    DAY,
    SYSTEMS,
    Copies,
    Discarding,
    Failures,
    Joining,
    Machinery,
    Playing,
    Recovering,
    Reducing,
    Restarts,
    Saving,
    SlowNodes,
    TrainingJob,
    Verifying,
)


class Scenario(Keys):
    cluster: Machinery = Machinery()
    failures: Failures = Failures()
    stragglers: SlowNodes = SlowNodes()
    job: TrainingJob = TrainingJob()
    reduction: Reducing = Reducing()
    recovery: Recovering = Recovering()
    joining: Joining = Joining()
    checkpoint: Saving = Saving()
    restart: Restarts = Restarts()
    discarding: Discarding = Discarding()
    replication: Copies = Copies()
    verify: Verifying = Verifying()
    run: Playing = Playing()

    @validator(mode="after")
    def _check_nodes(self) -> Self:
        cluster, size = self.cluster, self.job.replica_gpus
        gpus, per_node = cluster.nodes * cluster.gpus_per_node, cluster.gpus_per_node
        if size <= gpus and size % per_node and per_node % size:
            raise ValueError(
                f"job.replica_gpus={size} does not fit nodes of cluster.gpus_per_node={per_node}: a replica takes "
                f"whole nodes, or a node whole replicas; try {max(per_node, size // per_node * per_node)}"
            )
        if too_large := memory.refusal(self.job, cluster.nodes, per_node):
            raise ValueError(too_large)
        if size > gpus:
            raise ValueError(
                f"job.replica_gpus={size} is more than the {gpus} GPUs of cluster.nodes={cluster.nodes}; use more "
                "nodes, or smaller replicas"
            )
        if cluster.nodes % self.unit_nodes:
            fitting = cluster.nodes // self.unit_nodes * self.unit_nodes
            raise ValueError(
                f"cluster.nodes={cluster.nodes} are not a whole number of replicas of {self.unit_nodes} nodes; "
                f"use {fitting}, and cluster.spares={cluster.spares + cluster.nodes - fitting}"
            )
        return self

    @validator(mode="after")
    def _check_failures(self) -> Self:
        cluster, failures = self.cluster, self.failures
        if not failures.per_node_day:
            raise ValueError(
                "failures.per_node_day=0: without failures there is nothing to compare; give a rate above 0"
            )
        if failures.process == "weibull" and not 0.3 <= failures.shape <= 10:
            raise ValueError(
                f"failures.shape={failures.shape:g} is outside of the observed shapes of failures; use 0.3 to 10, or "
                "failures.process=regular"
            )
        for kind in ("rack", "switch"):
            if getattr(failures, f"per_{kind}_day") and not getattr(cluster, f"nodes_per_{kind}"):
                raise ValueError(
                    f"failures.per_{kind}_day needs cluster.nodes_per_{kind}: the nodes that fail together"
                )
            if getattr(cluster, f"nodes_per_{kind}") > cluster.nodes:
                raise ValueError(
                    f"cluster.nodes_per_{kind} is more than cluster.nodes={cluster.nodes}; use fewer"
                )
        return self

    @validator(mode="after")
    def _check_job(self) -> Self:
        job = self.job
        if job.microbatch_s is None and self.peak is None:
            raise ValueError(
                f"the peak of job.gpu={job.gpu!r} is not known here; give job.peak_tflops, or job.microbatch_s"
            )
        if self.replicas < 2:
            raise ValueError(
                f"one replica of job.replica_gpus={job.replica_gpus} has no other that could continue without it; use "
                "smaller replicas, or more nodes"
            )
        if self.spare_replicas >= self.replicas:
            raise ValueError(
                f"discarding.spare_replicas={self.spare_replicas} leave no replica of {self.replicas} that counts; "
                "use fewer"
            )
        for key, value in (("copies", self.replication.copies), ("stack", self.stack)):
            if value > self.replicas:
                raise ValueError(
                    f"replication.{key}={value} is more than {self.replicas} replicas; use fewer"
                )
        self.systems  # noqa: B018  raises for an unknown system
        return self

    @property
    def systems(self) -> list[str]:
        if self.run.systems == "all":
            return list(SYSTEMS)
        names = [name.strip() for name in self.run.systems.split(",")]
        for name in names:
            if name not in SYSTEMS:
                hint = nearest(name, SYSTEMS, f"choose one of {', '.join(SYSTEMS)}")
                raise ValueError(f"run.systems: there is no system {name!r}; {hint}")
        return names

    @property
    def peak(self) -> float | None:
        if self.job.peak_tflops is not None:
            return self.job.peak_tflops * 1e12
        return peak_of(self.job.gpu) or None

    @property
    def spare_replicas(self) -> int:
        given = self.discarding.spare_replicas
        return -(-self.replicas // 50) if given is None else given

    @property
    def stack(self) -> int:
        """Shards of a stacked system: the best number according to its authors (presets.SPARE)."""
        best = int(math.log2(self.replicas) + 0.833)
        return max(2, best) if self.replication.stack is None else self.replication.stack

    @property
    def replicas(self) -> int:
        return self.cluster.nodes * self.cluster.gpus_per_node // self.job.replica_gpus

    @property
    def unit_nodes(self) -> int:
        """Nodes that are lost and placed together: those of a replica, or one node with several replicas."""
        return max(1, self.job.replica_gpus // self.cluster.gpus_per_node)

    @property
    def unit_replicas(self) -> int:
        return max(1, self.cluster.gpus_per_node // self.job.replica_gpus)

    @property
    def global_batch(self) -> int:
        return self.replicas * self.job.accum

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.job.tokens

    @property
    def gpus(self) -> int:
        """All GPUs that are paid for, with spares."""
        return (self.cluster.nodes + self.cluster.spares) * self.cluster.gpus_per_node

    @property
    def microbatch(self) -> float:
        """Seconds of a microbatch."""
        if self.job.microbatch_s is not None:
            return self.job.microbatch_s
        assert self.peak is not None
        flops = 6.0 * self.job.parameters * self.job.tokens
        return flops / (self.job.replica_gpus * self.peak * self.job.mfu)

    def reduce(self, replicas: int) -> float:
        """Seconds to sum the gradients of so many replicas, by a ring or a tree, without what backward hides."""
        if replicas < 2:
            return 0.0
        cost = self.reduction
        whole = 2 * (replicas - 1) / replicas * cost.gigabytes / cost.gigabytes_per_s
        return (1 - cost.hidden) * (whole + 2 * (replicas - 1).bit_length() * cost.alpha_ms / 1e3)

    @property
    def full_step(self) -> float:
        """Seconds of an undisturbed step of all replicas."""
        return self.job.accum * self.microbatch + self.reduce(self.replicas) + self.job.overhead_s

    def repairing(self, replicas: int) -> float:
        cost = self.recovery
        return cost.repair_s + cost.repair_ms_per_replica / 1e3 * replicas + cost.restore_s

    @property
    def transfer(self) -> float:
        """Seconds to transfer the state to a joining replica."""
        return self.joining.state_gigabytes / self.joining.gigabytes_per_s

    @property
    def rate(self) -> float:
        """Failures per node and second, of all kinds; a failure of a rack counts once."""
        cluster, failures = self.cluster, self.failures
        of_racks = failures.per_rack_day / cluster.nodes_per_rack if cluster.nodes_per_rack else 0.0
        of_switches = failures.per_switch_day / cluster.nodes_per_switch if cluster.nodes_per_switch else 0.0
        return (failures.per_node_day + of_racks + of_switches) / DAY

    @property
    def between_failures(self) -> float:
        """Mean seconds between failures of the whole job."""
        return 1 / (self.rate * self.cluster.nodes)

    def but(self, **changes: Any) -> Scenario:
        """The same scenario with other values; dotted keys are written with two underscores: cluster__nodes=8."""
        flat = {key.replace("__", "."): value for key, value in changes.items()}
        return parse_scenario({**flat_scenario(self), **flat})


def flat_scenario(scenario: Scenario) -> dict[str, Any]:
    return dict(flatten(scenario.model_dump()))


def keys_of_scenario() -> list[tuple[str, Any, str]]:
    return list(describe(Scenario))


def parse_scenario(given: Mapping[str, Any]) -> Scenario:
    """Build a checked scenario from dotted keys. Raises ConfigError."""
    return parse_keys(Scenario, given, "recover simulate")
