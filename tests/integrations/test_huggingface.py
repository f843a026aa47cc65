"""Models of transformers under `recover`: in plain loops, sharded, recomputed, saved, and in the example.

Runs in `.venv-integrations` (`make test-integrations`); the core suite does not have transformers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from constructs import Construct, Padded, of_model, plain, targets_of
from example_runs import check_example_against_its_twin
from huggingface import CONSTRUCTS, gpt2, qwen2
from worlds import run_world

from recover.parallel.blocks import blocks_of, recompute_blocks

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "porting.md"


@pytest.mark.guarantee(
    "User code",
    "A GPT and a Hugging Face model with a DataLoader keep the losses of their plain twins through deaths.",
)
def test_huggingface_example_keeps_the_losses_of_its_plain_twin(tmp_path: Path) -> None:
    check_example_against_its_twin(tmp_path, "huggingface")


def test_huggingface_model_ends_with_the_parameters_of_one_process(tmp_path: Path) -> None:
    """Three replicas, two of which die on the way: final parameters to 1e-5."""
    outcome = run_world("constructs.py", tmp_path / "run", 3, ["huggingface", {"1": 0, "0": 2}])
    assert outcome.code == 0, outcome.output
    assert outcome.survivors == [2], outcome.output
    torch.set_num_threads(1)
    for number, (name, construct) in enumerate(CONSTRUCTS.items()):
        found = torch.load(tmp_path / "run" / f"{number}-2.pt")
        torch.testing.assert_close(
            found, plain(construct), rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_porting_page_lists_every_tested_huggingface_model() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert [name for name in CONSTRUCTS if name not in rows] == []


def test_huggingface_blocks_are_found() -> None:
    assert blocks_of(model := qwen2(layers=3)) == list(model.model.layers)
    assert blocks_of(model := gpt2()) == list(model.transformer.h)
    assert len(recompute_blocks(qwen2(layers=3))) == 3


@pytest.mark.guarantee(
    "User code",
    "Blocks are found at any depth, recomputed blocks have the same gradients, and misplaced recomputation "
    "is refused.",
)
def test_recomputed_huggingface_model_has_the_gradients_of_a_plain_one() -> None:
    """Its cache of keys and values must not grow when a block is computed again."""
    torch.manual_seed(0)
    model, batch = qwen2(), Padded()[0]
    model(**batch).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    recompute_blocks(model)
    model(**batch).loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.guarantee(
    "User code",
    "Plain replicas resume a checkpoint of sharded ones with `extra=` included, and user values are "
    "restored unchanged.",
)
@pytest.mark.soak
def test_huggingface_sharded_checkpoint_resumes_on_plain_replicas(tmp_path: Path) -> None:
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
