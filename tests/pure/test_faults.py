"""Schedules, places and actions: which faults are accepted or refused, and that accepted faults strike."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training import small_world

from recover.faults import LOCATIONS, Fault, Probe, parse_fault, parse_faults
from recover.faults.draw import draw_by_clock, draw_schedule
from recover.faults.locations import IN_INSTALMENTS, OUTSIDE, VERIFIED
from recover.faults.probe import ScheduledFault
from recover.faults.schedule import ScheduleError, impossible, read_schedule, survivors, write_schedule

MIXED = {"kill": 3, "exit": 1, "stop": 1, "pause:1": 1, "slow:2": 1, "corrupt:weights": 1, "nan": 1}


@pytest.mark.parametrize(
    "text",
    [
        "3:1.0:in-reduce",
        "6:2.1:bucket:0",
        "8:0.0:backward=pause:2",
        "1:0.0:repair:census=exit",
        "30s:1.0=stop",
        "4asks:0.1:repair:in-state",
        "4asks:4.0:warm-up=exit",
        "12joined:3.0:vote=stop",
    ],
)
def test_fault_parses_what_it_formats(text: str) -> None:
    assert str(parse_fault(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3:1", "STEP:REPLICA[.LOCAL]:LOCATION[:DETAIL][=ACTION]"),
        ("3:1:vot", "did you mean 'vote'?"),
        ("0:1:vote", "steps count from 1"),
        ("3:1:vote:2", "takes no ':2'"),
        ("3:1:repair:censu", "did you mean 'census'?"),
        ("3:1:bucket:last", "numbered from 0"),
        ("3:1:vote=kil", "did you mean 'kill'?"),
        ("3:1:vote=pause", "pause takes seconds"),
        ("3:1:vote=slow:0.5", "a factor above 1"),
        ("3:1:vote=nan", "write 3:1:bucket=nan"),
        ("3:1:vote=corrupt:sum", "write 3:1:reduced=corrupt:sum"),
        ("30s:1:vote", "30s:1 for one that strikes 30 s after"),
        ("30s:1=exit", "needs a place"),
        ("4asks:1", "STEP:REPLICA[.LOCAL]:LOCATION[:DETAIL][=ACTION]"),
        ("4asks:1:warm-up", "write 1asks:1:warm-up"),
        ("3:4:ask", "write 4asks:4:ask"),
        ("4asks:4:ask=exit", "only a signal strikes it"),
    ],
)
def test_invalid_fault_is_refused_with_the_remedy(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^fault ") as caught:
        parse_fault(text)
    assert said in str(caught.value)


@pytest.mark.guarantee("Faults, hangs and stragglers", "A fault that can never strike is refused by name.")
@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("3:4:vote", "there are replicas 0 to 3, and no 4"),
        ("3:1.2:vote", "a replica is 2 ranks, numbered from 0; there is no 1.2"),
        ("41:1:vote", "the run has 40 steps"),
        ("4:1:vote 9:1:forward", "fault 9:1.0:forward: replica 1 is lost already by 4:1.0:vote"),
        ("4:1:vote 4:1:advance=pause:1", "replica 1 is lost already by 4:1.0:vote"),
        ("9s:1 3s:1=stop", "fault 9s:1.0: replica 1 is lost already by 3s:1.0=stop"),
        (
            "4:1:repair:census",
            "unless another replica is lost in step 4; add such a fault, for example 4:2:in-reduce",
        ),
        ("4:1:extra 4:2:vote=pause:1", "unless another replica is lost in step 4"),
        ("3:1:checkpoint", "checkpoints are written after every 5 steps"),
        ("4asks:0:vote", "replica 4 can join only a job whose replicas come back; give --return"),
        ("4:1:check=errs:1", "neither microbatches nor sums are checked, since verify is 0; give verify=1"),
        ("4:1:reduced", "neither microbatches nor sums are checked, since verify is 0; give verify=1"),
        ("4:1:check", "since verify is 0"),
    ],
)
def test_fault_that_can_never_strike_is_named(faults: str, said: str) -> None:
    (problem,) = impossible(parse_faults(faults.split()), 4, 2, 40, checkpoint_every=5, verify=0)
    assert said in problem


def test_fault_that_can_strike_is_accepted() -> None:
    possible = (
        "4:1:vote 4:1.1:advance 5:2:in-reduce 5:3:extra 6:0:forward=pause:1 6:0:vote=slow:2 10:0:checkpoint"
    )
    assert list(impossible(parse_faults(possible.split()), 4, 2, 40, checkpoint_every=5)) == []
    for late in (["4:1:advance", "5:2:repair"], ["4:1:advance=corrupt:weights", "5:1:vote"]):  # met in step 5
        assert list(impossible(parse_faults(late), 4, 2, 40)) == []
    for verify in (1, None):  # None: the script sets verify
        assert list(impossible(parse_faults(["4:1:check=errs:1"]), 4, 2, 40, verify=verify)) == []


@pytest.mark.guarantee("Rejoining replicas", "Faults strike at the join of the replica that they name.")
def test_fault_at_a_join_that_can_never_strike_is_named() -> None:
    possible = (
        "3:1:vote 4asks:4:ask 5asks:0:repair:closing 6joined:2:in-reduce 6joined:3.1:extra 7joined:7:update"
    )
    assert list(impossible(parse_faults(possible.split()), 4, 2, 40, later=9)) == []
    for text, said in (
        ("3asks:0:vote", "replica 3 never joins; those who do are numbered from 4 on, 12 at the most"),
        ("13joined:0:vote", "replica 13 never joins"),
        ("6joined:6:forward", "replica 6 runs no microbatch in its first step; choose another place"),
        (
            "4joined:0:extra",
            "unless another replica is lost in step 4joined; add such a fault, for example 4joined:1:",
        ),
        ("4joined:0:bucket 4joined:0:vote", "replica 0 is lost already by 4joined:0.0:bucket"),
        ("3:13:vote", "there are replicas 0 to 12, and no 13"),
    ):
        (problem,) = impossible(parse_faults(text.split()), 4, 2, 40, later=9)
        assert said in problem


@pytest.mark.guarantee("Rejoining replicas", "Faults strike at the join of the replica that they name.")
def test_probe_strikes_at_the_join_of_the_named_replica() -> None:
    struck: list[str] = []
    faults = parse_faults(["4asks:0:forward", "5asks:0:repair:census", "5joined:0:forward"])
    probe = Probe(0, 0, faults, lambda fault: struck.append(str(fault)))
    for coming, came, place, expected in (
        ((), (), ("forward",), []),
        ((5,), (), ("forward",), []),
        ((), (4,), ("forward",), []),
        ((4, 5), (), ("repair", "members"), []),
        ((4, 5), (), ("forward",), ["4asks:0.0:forward"]),
        ((4, 5), (), ("repair", "census"), ["5asks:0.0:repair:census"]),
        ((5,), (5,), ("forward",), ["5joined:0.0:forward"]),
    ):
        struck.clear()
        probe.coming, probe.came = (lambda coming=coming: coming), came
        probe(*place)
        assert struck == expected, (coming, came, place)


def test_schedule_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    faults = (*draw_schedule(8, 2, 5, count=7, steps=(1, 9), actions=MIXED), *draw_by_clock(4, 1, 5, mtbf=30))
    faults += parse_faults(["8asks:0.1:repair:in-state", "9joined:9:vote=exit"])
    file.write_text(write_schedule(faults))
    assert read_schedule(file) == faults
    file.write_text(
        "- {step: 3, replica: 1, location: repair:census}\n- {after: 1e1, replica: 0, action: stop}\n"
    )
    assert "after" in _refusal(file)  # schedules do not write seconds as 1e1
    file.write_text(
        "- {step: 003, replica: 1, location: repair:census}\n- {after: 1.5, replica: 0, action: stop}\n"
    )
    assert list(map(str, read_schedule(file))) == ["3:1.0:repair:census", "1.5s:0.0=stop"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step: 3", "must be a YAML list like"),
        ("- {step: 3}", "entry 1 must be a YAML list like"),
        ("- {step: 3, replica: 1, location: vote}\n- {step: 3, replica: 1, where: vote}", "entry 2"),
        ("- {step: 3, replica: 1, location: vote, why: not}", "there is no key 'why'"),
        ("- {step: 3, after: 2, replica: 1}", "`after` (seconds) and neither of them"),
        ("- {step: x, replica: 1, location: vote}", "entry 1: fault 'x:1.0:vote=kill'"),
        ("- [", "must be a YAML list like"),
    ],
)
def test_unreadable_schedule_names_the_entry(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "faults.yaml").write_text(text)
    assert said in _refusal(tmp_path / "faults.yaml")


def _refusal(file: Path) -> str:
    with pytest.raises(ScheduleError) as caught:
        read_schedule(file)
    return str(caught.value)


@pytest.mark.guarantee(
    "Faults, hangs and stragglers", "Fault schedules are a pure function of their arguments, and can strike."
)
def test_drawn_schedules_can_strike_and_leave_a_survivor() -> None:
    places = set()
    for seed in range(400):
        replicas, size = 2 + seed % 7, 1 + seed % 2
        faults = draw_schedule(replicas, size, seed, count=replicas - 1, steps=(2, 9), actions=MIXED)
        assert len(faults) == replicas - 1
        assert list(impossible(faults, replicas, size, 9)) == [], write_schedule(faults)
        assert survivors(faults, replicas) >= 1
        places |= {fault.location for fault in faults}
    assert places == set(LOCATIONS) - {"checkpoint", *OUTSIDE, *VERIFIED, *IN_INSTALMENTS}


def test_fault_rate_gives_the_expected_number_of_faults() -> None:
    drawn = [len(draw_schedule(1000, 1, seed, mtbf=12, steps=(1, 1200))) for seed in range(30)]
    assert 85 < sum(drawn) / len(drawn) < 115  # the rate gives 100
    gaps = [fault.after for seed in range(200) for fault in draw_by_clock(2, 1, seed, mtbf=30)]
    assert 24 < sum(filter(None, gaps)) / len(gaps) < 36
    with pytest.raises(ScheduleError, match="lower --count"):
        draw_schedule(4, 1, 0, count=4, steps=(1, 9))


def test_timed_faults_never_coincide() -> None:
    """A fault at the moment of a replica's death would be refused because the replica is already lost."""
    for seed in range(300):
        faults = draw_by_clock(4, 1, seed, mtbf=0.02, actions={"kill": 1.0, "pause:0.5": 1.0})
        assert not list(impossible(faults, replicas=4, replica_size=1))


def test_probe_strikes_once_at_its_location_only() -> None:
    struck: list[Fault] = []
    faults = parse_faults(["2:1.1:bucket:1=pause:1", "2:1.1:vote", "2:0.1:vote", "3:1.1:bucket=slow:3"])
    probe = Probe(1, 1, faults, struck.append)
    for step in (1, 2, 2, 3):
        probe.step = step
        for index in (0, 1, 1):
            probe("bucket", index)
        probe("vote")
    assert list(map(str, struck)) == ["2:1.1:bucket:1=pause:1", "2:1.1:vote", "3:1.1:bucket=slow:3"]


def test_probe_delegates_actions_it_cannot_perform() -> None:
    probe = Probe(
        0, 0, parse_faults(["1:0:bucket:2=nan", "1:0:vote=slow:3", "1:0:update=exit", "1:0:bucket=nan"])
    )
    probe.step = 1
    with pytest.raises(RuntimeError, match=r"only a loop on recover\.Step"):
        probe("bucket", 0)
    buckets = [SimpleNamespace(local=torch.zeros(3)) for _ in range(3)]
    probe.watch(torch.nn.Linear(1, 1), SimpleNamespace(buckets=buckets))
    probe("bucket", 2)
    probe("vote")
    assert [bool(bucket.local.isnan().any()) for bucket in buckets] == [False, False, True]
    began = time.monotonic()
    probe.computed(lambda: 0.05)
    assert time.monotonic() - began >= 0.1  # slowed down to three times its time
    with pytest.raises(ScheduledFault, match=r"1:0\.0:update=exit"):
        probe("update")


def test_train_reads_schedules_from_files_and_the_command_line(tmp_path: Path) -> None:

    from recover.train.preparation import prepare_run

    file = tmp_path / "faults.yaml"
    file.write_text("- {step: 3, replica: 1, location: in-reduce, action: stop}\n- {after: 30, replica: 2}\n")
    words = [*small_world(tmp_path), f"faults={file}", "hang_limit=3"]
    prepared = prepare_run(words, tmp_path / "run", ["5:0:bucket:1=nan"], None)
    assert list(map(str, prepared.kills)) == ["5:0.0:bucket:1=nan", "3:1.0:in-reduce=stop", "30s:2.0"]
    assert json.loads(prepared.config.model_dump_json())["hang_limit"] == 3
    with pytest.raises(ValueError, match="replica 1 is lost already"):
        prepare_run(words, tmp_path / "run", ["9:1:vote"], None)
    with pytest.raises(ValueError, match="verify is 0; give verify=1"):
        prepare_run(words, tmp_path / "run", ["9:0:check"], None)
    prepare_run([*words, "verify=1"], tmp_path / "run", ["9:0:check"], None)


def test_slow_sample_is_slow_for_any_replica_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("recover.faults.probe.time.sleep", waited.append)
    faults = parse_faults(["3:1:forward=sample:0.1", "3:2:forward=sample:7", "4:9:forward=sample:9"])
    dealt = {0: [0, 1], 1: [2, 3], 2: []}
    for replica in range(3):
        probe = Probe(replica, 0, faults, fire=lambda fault: pytest.fail(str(fault)))
        for probe.step, slow in ((2, {}), (3, {2: 0.1}), (4, {})):
            probe("forward")
            probe.dealt(dealt)
            waited.clear()
            for slot in range(4):
                probe.reading(slot)
            assert waited == list(slow.values())


def test_stall_sleeps_and_a_held_lock_stops_the_other_threads() -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    threading.Thread(target=tick, daemon=True).start()
    for action, silent in (("stall:0.5", False), ("hold:0.5", True)):
        probe = Probe(0, 0, parse_faults([f"1:0:forward={action}"]))
        probe.step = 1
        began = time.monotonic()
        probe("forward")
        ended = time.monotonic()
        assert ended - began >= 0.5
        assert (not [at for at in ticks if began + 0.05 < at < ended - 0.05]) == silent, action
    done.set()
