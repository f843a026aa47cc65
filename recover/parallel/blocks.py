"""Blocks of a model: modules that are gathered, or recomputed, one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of the model's ModuleLists, at any depth; of lists inside of blocks (experts, say) the
    outermost ones count.

    A module without parameters is no block, and a block that is used several times counts once.
    """
    found: list[torch.nn.Module] = []
    for module in model.children():
        if isinstance(module, torch.nn.ModuleList):
            found += [block for block in module if any(True for _ in block.parameters())]
        else:
            found += blocks_of(module)
    return list(dict.fromkeys(found))


def refuse_ties_across(model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> None:
    """Raise for a parameter in two units: it would be gathered with one, and be a shard in the
    other."""
    unit: dict[torch.nn.Module, torch.nn.Module] = {}
    for block in sorted(blocks, key=lambda block: -len(list(block.modules()))):  # those inside of others last
        unit |= dict.fromkeys(block.modules(), block)
    names = {module: name for name, module in model.named_modules()}
    homes: dict[torch.nn.Parameter, dict[torch.nn.Module, str]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            at = f"{names[module]}.{name}" if names[module] else name
            homes.setdefault(parameter, {}).setdefault(unit.get(module, model), at)
    for units in homes.values():
        if len(units) > 1:
            raise ValueError(
                f"{' and '.join(units.values())} are one parameter in {len(units)} units that are gathered one at a "
                "time; leave their blocks out (blocks=[...], with the others), so that they are gathered together with "
                "the rest of the model"
            )


def plain_name(name: str) -> str:
    """The name of a parameter without the prefix of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def compile_blocks(blocks: Iterable[torch.nn.Module], backend: str = "inductor") -> None:
    """torch.compile of what each block computes, in place: names are unchanged, and so are the
    hooks around a block (they gather its shards) and its recomputation. One compilation serves
    all blocks of one shape."""
    # Compiled in this process: workers of the compiler would outlive a rank that is killed.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    for block in blocks:
        inner: Any = getattr(block, "_checkpoint_wrapped_module", block)
        inner.forward = torch.compile(inner.forward, backend=backend)


def recompute_blocks(
    model: torch.nn.Module, blocks: Iterable[torch.nn.Module] | None = None
) -> list[torch.nn.Module]:
    """Forget the activations inside blocks and compute them again in backward; returns the
    blocks as wrapped."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    chosen = list(blocks) if blocks is not None else blocks_of(model)
    if not chosen:
        raise ValueError(
            f"activations cannot be recomputed block by block: no ModuleList was found in {type(model).__name__}; "
            "name the modules with blocks=[...]"
        )
    inside = set(model.modules())
    if foreign := [type(block).__name__ for block in chosen if block not in inside or block is model]:
        raise ValueError(
            f"activations of {len(foreign)} block(s) ({foreign[0]}, ...) cannot be recomputed: they are no modules "
            f"inside of {type(model).__name__}; give blocks= of the model itself"
        )
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        # Hugging Face's cache of keys and values would grow twice if a block is computed twice.
        config.use_cache = False
    apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)
    return [
        module for module in model.modules() if getattr(module, "_checkpoint_wrapped_module", None) in chosen
    ]
