"""The command `recover train` itself: its refusals and its help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recover.job.config_keys import describe
from recover.train.config import Config


def test_refusal_is_one_sentence_with_exit_code_2_and_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recover.cli", "train", "stps=5", "--run-dir", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "recover: there is no key 'stps'; did you mean 'steps'?\n"
    assert not (tmp_path / "run").exists()


def test_train_help_lists_every_key() -> None:
    command = [sys.executable, "-m", "recover.cli", "train", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [key for key, _, _ in describe(Config) if f"  {key}" not in text] == []
