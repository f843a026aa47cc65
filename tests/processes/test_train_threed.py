"""`recover train parallel=3d`: the trainer on grids, and checkpoints that fit other grids."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from training import CAN_BE_CUT, Trained, check_lines, finish, small_world, start, train

STEPS, BATCH = 6, 4


def grid(run_dir: Path, *words: str, kills: list[str] | None = None, resume: Path | None = None) -> Trained:
    if resume is None:
        words = (
            *small_world(run_dir.parent / "world", **CAN_BE_CUT),
            f"steps={STEPS}",
            f"global_batch={BATCH}",
            "parallel=3d",
            "microbatch_size=2",
            "checkpoint.every=3",
            "eval.every=6",
            *words,
        )
    return train(run_dir, *words, kills=kills or [], resume=resume)


def check_goes_on_like(run: Trained, whole: Trained) -> None:
    """After the checkpoint in the middle: the same samples, and the same losses but for rounding."""
    assert run.code == 0, run.output
    expected = whole.steps[STEPS // 2 :]
    assert [line["step"] for line in run.steps] == [line["step"] for line in expected]
    for key in ("data_digest", "microbatches"):
        assert [line[key] for line in run.steps] == [line[key] for line in expected]
    for key in ("loss", "grad_norm", "heldout_loss"):
        mine, theirs = ([line[key] for line in lines if key in line] for lines in (run.steps, expected))
        assert mine == pytest.approx(theirs, rel=1e-4)


def cut_off(run: Trained) -> Path:
    """Make a run look as if it had ended after the checkpoint in the middle; its directory."""
    shutil.rmtree(run.run_dir / "checkpoints" / f"step-{STEPS}")
    return run.run_dir


@pytest.mark.guarantee(
    "Grids (3D parallelism)", "A checkpoint fits another grid and another number of replicas."
)
@pytest.mark.soak
def test_run_resumes_on_another_grid_and_replica_count(tmp_path: Path) -> None:
    """Tied embeddings in one piece, then at both ends of a pipeline that loses a replica."""
    whole = grid(tmp_path / "whole", "replicas=1", "tp=2")
    assert whole.code == 0, whole.output
    check_lines(whole, STEPS, BATCH)
    other = grid(
        tmp_path / "other", "replicas=2", "tp=1", "pp=2", kills=["5:0.1:in-reduce"], resume=cut_off(whole)
    )
    check_goes_on_like(other, whole)
    assert [tuple(line["dead_ranks"]) for line in other.incidents] == [(0, 1)]


@pytest.mark.guarantee(
    "Grids (3D parallelism)", "A checkpoint fits another grid and another number of replicas."
)
@pytest.mark.soak
def test_experts_and_optimizer_state_resume_on_every_other_grid(tmp_path: Path) -> None:
    experts = ["experts=4", "replicas=1"]
    whole = grid(tmp_path / "whole", *experts, "tp=2", "ep=2")
    assert whole.code == 0, whole.output
    checkpoint = cut_off(whole)
    for name, words in {
        "pipeline": ["tp=1", "pp=2", "ep=2", "replicas=2"],
        "interleaved": ["tp=2", "pp=1", "ep=1"],
        "plain": ["parallel=ddp", "replicas=2"],
    }.items():
        check_goes_on_like(grid(tmp_path / name, *words, resume=checkpoint), whole)


@pytest.mark.soak
def test_small_paper_experiment_survives_loss_of_half_its_replicas(tmp_path: Path) -> None:
    job = start(tmp_path / "run", "examples/paper/3d-small.yaml")
    run = finish(job, tmp_path / "run", limit=600)  # sixteen processes start slowly on few cores
    assert run.code == 0, run.output
    check_lines(run, 24, 16)
    assert [line["location"] for line in run.incidents] == ["in-reduce", "in-reduce"]
    assert (run.summary["replicas_start"], run.summary["replicas_end"]) == (4, 2)


@pytest.mark.parametrize("name", ["7b-3d", "1b-hsdp", "3d-small"])
def test_paper_experiments_can_be_dry_run_anywhere(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recover.train.supervision import train as command

    config = Path(__file__).parents[2] / "examples" / "paper" / f"{name}.yaml"
    assert command([str(config), "faults=null"], tmp_path / "run", dry_run=True) == 0
    said = capsys.readouterr().out
    sizes = {"7b-3d": ("tp 4 x pp 2", 512), "1b-hsdp": ("8 ranks", 512), "3d-small": ("tp 2 x pp 2", 16)}
    grid, processes = sizes[name]
    assert grid in said
    assert f"{processes} processes" in said
    assert "memory per rank" in said
    assert ("too few for one step" in said) == (processes == 512)


@pytest.mark.guarantee("Grids (3D parallelism)", "A grid that does not fit is refused before the start.")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["parallel=3d"], "add tp=2, pp=2 or both"),
        (["pp=2"], "pp=2: a grid belongs to parallel=3d"),
        (["parallel=3d", "tp=2", "seq_len=31"], "seq_len=31 cannot be shared among the tp=2 ranks"),
        (["parallel=3d", "ep=2", "microbatch_size=3"], "microbatch_size=3 cannot be shared among the ep=2"),
        (["parallel=3d", "pp=2"], "1 layer(s) cannot be cut into 2 stages"),
    ],
)
def test_grid_that_does_not_fit_is_refused_before_the_start(
    tmp_path: Path, words: list[str], complaint: str
) -> None:
    run = train(tmp_path / "run", *small_world(tmp_path), *words)
    assert run.code == 2
    assert complaint in run.output
