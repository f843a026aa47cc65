"""`recover train compile=true` with torch's own compiler, through a death, on every kind of replica it works for."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import CAN_BE_CUT, check_lines, small_world, train


@pytest.mark.guarantee(
    "On GPUs", "Compiled blocks keep their names and gradients, and unsupported settings are refused by name."
)
@pytest.mark.soak
@pytest.mark.parametrize(
    "kind",
    [["parallel=ddp"], ["parallel=hsdp", "shard=2", "microbatch_size=2"], ["parallel=3d", "pp=2"]],
    ids=["ddp", "hsdp", "pp"],
)
def test_compiled_run_survives_a_death_with_the_losses_of_a_plain_run(
    kind: list[str], tmp_path: Path
) -> None:
    words = [*small_world(tmp_path / "world", **CAN_BE_CUT), *kind, "replicas=2", "accum=2", "steps=5"]
    words += ["eval.every=2", "checkpoint.every=3"]
    plain = train(tmp_path / "plain", *words, kills=["4:1:in-reduce"])
    compiled = train(tmp_path / "compiled", *words, "compile=true", kills=["4:1:in-reduce"])
    for run in (plain, compiled):
        assert run.code == 0, run.output
        check_lines(run, 5, 4)
        assert [line["dead_replicas"] for line in run.incidents] == [[1]]
    for key in ("loss", "heldout_loss"):
        theirs = [line[key] for line in plain.steps if key in line]
        assert [line[key] for line in compiled.steps if key in line] == pytest.approx(theirs, rel=1e-4)
    on = train(tmp_path / "on", "steps=7", "compile=false", "replicas=1", resume=compiled.run_dir)
    assert on.code == 0, on.output  # its checkpoint has the names of any other
