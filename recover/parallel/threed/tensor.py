"""Tensor parallelism: which matrix is cut which way. Between blocks each rank holds its part of the
sequence.

Matrices are cut by columns and then by rows, norms work on a rank's own part of the sequence
(sequence parallelism), and the logits stay cut by vocabulary for a loss that never gathers them.
A weight that all ranks hold whole gets a part of its gradient on each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

SEQUENCE = 1  # the dimension of positions, in (row, position, channel)


def cut_ends(pipeline: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Cut the embedding, the last norm and the output projection, as far as this rank has them."""
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(SEQUENCE), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(pipeline, mesh, {name: s for name, s in styles.items() if hasattr(pipeline, name)})


def cut_block(block: Any, mesh: DeviceMesh) -> None:
    styles: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(SEQUENCE), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
        "feed_forward_norm": SequenceParallel(),
    }
    if is_experts(block.feed_forward):
        _gather_around(block.feed_forward, mesh)
    else:
        styles |= {
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(SEQUENCE),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
            "feed_forward.w3": ColwiseParallel(),
        }
    parallelize_module(block, mesh, styles)


def cut_experts(experts: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Distribute whole experts over the first dimension of the mesh, each expert's hidden channels over
    the second."""
    for name, hidden in (("w1", 1), ("w2", 2), ("w3", 1)):
        weight = distribute_tensor(getattr(experts, name).data, mesh, (Shard(0), Shard(hidden)))
        experts.register_parameter(name, torch.nn.Parameter(weight))


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether ranks hold different parts of the parameter."""
    return isinstance(parameter, DTensor) and not all(place.is_replicate() for place in parameter.placements)


def is_experts(module: Any) -> bool:
    return hasattr(module, "share")


def _gather_around(experts: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Every rank routes the whole sequence and computes its channels of each expert: a part of
    every result."""

    def gather(_: torch.nn.Module, inputs: tuple[DTensor, ...]) -> torch.Tensor:
        whole = inputs[0].redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def scatter(_: torch.nn.Module, inputs: Any, result: torch.Tensor) -> torch.Tensor:
        parts = DTensor.from_local(result, mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Shard(SEQUENCE)]).to_local()

    experts.register_forward_pre_hook(gather)
    experts.register_forward_hook(scatter)
