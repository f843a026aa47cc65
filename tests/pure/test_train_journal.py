"""Files of lines whose writer changes: no line is lost, doubled or torn, whatever the previous writer has left."""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recover.job.spec import JobSpec
from recover.policy import RestoreMode
from recover.runs.records import feed as feeds
from recover.runs.records.feed import RunFeed
from recover.runs.records.json_lines import LineFile, read_lines
from recover.runs.records.sentences import sentence
from recover.runs.report.recorded_runs import Run
from recover.runs.report.wording import sentences
from recover.runs.writing.journal import Journal
from recover.runs.writing.run_records import data_digest, incident_line
from recover.step.incident import Incident
from recover.step.samples import PartitionedSamples
from recover.train.config import parse
from recover.train.progress import Screen
from recover.train.sinks import Sinks


def line(step: int, **more: object) -> dict[str, Any]:
    return {"step": step, "loss": 1.5, **more}


def filled(path: Path, steps: range) -> LineFile:
    """The line file of a rank that holds these steps."""
    lines = LineFile(path, "step")
    lines.kept.extend(line(step) for step in steps)
    return lines


def numbers(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_journal_successor_truncates_a_torn_line_and_rewrites_it(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    filled(path, range(1, 4)).write()
    whole = path.read_bytes()
    third = whole.index(b'{"step": 3')
    for torn in range(third, len(whole) + 1):
        path.write_bytes(whole[:torn])
        filled(path, range(1, 6)).write()
        assert numbers(path) == [1, 2, 3, 4, 5]


@pytest.mark.guarantee("The trainer", "A commit that only dead ranks have seen yields to the survivors' own.")
def test_commit_seen_only_by_dead_ranks_yields_to_the_survivors(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    dead = filled(path, range(1, 4))
    dead.kept.append(line(4, loss=9.0, seconds=1.0))
    dead.write()
    survivor = filled(path, range(1, 4))
    survivor.kept.append(line(4, loss=2.0, seconds=3.0))
    survivor.write()
    assert numbers(path) == [1, 2, 3, 4]
    assert list(read_lines(path))[-1]["loss"] == 2.0
    before = path.read_bytes()
    other = filled(path, range(1, 4))
    other.kept.append(line(4, loss=2.0, seconds=7.0))  # the same step with the time of another clock
    other.write()
    assert path.read_bytes() == before


def test_journal_write_is_idempotent(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = filled(path, range(1, 4))
    for _ in range(2):
        lines.write()
        filled(path, range(1, 4)).write()
    assert numbers(path) == [1, 2, 3]


def test_journal_lines_refused_by_a_full_disk_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world: Any = SimpleNamespace(job=JobSpec(4), rank=0, members=(0, 1))
    journal = Journal(tmp_path, world, Sinks(parse({"log.tensorboard": "false"}), tmp_path).log)
    journal.commit(line(1), [])
    with monkeypatch.context() as full:
        write = os.write

        def half(file: int, text: bytes) -> int:
            write(file, text[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "write", half)
        journal.commit(line(2), [])
        journal.commit(line(3), [])
    assert capsys.readouterr().out.count("kept in memory") == 1
    assert [entry["step"] for entry in read_lines(tmp_path / "steps.jsonl")] == [1]
    journal.commit(line(4), [])
    assert numbers(tmp_path / "steps.jsonl") == [1, 2, 3, 4]


def test_journal_is_written_by_the_lowest_living_rank_only(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(job=JobSpec(4), rank=2, members=(0, 2, 3))
    journal = Journal(tmp_path, world, Sinks(parse({"log.tensorboard": "false"}), tmp_path).log)
    journal.commit(line(1), [])
    assert not (tmp_path / "steps.jsonl").exists()
    world.members = (2, 3)
    journal.commit(line(2), [line(2, epoch=2)])
    assert numbers(tmp_path / "steps.jsonl") == [1, 2]


def test_journal_writer_that_resumes_writes_no_line_twice(tmp_path: Path) -> None:
    """A replica with a lower number may join later, write for a while, and die."""
    members: Any = SimpleNamespace(job=JobSpec(4), rank=6, members=(6,))
    newcomer: Any = SimpleNamespace(job=JobSpec(4), rank=5, members=(5, 6))
    first, later = Journal(tmp_path, members), Journal(tmp_path, newcomer)
    first.commit(line(1), [line(1, epoch=2)])
    later.load_state_dict(first.state_dict())
    members.members = (5, 6)
    for step in (2, 3):
        for journal in (later, first):
            journal.commit(line(step), [line(step, epoch=step + 1)])
    members.members = (6,)
    first.commit(line(4), [])
    assert numbers(tmp_path / "steps.jsonl") == [1, 2, 3, 4]
    assert numbers(tmp_path / "incidents.jsonl") == [1, 2, 3]


def test_resumed_run_repeats_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    filled(path, range(1, 8)).write()
    lines = filled(path, range(4, 6))
    lines.cut_after(3)
    lines.write()
    assert numbers(path) == [1, 2, 3, 4, 5]


def test_screen_follows_a_file_that_is_truncated_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    filled(path, range(1, 8)).write()
    feed = RunFeed(tmp_path, new_only=True)
    assert feed.read().steps == []
    lines = LineFile(path, "step")
    lines.kept.extend(line(step, loss=2.5) for step in range(4, 12))
    lines.cut_after(3)
    lines.write()
    with open(path, "ab") as file:
        file.write(b'{"step": 12, "lo')
    assert [entry["step"] for entry, _ in feed.read().steps] == list(range(4, 12))
    assert feed.read().steps == []


def test_feed_skips_records_of_an_earlier_job(tmp_path: Path) -> None:
    """The files of a resumed run are replaced by a prefix of themselves; the feed does not deliver the steps in it
    again."""
    steps, incidents = (
        LineFile(tmp_path / "steps.jsonl", "step"),
        LineFile(tmp_path / "incidents.jsonl", "step"),
    )
    steps.kept.extend(line(step) for step in range(1, 6))
    incidents.kept.extend(line(step) for step in (2, 5))
    for lines in (steps, incidents):
        lines.write()
    feed, whole = RunFeed(tmp_path, new_only=True), RunFeed(tmp_path)
    whole.read()
    for lines in (steps, incidents):
        lines.cut_after(3)
        lines.kept.clear()
        lines.kept.append(line(4, loss=2.5))
        lines.write()
    assert feed.read() == ([(line(4, loss=2.5), [line(4, loss=2.5)])], [line(4, loss=2.5)], True)
    assert whole.read().restarted
    assert not feed.read().restarted


def test_feed_delivers_incidents_with_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also if the writer appends both while the feed is between the two files."""
    feed, read = RunFeed(tmp_path), feeds._Tail.read

    def read_and_let_the_writer_on(tail: Any, unfinished: bool) -> Any:
        found = read(tail, unfinished)
        if not (tmp_path / "steps.jsonl").exists():
            (tmp_path / "incidents.jsonl").write_text(json.dumps(line(1, epoch=2)) + "\n")
            (tmp_path / "steps.jsonl").write_text(json.dumps(line(1)) + "\n")
        return found

    monkeypatch.setattr(feeds._Tail, "read", read_and_let_the_writer_on)
    assert feed.read() == ([], [line(1, epoch=2)], False)
    assert feed.pending == [line(1, epoch=2)]
    assert feed.read() == ([(line(1), [line(1, epoch=2)])], [], False)
    assert feed.pending == []
    with open(tmp_path / "incidents.jsonl", "a") as file:
        file.write(json.dumps(line(1, epoch=3)) + "\n" + json.dumps(line(2, epoch=4)))
    assert feed.read().incidents == [line(1, epoch=3)]
    assert feed.read(unfinished=True).incidents == [line(2, epoch=4)]
    assert feed.pending == [line(1, epoch=3), line(2, epoch=4)]


def test_screen_reports_a_rewritten_line_once_and_keeps_nothing_of_it(
    tmp_path: Path,
) -> None:
    path, told, kept = tmp_path / "steps.jsonl", [], []
    feed = RunFeed(tmp_path, new_only=True)
    for first in (1, 1001, 2001):
        filled(path, range(first, first + 1000)).write()
        told += feed.read().steps
        lines = filled(path, range(first + 997, first + 1000))
        lines.cut_after(first + 996)
        lines.write()
        told += feed.read().steps
        kept.append(len(pickle.dumps((vars(feed._steps), feed.pending))))
    assert [entry["step"] for entry, _ in told] == list(range(1, 3001))
    assert kept[2] - kept[1] < 100, "a job takes steps for weeks"


def test_screen_reports_a_failure_in_one_sentence_with_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incident = line(
        3,
        epoch=2,
        location="in-reduce",
        dead_replicas=[1],
        repair_ms=74.4,
        extra_microbatches=4,
        redone_microbatches=4,
    )
    committed = line(3, microbatches=16, replicas=3, tokens=10, seconds=1.0)
    expected = (
        "step 3: lost replica 1 (in-reduce); repaired in 74 ms, 4 microbatches run again; "
        "committed with 16 of 16 on 3 replicas"
    )
    assert sentence(incident, committed, 16) == expected
    with Screen(parse({}), tmp_path, first=1) as screen:
        (tmp_path / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
        screen.update()
        assert capsys.readouterr().out == ""
        (tmp_path / "steps.jsonl").write_text(json.dumps(committed) + "\n")
        screen.update()
    assert expected in capsys.readouterr().out


def test_screen_reports_a_join_with_the_time_the_others_waited() -> None:
    joined = Incident(
        step=7,
        epoch=4,
        dead_ranks=(2,),
        dead_replicas=(2,),
        complete=True,
        boundary=False,
        restore=RestoreMode.SKIP,
        extra_microbatches=0,
        discarded_microbatches=0,
        noticed_at=0.0,
        noticed_in="advance",
        detect_ms=0.0,
        repair_ms=31.0,
        joined_ranks=(4, 5),
        joined_replicas=(4, 5),
        hosts=("here",),
        warm_up_ms=5000.0,
        transfer_ms=12.3,
        transfer_bytes=3 << 20,
        stall_ms=44.6,
    )
    told = incident_line(joined, [], exact=True)
    assert (told["kind"], told["joined_replicas"], told["dead_replicas"]) == ("joined", [4, 5], [2])
    committed = line(7, microbatches=16, replicas=5, tokens=10, seconds=1.0)
    assert sentence(told, committed, 16) == (
        "step 7: replicas 4, 5 joined, lost replica 2; the others waited 45 ms, 12 of them for 3.0 MiB of state; "
        "16 of 16 on 5 replicas"
    )
    assert sentences(Run(Path("run"), "run", [], [told], {}, {}, 0), told) == (
        "Replicas 4 and 5 joined on here before step 7. In the same repair the others found that replica 2 had been "
        "lost. It took 5.0 s to warm up, while the others trained, 31 ms to be admitted and 12 ms to be given the "
        "state. The others waited for 45 ms."
    )
    lost = incident_line(replace(joined, joined_ranks=(), joined_replicas=()), [], exact=True)
    assert not {name for name in lost if "joined" in name or name == "kind"}


def test_tensorboard_shows_every_step_once_after_a_change_of_writer(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = parse({})
    kept = [line(step, seconds=1.0, tokens=8) for step in range(1, 31)]
    first, second = Sinks(config, tmp_path), Sinks(config, tmp_path)
    for known in range(1, 21):
        first.log(kept[:known])  # this writer is killed, and never closes its files
    second.log(kept[:22])
    second.log(kept)
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 31))


@pytest.mark.guarantee(
    "The trainer", "An unwritable checkpoint and a failing metrics service cost no replica."
)
def test_failing_metrics_service_costs_neither_replica_nor_other_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The service fails when it is opened, in the middle, or at the end; one message says so."""
    kept = [line(step, seconds=1.0, tokens=8) for step in range(1, 5)]
    config = parse({"log.wandb": "project"})
    for broken in ("init", "log", "finish"):

        def fail(*_: object, broken: str = broken, **__: object) -> None:
            raise SystemExit(f"{broken} fails")

        service = {"log": lambda *_, **__: None, "finish": lambda: None, broken: fail}
        run = SimpleNamespace(**service)
        opened = fail if broken == "init" else lambda run=run, **_: run
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=opened))
        sinks = Sinks(config, tmp_path / broken)
        for known in range(1, 5):
            sinks.log(kept[:known])
        sinks.close()
        said = capsys.readouterr().out
        assert said.count("Weights & Biases gets no more curves") == 1
        assert f"{broken} fails" in said
        assert list((tmp_path / broken / "tensorboard").iterdir())


def test_data_digest_is_that_of_the_sorted_indices() -> None:
    assert data_digest([3, 1, 2]) == data_digest([1, 2, 3]) != data_digest([1, 2, 4])


@pytest.mark.guarantee(
    "The trainer", "A resume with another number of replicas or another B repeats and skips no sample."
)
@pytest.mark.parametrize("numbers", [(1,), (3,), (5, 5, 2), (4, 7), (2, 3, 4, 1)])
def test_partitions_are_recut_from_all_unused_samples(numbers: tuple[int, ...]) -> None:
    """In each run one replica is slower and one dies; each run resumes the previous one with another number of
    replicas."""
    used: list[int] = []
    state: dict[str, Any] = {}
    for replicas in (4, *numbers):
        partitions = [PartitionedSamples(replica, replicas) for replica in range(replicas)]
        for partition in partitions:
            if state:
                partition.load_state_dict(state)
        dead = replicas - 1 if replicas > 1 else None
        for step in range(1, 5):
            alive = [r for r in range(replicas) if step < 3 or r != dead]
            drawn = [partitions[r].index(step, slot) for r in alive for slot in range(1 if r == 2 else 3)]
            used += drawn
            for replica in alive:
                partitions[replica].committed(drawn, contributed=True)
        states = [partitions[replica].state_dict() for replica in alive]
        assert states == [states[0]] * len(alive)  # any replica may save
        state = json.loads(json.dumps(states[0]))
    assert len(used) == len(set(used))
    alone = PartitionedSamples(0, 1)
    alone.load_state_dict(state)
    used += [alone.index(1, slot) for slot in range(200)]
    assert len(used) == len(set(used)), "a sample was used twice"
    assert sorted(used) == list(range(len(used))), "a sample was left out"


@pytest.mark.guarantee("Joining", "Partitioned samples are used once when replicas join.")
def test_joined_replica_continues_the_partition_of_a_dead_one() -> None:
    """No sample is drawn twice or left out, whichever replicas join or are lost; a joining replica draws from the
    partition that it is given."""
    drawn: list[int] = []
    replicas = {number: PartitionedSamples(number, 3) for number in range(3)}

    def take(counts: dict[int, int]) -> None:
        samples = [replicas[n].index(1, slot) for n, count in counts.items() for slot in range(count)]
        drawn.extend(samples)
        for each in replicas.values():
            each.committed(samples, contributed=True)

    def join(*numbers: int) -> None:
        giver = next(iter(replicas.values()))
        for number in numbers:
            replicas[number] = PartitionedSamples(number, 3)
            replicas[number].take_over(giver.owners)
            replicas[number].load_state_dict(giver.state_dict())
        for each in replicas.values():
            each.seat(sorted(replicas))

    take({0: 2, 1: 2, 2: 2})
    del replicas[1]
    take({0: 3, 2: 3})
    join(7)
    assert replicas[0].owners == [0, 7, 2]
    assert len(replicas[0].state_dict()["used"]) == 1, "coming and going costs nothing for ever"
    take({0: 1, 2: 1, 7: 4})
    join(9)
    assert replicas[0].owners == [0, 2, 7, 9]
    take({0: 5, 2: 5, 7: 5, 9: 5})
    assert len(set(drawn)) == len(drawn) == 38
    assert {tuple(each.owners) for each in replicas.values()} == {(0, 2, 7, 9)}
    assert sorted(drawn) == list(range(38)), "partitions that were behind are made up for by the new cut"


def test_spare_redraws_its_unused_samples() -> None:
    """Only the partitions of dead replicas drop out: a spare's samples are used when it is no longer a spare."""
    partition = PartitionedSamples(1, 2)
    spare = [partition.index(1, slot) for slot in range(3)]
    partition.committed([0, 2, 4], contributed=False)
    assert [partition.index(2, slot) for slot in range(3)] == spare
    partition.put_back()  # its sum was discarded in the middle of a step
    assert [partition.index(2, slot) for slot in range(2)] == spare[:2]
    partition.committed(spare[:2], contributed=True)
    assert partition.index(3, 0) == spare[2]
