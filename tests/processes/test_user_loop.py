"""A user's own loop, with the functions offered for it, through deaths of the replica that writes, reads or saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from own_loop import digest, make_stream, reference
from worlds import Outcome, run_world

from recover.checkpoint import directory


@pytest.mark.guarantee(
    "User code",
    "A user's own loop keeps the batches, records and checkpoints of one process, whichever replica dies.",
)
def test_own_loop_keeps_batches_records_and_checkpoints_through_deaths(tmp_path: Path) -> None:
    """Of five replicas one dies while it writes a line, one while it saves a checkpoint, one in a reduction while its
    thread hangs, and one while it writes the line after the last step; two others resume from the checkpoint."""
    place = tmp_path / "place"
    place.mkdir()
    wrong = {"dies_in_call": {0: 3, 3: 8}, "dies_in_save": {1: 4}, "hangs_in_thread": [2, 5]}
    first = run_world("own_loop.py", tmp_path / "first", 5, [str(place), "8", wrong], kills=["6:2:in-reduce"])
    assert first.code == 0, first.output
    assert first.survivors == [4], first.output
    assert "recover: fail after step 2 raised ValueError: this log is full; training goes on" in first.output
    assert [found.step for found in directory.all_good(place)] == [4, 8]
    assert not directory.drafts(place)
    second = run_world("own_loop.py", tmp_path / "second", 2, [str(place), "11", {}])
    assert second.code == 0, second.output
    for rank in second.survivors:
        (start,) = second.notes(rank, "start")
        assert start["index"] == 8
        assert start["found"] == {"seen": 8, "words": "{1: ('one', None), 't': tensor([0, 1, 2])}"}
    losses, parameters, average = reference(11)
    for outcome, steps in ((first, range(1, 9)), (second, range(9, 12))):
        check_batches(outcome, steps)
    ends = [second.notes(rank, "end")[0] for rank in second.survivors]
    for end in ends:
        for mine, theirs in ((end["parameters"], parameters), (end["average"], average)):
            torch.testing.assert_close([torch.tensor(p) for p in mine], theirs, rtol=0, atol=1e-5)
    # Nothing is missing, nothing has two versions, and only what was not known to be done was done again: rank 1 had
    # taken over line 3, written line 4, and died before another step.
    for name, expected in (
        ("lines.txt", [f"{number} {loss:.6f}"[:8] for number, loss in enumerate(losses, 1)]),
        ("slow.txt", [str(number) for number in range(1, 12)]),
    ):
        lines = [line[:8] for line in (place / name).read_text().splitlines()]
        assert sorted(set(lines), key=expected.index) == expected, lines
        again = {line for line in lines if lines.count(line) > 1}
        assert name == "slow.txt" or again <= set(expected[2:4]), lines


def check_batches(outcome: Outcome, steps: range) -> None:
    """Each step has the microbatches of one process that reads by itself."""
    stream = make_stream()
    for step in steps:
        seen: dict[int, str] = {}
        for rank in outcome.diaries:
            for entry in outcome.notes(rank, "commit"):
                if entry["step"] == step:
                    seen |= {int(index): value for index, value in entry["samples"].items()}
        expected = {index: digest(stream[index]) for index in range(10 * step - 10, 10 * step)}
        assert seen == expected, f"step {step}\n{outcome.output}"
