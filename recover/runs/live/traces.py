"""Steps and repairs as OpenTelemetry traces (extra `otel`), made from the records by a thread of the launcher.

Every step is a trace; its repairs are child spans, with one span per phase. The standard variables of OpenTelemetry
(OTEL_EXPORTER_OTLP_ENDPOINT) name the receiver.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Self

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import set_span_in_context

from recover.runs.records.curves import curves
from recover.runs.records.feed import RunFeed
from recover.runs.records.kinds import Line

_LOOK = 0.5  # seconds between two reads of the records
# In this order, from the moment when the loss was noticed.
_PHASES = ("detect", "repair", "restore", "redo", "transfer")


class Traces:
    """Exports every step and every repair that is recorded while entered. Training never waits for it."""

    def __init__(self, run_dir: Path, exporter: SpanExporter | None = None) -> None:
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        resource = Resource.create({"service.name": "recover", "recover.run": run_dir.resolve().name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("recover")
        self._feed = RunFeed(run_dir, new_only=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="recover-traces", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._provider.shutdown()

    def _loop(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(_LOOK)
            for line, incidents in self._feed.read().steps:
                self._tell(line, incidents)

    def _tell(self, line: Line, incidents: list[Line]) -> None:
        if "at" not in line:
            return
        began = line["at"] - line["seconds"]
        facts: dict[str, Any] = {"recover.step": line["step"], "recover.epoch": line["epoch"]}
        facts |= {f"recover.{name}": value for name, value in curves(line).items()}
        span = self._tracer.start_span("step", start_time=_ns(began), attributes=facts)
        inside = set_span_in_context(span)
        for incident in incidents:
            self._tell_repair(incident, inside)
        span.end(_ns(line["at"]))

    def _tell_repair(self, incident: Line, step: Any) -> None:
        at = incident["at"]
        facts = {
            "recover.dead_ranks": incident["dead_ranks"],
            "recover.dead_replicas": incident["dead_replicas"],
            "recover.left_replicas": incident.get("left_replicas", []),
            "recover.location": incident["location"],
            "recover.redone_microbatches": incident["redone_microbatches"],
        }
        span = self._tracer.start_span("incident", step, start_time=_ns(at), attributes=facts)
        inside = set_span_in_context(span)
        for phase in _PHASES:
            if took := incident.get(f"{phase}_ms") or 0.0:
                each = self._tracer.start_span(phase, inside, start_time=_ns(at))
                at += took / 1e3
                each.end(_ns(at))
        span.end(_ns(at))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
