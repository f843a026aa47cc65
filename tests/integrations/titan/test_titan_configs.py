"""Configs of torchtitan by name on ReCoVer: what is converted, what is refused, and with which words."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "programs" / "titan"))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "recover_lab" / "peers" / "programs" / "titan"))
os.environ.setdefault("TITAN_ASSETS", "unused")
import titan_on_cpu  # noqa: F401  (before torchtitan)
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.config import ConfigManager

from recover.integrations import checks
from recover.integrations.titan import compatibility, config_registry
from recover.integrations.titan.compatibility import SIGNATURES, check_torchtitan, refuse
from recover.integrations.titan.trainer import RecoverTrainer

ADAPTER = Path(compatibility.__file__).parent
LAUNCH = ["--module", "recover.integrations.titan", "--config"]


def parsed(*arguments: str) -> Any:
    return ConfigManager().parse_args([*LAUNCH, *arguments])


def test_every_config_of_torchtitan_is_found_by_its_name() -> None:
    names = dir(config_registry)
    assert {"llama3_8b", "llama3_debugmodel", "qwen3_0_6b", "deepseek_v3_16b"} <= set(names)
    for name in ("llama3_8b", "deepseek_v3_debugmodel", "titan_job.llama3"):
        config = getattr(config_registry, name)()
        assert isinstance(config, RecoverTrainer.Config)
        assert config.training.disable_cuda_graphs


def test_unknown_config_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"llama3_8x.*llama3_8b"):
        parsed("llama3_8x")


def test_config_of_another_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FluxTrainer.*choose a config of torchtitan\.trainer\.Trainer"):
        config_registry.flux_debugmodel()


def test_launch_line_sets_the_section_recover() -> None:
    config = parsed(
        "llama3_debugmodel", "--recover.reduction", "reproducible", "--recover.policy", "adaptive"
    )
    assert (config.recover.reduction, config.recover.policy) == ("reproducible", "adaptive")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--recover.verify", "1", "--compile.enable"],
            r"recover\.verify is 1, and compile\.enable is True\); leave --compile\.enable out",
        ),
        (
            ["--training.no-disable-cuda-graphs"],
            r"CUDA graphs.*is False\); set --training\.disable-cuda-graphs",
        ),
        (
            ["--parallelism.data-parallel-replicate-degree", "2"],
            r"replicate_degree is 2\); `recover run` makes replicas",
        ),
        (
            ["--training.global-batch-size", "-1"],
            r"global_batch_size is -1\); set --training\.global-batch-size",
        ),
        (["--comm.mode", "fake_backend"], r"comm\.mode is fake_backend"),
        (["--training.enable-cpu-offload"], r"enable_cpu_offload is True\); leave it out"),
        (["--checkpoint.create-seed-checkpoint"], "make it with torchtitan alone"),
        (["--metrics.save-for-all-ranks"], "save_for_all_ranks is True"),
        (["--recover.samples", "partitioned"], r"recover\.samples is partitioned"),
        (["--dataloader.no-infinite"], r"dataloader\.infinite is False"),
        (["--parallelism.tensor-parallel-degree", "4"], r"has 2 rank\(s\).*need 4.*--replica-size 4"),
    ],
)
def test_config_that_cannot_work_is_refused(arguments: list[str], complaint: str) -> None:
    """Each with its cause, its value and the remedy; without these arguments the config is accepted."""
    base = ["llama3_debugmodel", "--training.global-batch-size", "32"]
    refuse(parsed(*base), 2)
    with pytest.raises(ValueError, match=complaint):
        refuse(parsed(*base, *arguments), 2)


def test_checkpoints_of_another_manager_are_refused() -> None:
    config = parsed("llama3_debugmodel", "--training.global-batch-size", "32")
    config.checkpoint = BaseCheckpointManager.Config(enable=True)
    with pytest.raises(ValueError, match=r"DCP manager.*BaseCheckpointManager"):
        refuse(config, 1)


def test_method_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torchtitan()
    for functions in SIGNATURES.values():
        for name, right in list(functions.items()):
            monkeypatch.setitem(functions, name, "self config more")
            with pytest.raises(
                RuntimeError, match=rf"{name}\({right}\) of torchtitan 0\.3\.0 has other parameters"
            ):
                check_torchtitan()
            monkeypatch.setitem(functions, name, right)


def test_untested_version_of_torchtitan_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checks, "version", lambda _: "0.4.0")
    with caplog.at_level(logging.WARNING):
        check_torchtitan()
    assert "was tested with torchtitan 0.3.0, not 0.4.0" in caplog.text


def test_adapter_has_at_most_700_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in ADAPTER.glob("*.py")) <= 700
