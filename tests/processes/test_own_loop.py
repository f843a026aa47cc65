"""A user's own loop, with what is offered for it, through deaths of whoever writes, reads and saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from constructs import Construct, Padded, of_model, plain, qwen2, targets_of
from own_loop import digest, make_stream, reference
from worlds import Outcome, run_world

from recover.saving import checkpoint


def test_own_loops_keep_their_batches_lines_and_checkpoints_whoever_dies(tmp_path: Path) -> None:
    """Of five replicas one dies over a line, one over a checkpoint, one in a reduction while its thread hangs, and one
    over the line after the last step; two others go on from the checkpoint."""
    place = tmp_path / "place"
    place.mkdir()
    wrong = {"dies_in_call": {0: 3, 3: 8}, "dies_in_save": {1: 4}, "hangs_in_thread": [2, 5]}
    first = run_world("own_loop.py", tmp_path / "first", 5, [str(place), "8", wrong], kills=["6:2:in-reduce"])
    assert first.code == 0, first.output
    assert first.survivors == [4], first.output
    assert "recover: fail after step 2 raised ValueError: this log is full; training goes on" in first.output
    assert [found.step for found in checkpoint.all_good(place)] == [4, 8]
    assert not checkpoint.drafts(place)
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


@pytest.mark.soak
def test_sharded_replicas_save_and_others_go_on_from_it(tmp_path: Path) -> None:
    """A Qwen2, whose blocks lie deep, on two replicas of two ranks with recomputation, one of which dies; then on plain
    replicas. Weights and their average, an extra, are those of one process, over all tokens of padded batches."""
    place = str(tmp_path / "place")
    first = run_world(
        "sharded_saving.py", tmp_path / "first", 4, [place, "2"], replica_size=2, kills=["2:0.1:vote"]
    )
    assert first.code == 0, first.output
    assert first.survivors == [2, 3], first.output
    assert "Qwen2ForCausalLM is sharded over 2 rank(s) in 4 unit(s)" in first.output
    second = run_world("sharded_saving.py", tmp_path / "second", 2, [place, "3"])
    assert second.code == 0, second.output
    torch.set_num_threads(1)
    averages: list[torch.Tensor] = []

    def remember(model: torch.nn.Module, number: int) -> None:
        for mine, parameter in zip(averages, model.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.5)

    def make() -> torch.nn.Module:
        model = qwen2(layers=3)
        averages[:] = [p.detach().clone() for p in model.parameters()]
        return model

    expected = plain(Construct(make, of_model, weight=targets_of, stream=Padded, between=remember))
    for found, theirs in zip(torch.load(tmp_path / "second" / "0.pt"), (expected, averages), strict=True):
        torch.testing.assert_close(list(found.values()), theirs, rtol=0, atol=1e-5)
