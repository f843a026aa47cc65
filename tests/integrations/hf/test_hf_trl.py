"""TRL's SFTTrainer on ReCoVer, on chats with a template: losses and metrics through two deaths."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_runs import HuggingFace

EXACT = ("learning_rate", "num_tokens", "eval_num_tokens", "epoch")


@pytest.mark.guarantee(
    "User code", "TRL's SFTTrainer keeps its losses to 1e-5 and its count of tokens through two deaths."
)
def test_sft_trainer_has_the_losses_of_the_calm_run_through_deaths(tmp_path: Path) -> None:
    """One replica dies in a step, whose microbatches run again; the other after its sums were taken, so that the
    survivor counts the tokens of its microbatches."""
    hf = HuggingFace(tmp_path)
    calm = hf.stock("calm", program="sft_job.py")
    run = hf.recover("deaths", 3, kills=["3:1:backward", "8:0:vote"], program="sft_job.py")
    assert (calm.code, run.code) == (0, 0), run.output
    assert list(run.logged("loss")) == [2, 4, 6, 8, 10, 12]
    assert list(run.logged("eval_loss")) == [6, 12]
    for name, within in {
        "loss": 1e-5,
        "eval_loss": 1e-5,
        "grad_norm": 1e-4,
        **dict.fromkeys(EXACT, 0),
    }.items():
        assert run.logged(name) == pytest.approx(calm.logged(name), rel=within, abs=0), name
    for name in (
        "entropy",
        "mean_token_accuracy",
    ):  # of step 8, two microbatches are measured after the update
        assert run.logged(name) == pytest.approx(calm.logged(name), rel=0.1), name
    assert run.output.count("'learning_rate'") == 6
