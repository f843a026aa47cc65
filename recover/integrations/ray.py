"""Jobs on a Ray cluster: one agent of `recover` on each node, in a placement group.

Ray starts the agents, and starts one again when its node is lost and another node has room for it;
Ray's autoscaler brings the nodes. Ranks, membership and training are those of any job on several
hosts: Ray moves no tensor.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from recover.job.optional_packages import need

PORT = 2379
_PR_SET_PDEATHSIG = 1
_GRACE = 60.0  # seconds for the other agents to end after the job has ended on one node
_LOOK = 1.0  # seconds between looks at the agents


def run(
    words: Sequence[str],
    nodes: int,
    resources: Mapping[str, float] | None = None,
    endpoint: str | None = None,
    name: str | None = None,
) -> int:
    """Run a job on `nodes` nodes of the cluster that `ray.init` has connected to. Returns its exit code.

    words:      what follows `recover`: ["train", "config.yaml", "--run-dir", "/shared/run"] or
                ["run", "train.py"]; files and the run directory must be there on all nodes
    resources:  of one node, as Ray counts them; a GPU is a slot for a rank. Default: one CPU
    endpoint:   HOST:PORT of etcd, one or three, with commas. Default: agents start members on the
                first nodes, on three if there are three
    name:       name of the job; no other job in the same etcd may have it
    """
    need("ray", "recover.integrations.ray")
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = dict(resources or {"CPU": 1})
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())

        def place(index: int) -> dict[str, Any]:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            counts = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            return {"scheduling_strategy": strategy, **counts}

        if endpoint is None:
            address = ray.remote(ray.util.get_node_ip_address)
            members = range(3 if nodes > 2 else 1)
            found = ray.get([address.options(**place(index)).remote() for index in members])
            endpoint = ",".join(f"{one}:{PORT}" for one in found)
        options = ["--nnodes", str(nodes), "--rdzv-endpoint", endpoint, "--return"]
        options += ["--rdzv-id", name or f"ray-{secrets.token_hex(4)}"]
        if "GPU" in bundle:
            options += ["--nproc-per-node", str(int(bundle["GPU"]))]
        # A task whose node is lost is submitted again, and waits until the group has a node in its place.
        agent = ray.remote(max_retries=-1)(_agent)
        token = secrets.token_hex(32)
        agents = [agent.options(**place(index)).remote(words, options, token) for index in range(nodes)]
        return _watch(agents, group)
    finally:
        remove_placement_group(group)


def _watch(agents: Sequence[Any], group: Any) -> int:
    """Wait until the job has ended on all nodes that the group has. Its exit code is that of an agent that
    succeeded, if one did: an agent that was excluded ends early."""
    import ray

    codes: dict[int, int] = {}
    ended_at = 0.0
    while len(codes) < len(agents):
        left = [index for index in range(len(agents)) if index not in codes]
        try:
            ready, _ = ray.wait([agents[index] for index in left], timeout=_LOOK)
        except KeyboardInterrupt:
            for index in left:
                ray.cancel(agents[index])  # agents stop after their step, with a checkpoint
            continue
        for index in left:
            if agents[index] in ready:
                codes[index] = ray.get(agents[index])
        if 0 in codes.values() and not ended_at:
            ended_at = time.monotonic()
        if ended_at and time.monotonic() - ended_at > _GRACE:
            break
        if codes and not any(_has_node(group, index) for index in left if index not in codes):
            break  # the places of lost nodes, which wait for others
    return 0 if 0 in codes.values() else next(iter(codes.values()))


def _has_node(group: Any, index: int) -> bool:
    import ray

    places = ray.util.placement_group_table(group)["bundles_to_node_id"]
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return places.get(index) in alive


def _agent(words: Sequence[str], options: Sequence[str], token: str) -> int:
    """Run the agent of this node. Returns its exit code."""
    import ray

    verb, *rest = words
    with tempfile.NamedTemporaryFile("w", prefix="recover-token-") as secret:  # readable by this user only
        secret.write(token)
        secret.flush()
        host = f"ray-{ray.get_runtime_context().get_node_id()[:12]}"
        command = [sys.executable, "-m", "recover.cli", verb, *options, "--host-name", host]
        command += ["--token-file", secret.name, *rest]
        # Ray's own variables describe this worker, and OMP_NUM_THREADS=1 would slow down ranks.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        agent = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
        while True:
            try:
                return agent.wait()
            except KeyboardInterrupt:  # ray.cancel
                agent.send_signal(signal.SIGINT)


def _end_with_parent() -> None:
    # Ray kills the worker of a task that it retries: the next agent must not meet this one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
