"""GPUs, tested without a GPU: their number, which ranks share them, their peak, and what a run reports of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training import small_world

from recover.job import gpus
from recover.job.config_keys import ConfigError
from recover.job.gpus import gpus_on_host, has_gpu_per_rank, peak_of, sharing_refused, visible
from recover.launch.preflight import Refusal, check_gpus
from recover.parallel import blocks_of, compile_blocks
from recover.parallel.blocks import recompute_blocks
from recover.train.config import parse
from recover.train.dry_run import tell
from recover.train.models import SIZES, Llama, LlamaConfig
from recover.train.models.flops import flops_per_token
from recover.train.models.gpu_use import GpuUse, cards_in_use, mfu
from recover.train.optimizer import can_fuse, make_optimizer
from recover.train.preparation import prepare_run
from recover.train.progress import gpu_use


@pytest.mark.guarantee(
    "On GPUs",
    "GPUs are counted as CUDA counts them without torch, and ranks that NCCL would refuse to share a GPU "
    "are refused before the start.",
)
@pytest.mark.parametrize(
    ("asked", "present", "seen"),
    [
        (None, 8, 8),
        (None, 0, 0),
        ("", 8, 0),
        ("-1", 8, 0),
        ("NoDevFiles", 8, 0),
        ("0,1, 3", 8, 3),
        ("0,9,1", 8, 1),  # GPUs after a number that does not exist are hidden, too
        ("2,2", 8, 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 8, 1),
        ("MIG-1,MIG-2", 1, 2),
        ("0", 0, 0),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(asked: str | None, present: int, seen: int) -> None:
    assert visible(asked, present) == seen


def machine(root: Path, listed: int, devices: int) -> Path:
    for n in range(listed):
        (root / "proc/driver/nvidia/gpus" / f"0000:0{n}:00.0").mkdir(parents=True)
    (root / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(devices))):
        (root / "dev" / name).touch()
    return root


@pytest.mark.guarantee(
    "On GPUs",
    "GPUs are counted as CUDA counts them without torch, and ranks that NCCL would refuse to share a GPU "
    "are refused before the start.",
)
@pytest.mark.parametrize(("listed", "devices", "there"), [(8, 8, 8), (8, 2, 2), (0, 1, 1), (4, 0, 4)])
def test_container_sees_only_the_gpus_it_was_given(
    tmp_path: Path, listed: int, devices: int, there: int
) -> None:
    root = machine(tmp_path, listed, devices)
    assert gpus_on_host({}, root) == there
    assert gpus_on_host({"CUDA_VISIBLE_DEVICES": "0"}, root) == 1


@pytest.mark.guarantee(
    "On GPUs",
    "GPUs are counted as CUDA counts them without torch, and ranks that NCCL would refuse to share a GPU "
    "are refused before the start.",
)
def test_ranks_that_share_a_gpu_are_refused_unless_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_present", lambda root: 2)
    assert has_gpu_per_rank(2)
    assert not has_gpu_per_rank(3)
    check_gpus("nccl", 2)
    check_gpus("mpi", 3)
    with pytest.raises(Refusal, match=r"3 ranks on 2 GPUs.*NCCL_MULTI_RANK_GPU_ENABLE=1.*--carrier mpi"):
        check_gpus("nccl", 3)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    check_gpus("nccl", 3)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_gpu_per_rank(1)
    assert "no GPU is visible here (CUDA_VISIBLE_DEVICES=)" in sharing_refused(1)


@pytest.mark.parametrize(
    ("card", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA B200", 2250),
    ],
)
def test_gpu_is_recognised_by_its_driver_name(card: str, teraflops: float) -> None:
    assert peak_of(card) == teraflops * 1e12


@pytest.mark.parametrize(
    "card", ["NVIDIA GeForce RTX 4090", "NVIDIA A1000", "", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"]
)
def test_unknown_gpu_has_no_peak(card: str) -> None:
    assert peak_of(card) is None


@pytest.mark.guarantee(
    "On GPUs",
    "MFU is based on torch's own FLOP counter and the GPUs in use, and is absent for unknown GPUs and CPUs.",
)
@pytest.mark.parametrize("shape", [SIZES["tiny"], LlamaConfig(tied=True), LlamaConfig(experts=4, top_k=4)])
def test_flops_match_the_counter_of_torch(shape: LlamaConfig) -> None:
    """Compares with torch's own counter, over forward and backward of one sequence."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = Llama(shape)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert flops_per_token(shape, 64) * 64 == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_mixture_model_counts_only_the_experts_a_token_visits() -> None:
    one, eight = LlamaConfig(), LlamaConfig(experts=8, top_k=1)
    router = 6 * eight.layers * 8 * eight.dim
    assert flops_per_token(eight, 128) == flops_per_token(one, 128) + router


@pytest.mark.guarantee(
    "On GPUs",
    "MFU is based on torch's own FLOP counter and the GPUs in use, and is absent for unknown GPUs and CPUs.",
)
def test_mfu_counts_the_gpus_of_living_ranks() -> None:
    assert mfu(tokens=1000, seconds=2.0, flops=1e9, peak=1e12) == 0.5
    assert cards_in_use((0, 1, 2, 3), cards=4, on_host=4) == 4
    assert cards_in_use((0, 2), cards=1, on_host=4) == 1  # both ranks share it
    assert cards_in_use((0, 2), cards=2, on_host=4) == 1
    assert cards_in_use((0, 1, 4, 5), cards=2, on_host=4) == 4  # cards of two hosts


def used(monkeypatch: pytest.MonkeyPatch, card: str) -> tuple[GpuUse, dict[str, Any]]:
    """The GPU use of a job whose two ranks share one such card, and a line of its records."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    use = GpuUse(torch.device("cuda", 0), SIZES["tiny"], 128)
    line: Any = {"tokens": 4096, "seconds": 0.5}
    use.note(line, (0, 1))
    return use, line


def test_run_reports_its_gpus_their_sharing_and_the_basis_of_mfu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use, line = used(monkeypatch, "NVIDIA H200")
    assert line["mfu"] == round(4096 * flops_per_token(SIZES["tiny"], 128) / (0.5 * 989e12), 4)
    assert gpu_use({**line, "mfu": 0.423}) == "  MFU 42.3%  3.0 GiB"  # type: ignore[typeddict-item]
    for words in (
        "2 ranks on 1 x NVIDIA H200",
        "CUDA_VISIBLE_DEVICES=5",
        "2 ranks share a GPU",
        "of 989 TFLOP/s",
    ):
        assert words in use.describe((0, 1))


@pytest.mark.guarantee(
    "On GPUs",
    "MFU is based on torch's own FLOP counter and the GPUs in use, and is absent for unknown GPUs and CPUs.",
)
def test_unknown_gpu_has_memory_and_no_mfu_and_a_cpu_has_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    use, line = used(monkeypatch, "Abacus")
    assert line == {"tokens": 4096, "seconds": 0.5, "gpu_peak_mib": 3072}
    assert "no MFU: the peak of Abacus is not known" in use.describe((0, 1))
    line = {"tokens": 1, "seconds": 1.0}
    GpuUse(torch.device("cpu"), SIZES["tiny"], 128).note(line, (0, 1))  # type: ignore[arg-type]
    assert line == {"tokens": 1, "seconds": 1.0}
    assert gpu_use(line) == ""  # type: ignore[arg-type]


@pytest.mark.guarantee(
    "On GPUs", "Compiled blocks keep their names and gradients, and unsupported settings are refused by name."
)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"compile": "true", "reduction": "reproducible"}, "leave one of them out"),
        ({"compile": "true", "parallel": "3d", "tp": "2"}, "does not work with tp=2"),
        ({"compile": "true", "experts": "4"}, "does not work with experts=4"),
        ({"carrier": "nccl", "device": "cpu"}, "use carrier=mpi or gloo"),
    ],
)
def test_unsupported_gpu_or_compiler_setting_is_refused(words: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(words)


def test_compile_without_a_compiler_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no no-such-compiler in PATH"):
        prepare_run([*small_world(tmp_path), "compile=true"], tmp_path / "run", (), None)


@pytest.mark.guarantee(
    "On GPUs", "Compiled blocks keep their names and gradients, and unsupported settings are refused by name."
)
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_keep_their_names_and_gradients(recompute: bool) -> None:
    torch.manual_seed(0)
    shape = LlamaConfig(dim=32, heads=2, kv_heads=1, hidden=64, layers=2, seq_len=16)
    plain, compiled = Llama(shape), Llama(shape)
    compiled.load_state_dict(plain.state_dict())
    if recompute:
        recompute_blocks(compiled)
    names = [name for name, _ in compiled.named_parameters()]
    compile_blocks(blocks_of(compiled), backend="eager")
    assert [name for name, _ in compiled.named_parameters()] == names
    tokens = torch.randint(0, 256, (1, 16))
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    for model in (plain, compiled):
        model(tokens, tokens).backward()
    assert frames["ok"] > before, "nothing was compiled"
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_adamw_is_fused_only_for_uniform_parameters_on_gpus() -> None:
    cpu: Any = torch.zeros(1)
    cuda, cut, otherwise = (
        SimpleNamespace(is_cuda=True, **mesh)
        for mesh in ({}, {"device_mesh": "two ranks"}, {"device_mesh": "four ranks"})
    )
    assert can_fuse([cuda, cuda])  # type: ignore[list-item]
    assert can_fuse([cut, cut])  # type: ignore[list-item]
    for mixed in ([cpu], [cuda, cpu], [cuda, cut], [cut, otherwise], []):
        assert not can_fuse(mixed)  # type: ignore[arg-type]
    optimizer = make_optimizer(parse({}), torch.nn.Linear(2, 2))
    assert not optimizer.defaults["fused"]


def test_dry_run_states_the_memory_of_an_absent_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("recover.train.dry_run.gpus_on_host", lambda: 2)
    words = [*small_world(tmp_path), "model=small", "seq_len=256", "replicas=4", "device=cuda"]
    text = "\n".join(tell(prepare_run(words, tmp_path / "run", (), None, elsewhere=True)))
    assert "not here  device='cuda': torch sees no GPU here" in text
    (told,) = [line for line in text.splitlines() if line.startswith("GPUs")]
    # Two ranks with 24 M parameters: 4 bytes of weights, 8 of gradients, 8 of AdamW, and activations.
    assert "2 ranks share one: about 1.1 GB on each, and CUDA's own 1.2 GB" in told
    cpu = "\n".join(tell(prepare_run([*words, "device=cpu"], tmp_path / "run", (), None, elsewhere=True)))
    assert "GPUs" not in cpu
