"""Jobs on a Ray cluster: one agent of `recover` on each node, in a placement group.

When a node is lost, Ray moves its bundle to another node with room for it, which Ray's autoscaler may
bring; an agent is started there, and its replicas join. Ranks, membership and training are those of
any job on several hosts: Ray moves no tensor.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from recover.job.leave_request import LEFT, OperatorRequest
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
        token = secrets.token_hex(32)
        # No retries by Ray: the owner of a task learns only after minutes that its node is silent.
        agent = ray.remote(max_retries=0)(_agent)
        return _Agents(
            group, lambda index: agent.options(**place(index)).remote(words, options, token)
        ).watch()
    finally:
        remove_placement_group(group)


class _Agents:
    """The agents of a job, by the number of their bundle."""

    def __init__(self, group: Any, start: Callable[[int], Any]) -> None:
        self._group, self._start = group, start
        self._running: dict[int, tuple[str, Any]] = {}  # the node, and Ray's reference to the result
        self._codes: dict[int, int] = {}
        self._left: set[int] = set()  # agents whose hosts have left the job, which goes on
        self._is_ending = False

    def watch(self) -> int:
        """Wait until the job has ended on all nodes of the group. Returns 0 if it has succeeded on one of them.
        (An agent that was excluded from the job ends earlier.)"""
        import ray

        until = math.inf
        while time.monotonic() < until:
            nodes = self._nodes()
            if not self._is_ending:
                self._place(nodes)
            done = self._left.union(self._codes)
            at_work = [index for index in nodes if index in self._running and index not in done]
            if self._codes and not at_work:
                break
            try:
                running = [self._running[index][1] for index in at_work]
                ready, _ = ray.wait(running, timeout=_LOOK) if running else ([], [])
                if not running:
                    time.sleep(_LOOK)
            except KeyboardInterrupt:
                self._is_ending = True
                for each in running:
                    ray.cancel(each)  # the agents stop after their step, with a checkpoint
                continue
            for index in at_work:
                if self._running[index][1] in ready:
                    self._collect(index)
            if 0 in self._codes.values() and not self._is_ending:
                self._is_ending, until = True, time.monotonic() + _GRACE
        return 0 if 0 in self._codes.values() else next(iter(self._codes.values()), 1)

    def _nodes(self) -> dict[int, str]:
        """The living nodes of the group, by the number of the bundle."""
        import ray

        places = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return {int(index): node for index, node in places.items() if node in alive}

    def _place(self, nodes: Mapping[int, str]) -> None:
        """Start an agent on every node that has none, such as the replacement of a lost node."""
        for index, node in nodes.items():
            if index not in self._running or self._running[index][0] != node:
                self._codes.pop(index, None)
                self._left.discard(index)
                self._running[index] = node, self._start(index)

    def _collect(self, index: int) -> None:
        import ray

        try:
            code, has_left = ray.get(self._running[index][1])
            if has_left:
                self._left.add(index)
            else:
                self._codes[index] = code
        except ray.exceptions.RayError:  # its worker was killed, or its node lost
            if self._is_ending:
                self._codes[index] = 1
            else:
                del self._running[index]


def _agent(words: Sequence[str], options: Sequence[str], token: str) -> tuple[int, bool]:
    """Run the agent of this node. Returns its exit code, and whether its host has left the job, which goes on."""
    import ray

    verb, *rest = words
    node = ray.get_runtime_context().get_node_id()
    host = f"ray-{node[:12]}"
    with tempfile.NamedTemporaryFile("w", prefix="recover-token-") as secret:  # readable by this user only
        secret.write(token)
        secret.flush()
        command = [sys.executable, "-m", "recover.cli", verb, *options, "--host-name", host]
        command += ["--token-file", secret.name, *rest]
        # Ray's own variables describe this worker, and OMP_NUM_THREADS=1 would slow down ranks.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        agent = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
        is_asked = False
        while True:
            try:
                code = agent.wait(_LOOK)
                break
            except subprocess.TimeoutExpired:
                if not is_asked and node in _draining_nodes():
                    is_asked = True
                    agent.send_signal(signal.SIGTERM)  # its host leaves after the step
            except KeyboardInterrupt:  # ray.cancel
                agent.send_signal(signal.SIGINT)
    return code, OperatorRequest(_run_dir(rest, options), host).answered() == LEFT


def _run_dir(words: Sequence[str], options: Sequence[str]) -> Path:
    """The run directory, as `recover train` and `recover run` choose it."""
    given = dict(zip(words, [*words[1:], ""], strict=True))
    given |= {name: value for word in words for name, _, value in [word.partition("=")] if value}
    resumed = given.get("--resume", "")
    job = options[options.index("--rdzv-id") + 1]
    found = given.get("--run-dir") or given.get("--run_dir") or ("" if "://" in resumed else resumed)
    return Path(found or Path("runs", job))


def _draining_nodes() -> Collection[str]:
    """The nodes that Ray is about to take away, as before a spot instance ends. Ray has no public API for this."""
    import ray

    try:
        found: Collection[str] = ray._private.state.state.get_draining_nodes()
    except Exception:
        return ()  # another version, or the head does not answer: the node is lost later, as any other
    return found


def _end_with_parent() -> None:
    # An agent that outlives its worker would meet the next agent of this node.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
