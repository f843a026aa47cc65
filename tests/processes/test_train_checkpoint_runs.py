"""A wrong state on the writer of a real run reaches no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import small_world, train
from worlds import PROGRAMS

from recover.checkpoint.directory import FACTS, CheckpointError
from recover.job.config_keys import read_words
from recover.launch.launcher import launch
from recover.launch.request import LaunchRequest
from recover.train.config import parse
from recover.train.preparation import prepare_run


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.guarantee(
    "The trainer", "A run without a majority names the last good checkpoint and resumes from it."
)
@pytest.mark.soak
@pytest.mark.usefixtures("every_checkpoint_is_awaited")
def test_run_without_a_majority_names_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    """Two replicas; the writer's weights are damaged before it saves them. Its checkpoint is not offered."""
    words = [*small_world(tmp_path), "replicas=2", "accum=2", "steps=4"]
    words += ["checkpoint.every=1", "checkpoint.keep=1"]
    rough = train(tmp_path / "run", *words, kills=["3:0:advance=corrupt:weights"])
    assert rough.code == 1, rough.output
    assert "no majority" in rough.output
    assert f"The last good checkpoint is {rough.run_dir / 'checkpoints/step-2'}" in rough.output
    assert f"--resume {rough.run_dir}` goes on from step 3" in rough.output
    assert rough.checkpoints == ["draft-3", "step-2"]
    again = train(rough.run_dir, resume=rough.run_dir)
    assert again.code == 0, again.output
    assert again.checkpoints == ["step-4"]
    digest = again.summary["parameters_digest"]
    assert again.facts("step-4")["parameters_digest"] == digest

    part, facts = (again.run_dir / "checkpoints/step-4" / name for name in ("part-0.safetensors", FACTS))
    sound = part.read_bytes()
    part.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"part-0.safetensors is damaged"):
        prepare_run(["steps=5"], None, [], again.run_dir)
    part.write_bytes(sound)
    facts.write_text(facts.read_text().replace(digest, "0" * 64))
    refused = train(again.run_dir, "steps=5", resume=again.run_dir)
    assert refused.code == 4, refused.output
    assert f"its parameters_digest is {'0' * 64}, and what was loaded from it has {digest}" in refused.output
    assert "there is no older one" in refused.output


@pytest.mark.usefixtures("every_checkpoint_is_awaited")
def test_damaged_moments_of_the_writer_reach_no_checkpoint(tmp_path: Path) -> None:
    """The parameters would show the damage too late: the vote after a checkpoint compares the optimizers, too."""
    words = [*small_world(tmp_path), "replicas=2", "accum=2", "steps=5"]
    config = parse(read_words([*words, "checkpoint.every=1", "checkpoint.keep=1"]))
    program = PROGRAMS / "damaged_moments.py"
    request = LaunchRequest(program, [config.model_dump_json(), ""], run_dir=tmp_path / "run")
    code = launch(2, request)
    assert code == 1
    undecided = ["unconfirmed-3-replica-0", "unconfirmed-3-replica-1"]
    assert names(tmp_path / "run") == ["draft-3", "step-2", *undecided]
    assert "hold different" in (tmp_path / "run/ranks/0.log").read_text()
