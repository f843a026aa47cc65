"""Traces: every step that a running job records becomes a trace, with its repairs inside, at their times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recorded import START, incident_line, make_run, step_line

from recover.runs.live.traces import Traces


@pytest.mark.guarantee("Monitoring", "Steps and repairs become traces with their times.")
def test_steps_and_repairs_become_traces_and_earlier_ones_do_not(tmp_path: Path) -> None:
    run, kept = make_run(tmp_path / "run"), InMemorySpanExporter()
    with Traces(run, kept):
        with open(run / "incidents.jsonl", "a") as file:
            file.write(json.dumps(incident_line(22, [2], epoch=3)) + "\n")
        with open(run / "steps.jsonl", "a") as file:
            file.write("".join(json.dumps(step_line(n, 2)) + "\n" for n in (21, 22)))
    spans = kept.get_finished_spans()
    calm, struck = (span for span in spans if span.name == "step")
    assert (calm.attributes["recover.step"], struck.attributes["recover.step"]) == (21, 22)
    assert calm.attributes["recover.microbatches"] == 16
    assert struck.end_time == round((START + 24) * 1e9)
    assert struck.end_time - struck.start_time == 10**9
    (incident,) = (span for span in spans if span.name == "incident")
    assert incident.parent.span_id == struck.context.span_id
    phases = [span for span in spans if span.parent and span.parent.span_id == incident.context.span_id]
    lasted = {span.name: round((span.end_time - span.start_time) / 1e6) for span in phases}
    assert lasted == {"detect": 20, "repair": 70, "restore": 2, "redo": 40}
    assert [span.start_time for span in phases[1:]] == [span.end_time for span in phases[:-1]]
    assert len(spans) == 2 + 1 + 4
