"""The report: one page about runs, finished or not, and one line that says whether two runs are equal."""

from __future__ import annotations

import json
import math
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from recorded import START, exit_line, incident_line, make_eventful_run, start_line, write_lines
from typer.testing import CliRunner

from recover.cli import app
from recover.job.owner import describe_this_process
from recover.runs.live.view import RunView
from recover.runs.report import build, compare
from recover.runs.report.recorded_runs import read_runs


def make_run(
    path: Path,
    steps: int = 24,
    replicas: int = 4,
    deaths: dict[int, list[int]] | None = None,
    seed: int = 0,
    finished: bool = True,
    **config: Any,
) -> Path:
    """A run directory as `recover train` writes it; `deaths` maps steps to replicas."""
    deaths, batch, alive = deaths or {}, replicas * 4, replicas
    lines, incidents = [], []
    for step in range(1, steps + 1):
        dead = deaths.get(step, [])
        alive -= len(dead)
        if dead:
            incident = {
                "step": step,
                "location": "in-reduce",
                "dead_ranks": dead,
                "dead_replicas": dead,
                "boundary": True,
                "restore": "non-blocking",
                "extra_microbatches": 4 * len(dead),
                "redone_microbatches": 4 * len(dead),
                "epoch": len(incidents) + 2,
                "detect_ms": 21.5 + 3 * step,
                "repair_ms": 140.0 + 11 * len(dead),
                "restore_ms": 3.2,
                "redo_ms": 260.0 + 9 * step,
            }
            incidents.append(incident)
        noise = int.from_bytes(sha256(f"{seed}/{step}".encode()).digest()[:4], "little") / 2**32
        line = {
            "step": step,
            "loss": 5.6 * math.exp(-step / 30) + 0.12 * noise,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "microbatches": batch,
            "tokens": batch * 128,
            "replicas": alive,
            "epoch": len(incidents) + 1,
            "accum": -(-batch // alive),
            "roles": {"major": alive},
            "seconds": 0.12 * batch / alive + 0.3 * bool(dead) + 0.03 * noise,
            "data_digest": sha256(f"{seed}/{step}".encode()).hexdigest(),
        }
        lines.append(line)
    path.mkdir(parents=True)
    for name, records in (("steps.jsonl", lines), ("incidents.jsonl", incidents)):
        (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"steps": steps, "replicas": replicas, "accum": 4, "global_batch": batch, "seed": seed}
    (path / "config.yaml").write_text(yaml.safe_dump({**settings, "log": {"wandb": path.name}, **config}))
    if finished:
        seconds = sum(line["seconds"] for line in lines)
        tokens = sum(line["tokens"] for line in lines)
        summary = {
            "steps": steps,
            "microbatches_min": batch,
            "microbatches_max": batch,
            "replicas_start": replicas,
            "replicas_end": alive,
            "failures": replicas - alive,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "effective_throughput": tokens / seconds / replicas,
            "final_loss": lines[-1]["loss"],
            "parameters_digest": sha256(f"{seed}".encode()).hexdigest(),
        }
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def edit(run: Path, step: int, **changes: Any) -> None:
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    lines[step - 1] |= changes
    (run / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def charts_of(page: str) -> list[dict[str, Any]]:
    """The data that the charts of a report draw."""
    found = re.search(r'<script type="application/json" id="runs">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_report_is_self_contained_and_lists_each_death_with_its_cost(tmp_path: Path) -> None:
    run = make_run(tmp_path / "failing", deaths={5: [1], 12: [2, 3]})
    page = build([run], tmp_path / "out").read_text().replace("&nbsp;", " ")
    assert "<h1>failing: 24 steps, every one on exactly 16 microbatches, 3 of 4 replicas lost</h1>" in page
    assert (
        "Replica 1 was lost in step 5 (in-reduce). It took 36 ms to come to the repair, 151 ms to repair the world, "
        "3.2 ms to restore the gradients and 305 ms to make up for what was lost. Survivors redid 4 microbatches. "
        "The step was committed with 16 of 16 microbatches." in page
    )
    assert "Replicas 2 and 3 were lost in step 12" in page
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index.html"]
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert charts_of(page)[0]["series"]["replicas"] == [4] * 4 + [3] * 7 + [1] * 13


def test_report_of_several_runs_compares_them_in_shared_pictures(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "calm"), make_run(tmp_path / "failing", deaths={5: [1]})]
    page = build(runs, tmp_path / "out").read_text()
    assert "<h1>2 runs: calm, failing</h1>" in page
    assert "calm: 24 steps, every one on exactly 16 microbatches, no replica lost" in page
    assert "failing: 24 steps, every one on exactly 16 microbatches, 1 of 4 replicas lost" in page
    assert "losses bitwise equal; parameters bitwise equal." in page
    assert [run["name"] for run in charts_of(page)] == ["calm", "failing"]


def test_report_distinguishes_runs_of_one_name_by_their_paths(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")])
    assert [run.name for run in runs] == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_report_of_a_failure_free_run_says_so(tmp_path: Path) -> None:
    page = build([make_run(tmp_path / "calm")], tmp_path / "out").read_text()
    assert "Nobody died." in page
    assert 'class="incident' not in page


def test_report_of_a_running_job_shows_its_progress(tmp_path: Path) -> None:
    run = make_run(tmp_path / "going", steps=7, deaths={7: [0]}, finished=False)
    with (run / "steps.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 3.')
    edited = (run / "incidents.jsonl").read_text().replace('"step": 7', '"step": 8')
    (run / "incidents.jsonl").write_text(edited)
    page = build([run], tmp_path / "out").read_text()
    assert "going: 7 steps" in page
    assert "going has no summary: it is still going, or was ended before it could write one." in page
    assert "The step was not committed." in page
    assert "could not be read" not in page


def test_report_of_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("steps: 3\n")
    assert "new: no step committed yet" in build([tmp_path / "new"], tmp_path / "out").read_text()


def test_report_counts_a_broken_line_and_ignores_a_duplicate(tmp_path: Path) -> None:
    run = make_run(tmp_path / "broken")
    lines = (run / "steps.jsonl").read_text().splitlines()
    (run / "steps.jsonl").write_text("\n".join([lines[0], *lines[:9], "{torn", *lines[9:]]) + "\n")
    (record,) = read_runs([run])
    assert [line["step"] for line in record.steps] == list(range(1, 25))
    assert "1 line of broken could not be read." in build([run], tmp_path / "out").read_text()


def test_report_does_not_call_a_shrinking_batch_constant(tmp_path: Path) -> None:
    run = make_run(tmp_path / "adaptive")
    edit(run, 20, microbatches=12)
    assert "adaptive: 24 steps, on 12 to 16 microbatches" in build([run], tmp_path / "out").read_text()


def test_report_escapes_names_from_a_run(tmp_path: Path) -> None:
    page = build([make_run(tmp_path / "<b>&")], tmp_path / "out").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page


def test_report_draws_nonfinite_losses_and_many_incidents(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", steps=200, replicas=64, deaths={3 * n: [n] for n in range(1, 60)})
    edit(run, 5, loss=None)
    page = build([run], tmp_path / "out").read_text()
    assert charts_of(page)[0]["series"]["loss"][4] is None
    assert "The bars are those of the 40 longest of 59 incidents." in page
    assert page.count('class="took"') == 40


def test_report_counts_the_losses_of_each_launch(tmp_path: Path) -> None:
    """A run that began with 4 replicas, lost one and was resumed on 2 must not be reported to have lost 1 of 2."""
    run = make_eventful_run(tmp_path / "resumed")
    page = build([run], tmp_path / "out").read_text()
    assert "1 of 4 replicas lost, 1 joined, resumed on 2</h1>" in page
    (run / "summary.json").write_text(json.dumps({"replicas_start": 2, "replicas_end": 2}))
    text = re.sub(r"<[^>]*>|\s+", " ", build([run], tmp_path / "out").read_text())
    assert "replicas at the start 4 replicas at the end 2" in " ".join(text.split())
    (run / "summary.json").unlink()
    assert charts_of(page)[0]["resumed"] == [{"step": 41, "replicas": 2}]
    with open(run / "incidents.jsonl", "a") as file:
        file.write(json.dumps(incident_line(50, [0], epoch=4)) + "\n")
    assert "lost, 1 joined, resumed on 2, 1 of 2 lost</h1>" in build([run], tmp_path / "out").read_text()
    view = RunView(run)
    view.refresh()
    assert view.state()["history"] == "1 of 4 replicas lost, 1 joined, resumed on 2, 1 of 2 lost"
    assert view.state()["lost"] == 2


def test_report_of_a_join_has_one_figure_for_the_pause(tmp_path: Path) -> None:
    """This holds also where an older version recorded the whole step of a join as redone."""
    run = make_eventful_run(tmp_path / "run")
    page = build([run], tmp_path / "out").read_text().replace("&nbsp;", " ")
    joined = page.partition('class="incident joined"')[2].partition('class="incident')[0]
    assert "The others waited for 146 ms." in joined
    assert "pause 146 ms" in joined
    assert "redo" not in joined.partition("<h2>")[0]
    (record,) = read_runs([run])
    assert record.goodput["parts_ms"]["redone"] == 3 * 42  # only that of the loss


def test_report_has_the_heldout_loss_evaluated_after_the_last_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    edit(run, 9, heldout_loss=4.5, heldout_step=8)
    edit(run, 12, heldout_loss=4.25)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "heldout_loss": 4.0, "heldout_step": 24}))
    found = charts_of(build([run], tmp_path / "out").read_text())[0]["heldout"]
    assert found == {"step": [8, 12, 24], "loss": [4.5, 4.25, 4.0]}


def test_report_calls_equal_runs_bitwise_equal(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", deaths={4: [2]})]
    (line,) = compare(runs)
    same = "a and b, 24 steps: sample numbers the same in every step; losses bitwise equal; parameters bitwise equal"
    goodput = "; goodput 100.0% against 75.2%, most of it by capacity of lost replicas (0.0% against 22.6%)"
    assert line == same + goodput


def test_report_names_where_runs_diverge_and_what_differs(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", threads=1, replicas=4)
    b = make_run(tmp_path / "b", threads=2, replicas=2, steps=20)
    edit(b, 9, loss=math.nextafter(json.loads((a / "steps.jsonl").read_text().splitlines()[8])["loss"], 9))
    edit(b, 17, data_digest="other")
    (line,) = compare([a, b])
    assert line.startswith(
        "a and b, the 20 steps in common (of 24 and 20): sample numbers first differ at step 17; "
    )
    assert "; losses first differ at step 9 (" in line
    assert "), never by more than " in line
    assert (
        "e-16; parameters bitwise equal; recorded differences: " in line or "e-15; parameters bitwise" in line
    )
    assert "threads (1 against 2)" in line
    assert "replicas (4 against 2)" not in line  # other differences come first
    assert " and 1 more; goodput " in line
    assert "wandb" not in line


def test_report_does_not_call_unknown_values_equal(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", finished=False)
    assert (
        "losses bitwise equal; parameters not known (b has no summary: ended); goodput" in compare([a, b])[0]
    )
    edit(b, 3, data_digest=None)
    (b / "steps.jsonl").write_text((b / "steps.jsonl").read_text().replace('"data_digest": null', '"x": 0'))
    assert "sample numbers not recorded in step 3" in compare([a, b])[0]
    c = make_run(tmp_path / "c", seed=1)
    assert "sample numbers first differ at step 1; losses first differ at step 1" in compare([a, c])[0]
    assert "parameters differ; recorded differences: seed (0 against 1)" in compare([a, c])[0]
    assert "never by more than" in compare([a, c])[0]
    for missing in (None, math.nan):
        edit(c, 4, loss=missing)
        assert "never by more than" not in compare([a, c])[0]


def test_comparison_names_the_part_that_explains_the_lower_goodput(tmp_path: Path) -> None:
    """It does not name the part that differs most, where the worse run has less of that part."""
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for step in range(1, 25):
        edit(a, step, evaluation_ms=240)
        edit(b, step, wait_ms=4 * 200, checkpoint_ms=150)
    for runs in ([a, b], [b, a]):
        (line,) = compare(runs)
        high, low, *part = map(float, re.findall(r"([\d.]+)%", line))
        assert (high > low) is (runs == [a, b])
        assert (part[0] < part[1]) is (high > low)
        assert "most of it by waiting for slower replicas (" in line


def test_comparison_with_a_killed_run_takes_nothing_unknown_for_a_difference(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1, finished=False)
    summary = json.loads((a / "summary.json").read_text())
    (a / "summary.json").write_text(json.dumps({**summary, "environment": {"torch": "2.13.0"}}))
    killed = describe_this_process() | {"born": 1}  # another process has its pid
    write_lines(b / "job.jsonl", [start_line(4, owner=killed)])
    for runs in ([a, b], [b, a]):
        (line,) = compare(runs)
        assert "recorded differences: seed (" in line
        assert "torch" not in line
        assert line.count("b has no summary: the launcher was killed (pid ") == 1
    raised = exit_line(0, START + 50, words={"end": "raised", "detail": "KeyError: 'x'"})
    write_lines(b / "job.jsonl", [start_line(4, owner=killed), raised, {"what": "end", "at": START + 60}])
    (b / "config.yaml").unlink()
    assert "(b has no summary: failed after step 24: no rank finished); " in compare([a, b])[0]


def test_report_is_written_into_the_first_run_or_the_given_path(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=4)
    result = CliRunner().invoke(app, ["report", str(run)])
    assert (result.exit_code, result.stdout) == (0, f"page: {run}/report/index.html\n")
    result = CliRunner().invoke(app, ["report", str(run), "--output", str(tmp_path / "out")])
    assert result.stdout == f"page: {tmp_path}/out/index.html\n"
    result = CliRunner().invoke(app, ["report", str(run), str(run), "--compare"])
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1


def test_comparison_of_different_runs_has_exit_code_0_as_its_help_says(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)]
    result = CliRunner().invoke(app, ["report", *map(str, runs), "--compare"])
    assert "parameters differ" in result.output
    assert result.exit_code == 0
    told = CliRunner().invoke(app, ["report", "--help"], env={"COLUMNS": "200"}).output
    assert "The exit code is 0 also if they differ." in " ".join(told.split())


def test_report_refuses_what_is_no_run_in_one_sentence(tmp_path: Path) -> None:
    run, nothing = make_run(tmp_path / "a", steps=2), tmp_path / "nothing"
    nothing.mkdir()
    for arguments, reason in (
        ([tmp_path / "missing"], "missing is not a directory; name"),
        ([nothing], "nothing is not a run directory: it holds neither"),
        ([run, "--compare"], "nothing to compare with; name two"),
        ([run, "--output", run / "config.yaml"], "config.yaml"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert result.exit_code == 2
        assert result.stderr.startswith("recover report: ")
        assert reason in result.stderr
        assert result.stderr.count("\n") == 1
