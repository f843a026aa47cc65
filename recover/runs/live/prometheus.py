"""A run's numbers for Prometheus: the names of TensorBoard, with the prefix `recover_`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from recover.runs.live.ranks import DONE, GONE, LEFT, STOPPED, UNKNOWN
from recover.runs.live.view import RunView
from recover.runs.records.curves import CURVES
from recover.world.liveness.board import DOING

__all__ = ["CONTENT_TYPE", "exposition"]


def exposition(view: RunView) -> bytes:
    """The answer to `/metrics`."""
    registry = CollectorRegistry()
    registry.register(_Run(view))
    return generate_latest(registry)


class _Run(Collector):
    def __init__(self, view: RunView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        state, ranks = self._view.state(), self._view.ranks()
        run = state["name"]
        for name, meaning in CURVES.items():
            if name in state["values"]:
                yield _gauge(name, meaning, run, state["values"][name])
        yield _gauge("step", "committed steps", run, state["step"])
        if state["steps"]:
            yield _gauge("steps_planned", "steps that the run is to take", run, state["steps"])
        if state["global_batch"]:
            yield _gauge(
                "global_batch", "B: microbatches that every step has to have", run, state["global_batch"]
            )
        yield _gauge("running", "1 while the job runs", run, state["state"] == "running")
        yield _gauge(
            "goodput",
            "share of all GPU time since the start that was productive",
            run,
            state["goodput"]["goodput"],
        )
        if state["eta_seconds"] is not None:
            yield _gauge(
                "eta_seconds", "seconds until the last step, at the present speed", run, state["eta_seconds"]
            )
        if state["updated"]:
            yield _gauge(
                "updated_timestamp_seconds", "when the last step was committed", run, state["updated"]
            )
        spent = CounterMetricFamily(
            "recover_rank_seconds", "time of all ranks, by where it went", labels=["run", "part"]
        )
        for part, milliseconds in state["goodput"]["parts_ms"].items():
            spent.add_metric([run, part], milliseconds / 1e3)
        yield spent
        if state["tokens"] is not None:
            yield _counter("tokens", "tokens in committed steps", run, state["tokens"])
        yield _counter("reruns", "steps run again because of an overflow", run, state["reruns"])
        if state["verification"] is not None:
            meanings = {
                "verified_slots": "slots whose gradients two replicas computed alike",
                "unverified_slots": "slots that were to be verified, and lost their pair",
                "corrupt_gradients": "replicas that were evicted because of a wrong gradient, or sum of them",
                "wrong_sums": "reduced sums that were wrong on a rank, and were reduced again",
            }
            for name, meaning in meanings.items():
                yield _counter(name, meaning, run, state["verification"][name])
        yield _counter("steps_skipped", "steps whose update was skipped", run, state["skipped"])
        yield _counter("replicas_lost", "replicas that were lost", run, state["lost"])
        yield _counter("replicas_left", "replicas that left on notice", run, state["left"])
        causes = CounterMetricFamily(
            "recover_incidents", "losses, by the kind of their first cause", labels=["run", "cause"]
        )
        kinds = [
            (one["first"] or [{"cause": "unknown"}])[0]["cause"]
            for one in self._view.incidents()
            if one["dead_ranks"]
        ]
        for kind in sorted(set(kinds)):
            causes.add_metric([run, kind], kinds.count(kind))
        yield causes
        doing = GaugeMetricFamily("recover_ranks", "ranks, by what they do", labels=["run", "doing"])
        for what in (*DOING, STOPPED, GONE, LEFT, DONE, UNKNOWN):
            doing.add_metric([run, what], sum(entry["doing"] == what for entry in ranks))
        yield doing
        slow = GaugeMetricFamily(
            "recover_straggler_factor",
            "how much longer a replica takes than others, at the most",
            labels=["run", "replica"],
        )
        for replica, seen in state["stragglers"].items():
            slow.add_metric([run, replica], seen["factor"])
        yield slow
        joining = GaugeMetricFamily(
            "recover_join_progress",
            "the share of the state that a joining replica holds (join=instalments)",
            labels=["run", "replica"],
        )
        for replica, percent in state["joining"].items():
            joining.add_metric([run, replica], percent / 100)
        yield joining


def _gauge(name: str, meaning: str, run: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"recover_{name}", meaning, labels=["run"])
    family.add_metric([run], float(value))
    return family


def _counter(name: str, meaning: str, run: str, value: float) -> Metric:
    family = CounterMetricFamily(f"recover_{name}", meaning, labels=["run"])
    family.add_metric([run], float(value))
    return family
