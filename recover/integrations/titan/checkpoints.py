"""Checkpoints of torchtitan's own manager (DCP), in its own format, written by one replica.

DCP writes `.metadata` last, so torchtitan does not find a checkpoint whose writer died: the next
replica writes it again, in the asynchronous modes after the step in which the writer is missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint._storage_utils import _storage_setup
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools.logging import logger

from recover.world.calls import Call
from recover.world.retry import retry_after_repair

DATALOADER, RECOVER = "dataloader", "recover"  # keys of states in a checkpoint


class OneWriter(CheckpointManager):
    """Saves each checkpoint on one replica only. `trainer` is set once the trainer is built."""

    trainer: Any = None

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save also on a requested stop, and if the writer of an unfinished checkpoint was lost."""
        writer, world = self.trainer.progress["writer"], self.trainer.world
        is_due = self.trainer.recovery.stop_agreed or (writer >= 0 and writer not in world.replicas)
        return (is_due and not self.load_only) or bool(super()._should_save(curr_step, last_step))

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        trainer, world, write = self.trainer, self.trainer.world, super()._save
        trainer.dataloader.exchange(world, curr_step)
        trainer.recovery.confirm()  # a replica whose state differs must not write it

        def act() -> None:
            if world.replica != world.replicas[0]:
                return
            try:
                write(curr_step, last_step)
            except BaseException as error:  # DCP raises one on all ranks of the replica
                if last_step or isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                logger.error(f"the checkpoint of step {curr_step} failed ({error}); training continues")

        retry_after_repair(world, Call.SAVE, act, lambda *_: None)
        is_open = self.async_mode != AsyncMode.DISABLED and not last_step
        trainer.progress["writer"] = world.replicas[0] if is_open else -1
        return True

    def _load(self, step: int = -1) -> bool:
        # A joining replica receives the state of the members.
        return not self.trainer.world.outside and bool(super()._load(step))

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if not from_hf:
            self._fit(state_dict, checkpoint_id)
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def _fit(self, states: dict[str, Any], checkpoint_id: str) -> None:
        """Leave out what torchtitan alone has not saved, and refuse data of another batch."""
        reader: Any = _storage_setup(None, checkpoint_id, reader=True)
        saved = reader.read_metadata().state_dict_metadata
        if not any(key.startswith(f"{RECOVER}.") for key in saved):
            states.pop(RECOVER, None)
        found = sum(key.startswith(f"{DATALOADER}.dp_rank_") for key in saved)
        if DATALOADER in states and found != (wanted := self.trainer.dataloader.loaders):
            raise ValueError(
                f"{checkpoint_id} has the positions of {found} data loaders, and this run has {wanted} (microbatches "
                "of a step times data-parallel ranks of a replica); go on with the same --training.global-batch-size "
                "and --training.local-batch-size, or begin the data again: --checkpoint.exclude-from-loading dataloader"
            )
