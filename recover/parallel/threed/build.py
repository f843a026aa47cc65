"""Cuts a model over the grid of a replica: the parameters of each rank, and how ranks share
them."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import Schedule1F1B

from recover.gradients.parts import local_part
from recover.gradients.replica_interface import Sharing, mark
from recover.parallel.blocks import recompute_blocks
from recover.parallel.partition import ModelCut, Schedule
from recover.parallel.threed.expert_exchange import Exchange
from recover.parallel.threed.mesh import MeshReplica, ReplicaMesh
from recover.parallel.threed.pipeline import Pipeline
from recover.parallel.threed.tensor import cut_block, cut_ends, cut_experts, is_cut, is_experts
from recover.parallel.torch_world import init_replica_world

if TYPE_CHECKING:
    from recover.world.world import World


def threed(
    model: torch.nn.Module,
    world: World,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    schedule: Schedule = "1f1b",
    param_dtype: torch.dtype | None = None,
    checkpoint_activations: bool = False,
) -> Pipeline:
    """Cut `model` over the ranks of this replica and return this rank's part, to be trained by
    whole rounds:

        for round in step.rounds(stream):
            step.backward(pipeline(round))  # or pipeline(round, weights=[...]), one for each microbatch

    model:                   the reference LLaMA, or a module that is built like it, whole on every rank
    tp, pp, ep:              ranks that share each matrix, the layers, and the experts; together they fill the replica
    schedule:                `1f1b`, `gpipe`, or `interleaved` (two stages per rank)
    param_dtype:             type in which forward and backward compute (bfloat16, say); gradients are summed
                             in float32
    checkpoint_activations:  forget the activations inside blocks and compute them again in backward
    """
    cut = ModelCut(tp, pp, ep, schedule)
    cut.check_ranks(world.grid.replica_size)
    _refuse_old_pipelines(pp)
    config: Any = model.config
    cut.check_model(config)
    device = next(model.parameters()).device
    init_replica_world(world, device)
    mesh = ReplicaMesh(cut, device, config.tied)
    pipeline = Pipeline(model, mesh, device, param_dtype)
    shared = list(_cut(pipeline, model, mesh))
    if checkpoint_activations:
        recompute_blocks(pipeline, list(pipeline.blocks.values()))
    pipeline.replica = MeshReplica(device, shared, fill=(mesh.cut.pp - 1) / mesh.cut.stages_per_rank)
    pipeline.make_stages()
    mark(pipeline, pipeline.replica)
    return pipeline


def _refuse_old_pipelines(pp: int) -> None:
    """Schedules of torch 2.9 refuse a round with fewer microbatches than stages, which a death can
    leave over, and their set-up aborts on gloo."""
    if pp > 1 and "return_outputs" not in signature(Schedule1F1B.step).parameters:
        raise ValueError(
            f"pp={pp}: pipelines do not work with torch {torch.__version__}, whose schedules refuse rounds with fewer "
            "microbatches than stages; install torch 2.11 or later, or use pp=1"
        )


def _cut(pipeline: Pipeline, model: Any, mesh: ReplicaMesh) -> Iterator[tuple[torch.nn.Parameter, Sharing]]:
    """Cut the matrices, copy shared parameters from the first holder, and yield how each is
    shared."""
    cut = mesh.cut
    if cut.tp > 1:
        cut_ends(pipeline, mesh.device_mesh["tp"])
    if model.config.tied and hasattr(pipeline, "output"):
        pipeline.output.weight = pipeline.embedding.weight  # cutting has replaced one of them
    routers, experts = set(), set()
    for block in pipeline.blocks.values():
        if cut.tp > 1:
            cut_block(block, mesh.device_mesh["tp"])
        mixture: Any = block.feed_forward
        if is_experts(mixture) and cut.tp * cut.ep > 1:
            cut_experts(mixture, mesh.device_mesh["ep", "tp"])
            if cut.ep > 1:
                mixture.share = Exchange(mesh.device_mesh.get_group("ep"))
            routers.add(mixture.router.weight)
            experts |= {mixture.w1, mixture.w2, mixture.w3}
    for name, parameter in pipeline.named_parameters():
        holders, sharing = mesh.over_ep, Sharing(cut.ep, mesh.over_ep)
        if parameter in experts:
            holders, sharing = None, Sharing()
        elif parameter in routers:
            holders, sharing = mesh.over_ep_and_tp, Sharing(cut.ep * cut.tp, mesh.over_ep_and_tp)
        elif parameter.dim() == 1 and is_cut(parameter):
            raise ValueError(
                f"{name} is a bias that tensor parallelism has cut, which is not supported; leave biases out"
            )
        elif parameter.dim() == 1:  # a norm: tensor-parallel ranks complete its gradient as backward goes
            holders, sharing = mesh.over_ep_and_tp, Sharing(cut.ep * cut.tp, mesh.over_ep)
        elif name == "embedding.weight" and model.config.tied and cut.pp > 1:
            holders, sharing = mesh.over_ends, Sharing(2 * cut.ep, mesh.over_ends)
        if holders is not None:
            holders.copy_from_first(local_part(parameter.data))
        yield parameter, sharing
