"""Leaving a step early costs no replica: the begun attempt is discarded, and all that come to the step take it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy import reference
from worlds import Outcome, run_world

# Step 8 loses a replica; in the other steps that were left no replica died, and all repaired.
EPOCHS = [1, 2, 3, 4, 5, 6, 7, 9, 9]


def check_memory(outcome: Outcome) -> None:
    """The same after 20 repairs as after 3. How many operations fail in between depends on how busy the machine is."""
    for rank in (0, 1):
        notes = outcome.notes(rank, "memory")
        early, late = notes[:3], notes[-3:]
        assert [entry["held"] for entry in notes] == [0] * len(notes)
        assert late[-1]["given_up"] > early[-1]["given_up"]
        least, most = (
            pick(entry["resident"] for entry in some) for pick, some in ((max, early), (min, late))
        )
        assert most - least < 3 * notes[0]["gradients"], [entry["resident"] for entry in notes]
        files, threads = (max(entry["os"][which] for entry in early) for which in (0, 1))
        assert late[-1]["os"][0] <= files + 2
        assert late[-1]["os"][1] <= threads + 1


@pytest.mark.guarantee(
    "Work kept after a death",
    "Any rank may leave a step early in any way without losses, and the step is taken afterwards.",
)
@pytest.mark.guarantee(
    "Work kept after a death", "Repairs leak no memory, thread or socket with either carrier."
)
@pytest.mark.parametrize("carrier", ["mpi", pytest.param("gloo", marks=pytest.mark.soak)])
def test_step_may_be_left_early_in_any_way_by_any_rank(
    tmp_path: Path, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back: no noise of the heap
    outcome = run_world("leaving.py", tmp_path / "run", 3, [carrier], kills=["8:2:in-reduce"])
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [0, 1], outcome.output
    for rank in (0, 1):
        commits = outcome.notes(rank, "commit")
        assert [entry["samples"] for entry in commits] == [
            list(range(6 * n, 6 * n + 6)) for n in range(len(EPOCHS))
        ]
        assert [entry["epoch"] for entry in commits] == EPOCHS, commits
        # Replicas that stayed, and replicas that left and came back, ran their share and nothing again.
        assert [entry["microbatches"] for entry in commits[:7]] == [2] * 7
        losses, parameters = reference(
            outcome.notes(rank, "start")[0]["parameters"], [e["samples"] for e in commits]
        )
        torch.testing.assert_close([entry["loss"] for entry in commits], losses, rtol=1e-5, atol=1e-6)
        end = [torch.tensor(value) for value in outcome.notes(rank, "end")[0]["parameters"]]
        torch.testing.assert_close(end, parameters, rtol=1e-6, atol=1e-6)
        assert "may be half updated" in outcome.notes(rank, "torn")[1]["error"]
    assert "was begun again" in outcome.notes(0, "kept")[0]["error"]
    check_memory(outcome)
