"""The program of every rank of `recover train`, from top to bottom."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import recover
from recover.checkpoint.confirmed import save_confirmed, together
from recover.checkpoint.diverged import save_states
from recover.checkpoint.object_storage import Uploader, owner_of
from recover.checkpoint.saver import Saver
from recover.checkpoint.tensors import Tensors
from recover.gradients.state_hash import parameters_digest
from recover.job.leave_request import AllLeaveRequest, LeaveRequest
from recover.job.record_files import FILES
from recover.runs.records.environments import note_environment
from recover.runs.writing.environment_facts import environment
from recover.runs.writing.run_records import step_line
from recover.runs.writing.run_writer import RunWriter
from recover.step.errors import SkippedStepsError, StateDivergedError
from recover.step.in_flight import checksum
from recover.train.config import OF_UPDATES, Config
from recover.train.determinism import nondeterministic_operations, use_deterministic_kernels
from recover.train.device import pick_device
from recover.train.engine import make_engine
from recover.train.evaluation import heldout_loss
from recover.train.last_state import LastState
from recover.train.learning_rate import lr_factor
from recover.train.model_shape import shape_of
from recover.train.models.gpu_use import GpuUse
from recover.train.optimizer import make_optimizer
from recover.train.replay_order import SLOT, ReplayOrder
from recover.train.resuming import load_checkpoint
from recover.train.sinks import Sinks
from recover.train.stop_requests import StopRequests
from recover.train.streams import open_streams
from recover.world import rank_exit
from recover.world.calls import Call
from recover.world.fabrics.base import WorldLostError
from recover.world.liveness.board import ENDED
from recover.world.retry import retry_after_repair
from recover.world.world import World
from recover.world.writers import writing_replicas


def _eviction(config: Config) -> recover.StragglerEviction | None:
    rule = config.straggler
    return (
        None if rule.evict is None else recover.StragglerEviction(rule.evict, rule.every, config.min_replicas)
    )


class Trainer:
    """One rank of a run. All ranks create one with the same arguments, and call `run` once."""

    differs_between_replicas = True  # the records hold times of the rank

    def __init__(
        self,
        world: World,
        config: Config,
        run_dir: Path,
        resume: Path | None,
        replay: ReplayOrder | None = None,
    ) -> None:
        self.world, self.config, self.run_dir, self.replay = world, config, run_dir, replay
        self._facts_written = False
        self._nondeterministic: list[str] = []  # operations without a deterministic kernel
        torch.set_num_threads(config.threads)
        self.device = pick_device(config.device)
        if config.reduction == "reproducible" or config.verify:
            use_deterministic_kernels()
        self.stream, self.heldout = open_streams(config)
        self.shape = shape_of(config, self.stream.vocab)
        self.gpu_use = GpuUse(self.device, self.shape, config.seq_len)
        self.engine = make_engine(config, self.shape, world, self.device)
        self.optimizer = make_optimizer(config, self.engine.model)
        self.scheduler = LambdaLR(self.optimizer, lambda done: lr_factor(config, done))
        self.tensors = Tensors(self.engine.model, self.optimizer, world.grid.replica_size)
        # A joining replica receives the state of the others instead.
        resume = None if world.outside else resume
        saved = load_checkpoint(resume, self.tensors, self.engine, world) if resume else None
        self.step = recover.Step(
            world,
            self.engine.model,
            self.optimizer,
            config.global_batch,
            policy=config.policy,
            samples=config.samples,
            reduction=config.reduction,
            reduction_bits=config.reduction_bits,
            clip=config.clip,
            scheduler=self.scheduler,
            seed=config.seed,
            bucket_mb=config.bucket_mb,
            skip_limit=config.skip_limit,
            min_replicas=config.min_replicas,
            verify=config.verify,
            evict_stragglers=_eviction(config),
            join=config.join,
        )
        if saved:
            self._resume_from(saved)
        # Hosts with run directories of their own have curves of their own.
        self.sinks = Sinks(config, run_dir, world.job.host if len(world.job.directories) > 1 else None)
        self.records = RunWriter(world, run_dir, self.sinks.log)
        if not world.outside:  # a joining replica receives its records from the others
            self.records.begin_at(self.step.index + 1)
        self.saver = Saver(
            run_dir,
            config.checkpoint.every,
            config.checkpoint.keep,
            world.replica,
            first=world.shard == 0,
            alone=world.grid.replica_size == 1,
            uploader=Uploader(config.checkpoint.dir, owner_of(world.job), config.checkpoint.keep)
            if config.checkpoint.dir
            else None,
        )
        self.step.extra["trainer"] = self
        self.step.save_states = self._save_states  # type: ignore[method-assign]
        self.stop_requests = StopRequests(self.step, run_dir)
        request, everyone = LeaveRequest(world.job.session), AllLeaveRequest(world.job.session)
        self.last_state = LastState(
            lambda: everyone.is_asked, lambda: request.is_agreed, self._save_state_before_step
        )
        self._settled = self.step.result  # of the last step whose update is complete
        self.spent: dict[str, float] = {}  # milliseconds since the last step, spent outside of steps

    def run(self) -> None:
        """Train until all steps are taken, all replicas agree to stop, or too few replicas are left."""
        try:
            self._begin()
            # Ranks of a larger replica would have to save together, in the middle of what they compute.
            if self.world.job.etcd is not None and self.world.grid.replica_size == 1:
                self.last_state.start()
            while self._goes_on():
                self._take_step()
                self._checkpoint()
            self.last_state.stop()
            # There is no further step: the agent of a host that is to leave waits for the last checkpoint.
            LeaveRequest(self.world.job.session).note_agreement()
            retry_after_repair(self.world, Call.TRAIN_END, self._close, self.records.lost)
        except WorldLostError:
            self.last_state.stop()
            self._save_unconfirmed()
            raise

    def state_dict(self) -> dict[str, Any]:
        """State for a joining replica, besides that of the step."""
        return {"records": self.records.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records.load_state_dict(state["records"])

    def _resume_from(self, saved: dict[str, Any]) -> None:
        self.step.load_state_dict(saved["position"])
        self.scheduler.load_state_dict(saved["scheduler"])
        # The configuration may set another learning rate than before.
        self.scheduler.base_lrs = [self.config.lr for _ in self.scheduler.base_lrs]
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * lr_factor(self.config, self.step.index)

    def _begin(self) -> None:
        world = self.world
        if world.outside:  # the others train already: warm up before joining
            self.stop_requests.listen()
            self.engine.rehearse(self.stream[0])
            return
        if dead := sorted(set(range(world.grid.ranks)) - set(world.members)):  # before the first step
            self.records.lost(dead, world.last_census.seconds)
        retry_after_repair(world, Call.TRAIN_START, self._open_run_dir, self.records.lost)
        self.stop_requests.listen()
        if self.gpu_use.card and self.records.writing:
            rank_exit.log(text := self.gpu_use.describe(world.members))
            print(f"recover: {text}", flush=True)
        if self.config.reduction == "reproducible" and self.world.replica in writing_replicas(self.world):
            self._nondeterministic = nondeterministic_operations(self.engine, self.stream[0])
            for name in self._nondeterministic:
                if self.records.writing:
                    text = f"{name} has no deterministic form on {self.device.type}: bits may vary"
                    print(f"recover: {text}", flush=True)

    def _open_run_dir(self) -> None:
        self.records.cut_earlier_job()
        if self.records.writing:
            FILES.replace(self.run_dir / "config.yaml", self.config.to_yaml().encode())
            self.saver.start()

    def _take_step(self) -> None:
        started = time.perf_counter()
        try:
            for _ in self.engine.work(self.step, self.stream):
                self.stop_requests.look()
        except SkippedStepsError:
            self._record(started)  # the last of too many skipped steps is committed as well
            raise
        self._record(started)

    def _record(self, started: float) -> None:
        """Record the step that was just committed, and evaluate if it is due."""
        config, step = self.config, self.step
        # The rate of the committed step, also on a replica that has just joined.
        lr = config.lr * lr_factor(config, step.index - 1)
        line = step_line(step, self.world, lr, time.perf_counter() - started, config.tokens_per_microbatch)
        self.gpu_use.note(line, self.world.members)
        line |= {name: round(spent, 3) for name, spent in self.spent.items()}  # type: ignore[typeddict-item]
        self.spent.clear()
        if config.eval.every and step.index % config.eval.every == 0:
            with self._spending("evaluation_ms"):
                heldout = heldout_loss(self.engine, self.heldout, config.eval.batches)
            if math.isfinite(heldout):  # a line of JSON has no other numbers
                line["heldout_loss"] = heldout
        self.records.commit(line, step, config.samples == "exact")
        self._write_environment()
        self._settled = step.result

    def _environment(self) -> dict[str, Any]:
        return environment(self.step, self.world, self.optimizer, self.device)

    def _write_environment(self) -> None:
        """Write `environment.json`, once by each rank that writes records: a successor's host may differ."""
        if self._facts_written or not self.records.writing:
            return
        self._facts_written = True
        facts = self._environment() | {
            "data": self.stream.fingerprint(),
            "nondeterministic": self._nondeterministic,
            "update": {key: getattr(self.config, key) for key in OF_UPDATES},
        }
        note_environment(self.run_dir, self.records.first, facts)

    # The end of a run, and checkpoints.

    def _goes_on(self) -> bool:
        step, config = self.step, self.config
        enough = self.world.outside or len(self.world.replicas) >= config.min_replicas
        last = config.steps if self.replay is None else self.replay.until
        return step.index < last and not step.stop_agreed and enough

    def _checkpoint(self) -> None:
        step, every = self.step, self.config.checkpoint.every
        self.saver.found_equal(step.index, self.world.replicas)
        if self.saver.comes(step.index, lost=any(incident.gone_ranks for incident in step.incidents)):
            step.compare_optimizers()
            if self.world.replica in writing_replicas(self.world) and together(
                step, self.world, self.saver.due(step.index)
            ):
                with self._spending("checkpoint_ms"):
                    self._save()
        if every and step.index % every == 0:
            self.world.hooks.under_way("checkpoint")

    def _last_checkpoint(self) -> None:
        """Save the last state. It, too, counts only after a comparison of all replicas. No later step could be saved
        instead, so the save waits for room on a full disk."""
        world, step = self.world, self.step
        wanted = self.replay is None and (self.config.checkpoint.every or step.index < self.config.steps)
        save = partial(self._save, waits=True) if wanted else None
        save_confirmed(world, step, self.saver, save, self.records.lost)

    def _save(self, waits: bool = False) -> None:
        self.saver.save(self.step.index, self.tensors, self._facts(), waits=waits)

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.step.index,
            "position": self.step.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "model": asdict(self.shape),
            "config": self.config.model_dump(),
        }

    def _save_unconfirmed(self) -> None:
        """The world is lost and no agreement is possible: on each host, the first complete replica
        saves.

        All replicas hold the state of their last commit. No vote confirms that no bit has flipped since.
        """
        world, index = self.world, self.step.index
        world.stop_watching()
        world.board.in_step(world.rank, ENDED)
        if index == max(0, self.records.first - 1) or not self._is_first_here():
            return
        path = self.saver.save_unconfirmed(index, self.tensors, self._facts())
        told = (
            f"is saved in {path}; no vote has compared it; `recover train --resume {self.run_dir}` goes on from it"
            if path
            else "could not be saved"
        )
        rank_exit.log(told := f"the world is lost; the state after step {index} {told}")
        if world.shard == 0:
            print(f"recover: {told}", flush=True)

    def _is_first_here(self) -> bool:
        """Whether this is the first replica with all of its ranks on this host."""
        world, size = self.world, self.world.grid.replica_size
        here = [
            replica
            for replica in world.replicas
            if all(world.board.pid(rank) for rank in range(replica * size, (replica + 1) * size))
        ]
        return here[:1] == [world.replica]

    def _save_state_before_step(self) -> bool:
        """Save the state before the step in progress, on a thread of its own: parameters and optimizer do not change
        before the update. Returns False if an update was under way."""
        settled, index = self._settled, self.step.index
        if index in (0, self.saver.newest_on_disk()) or not self._is_first_here():
            return True
        try:
            snapshot, facts = self.tensors.snapshot(), self._facts()
            if self.step.result is not settled:
                return False
            path = self.saver.save_snapshot(index, snapshot, self.tensors, facts)
            told = f"is saved in {path}" if path else "could not be saved"
        except Exception as error:  # a failed save must not end training
            told = f"could not be saved ({error})"
        rank_exit.report(f"all hosts are asked to leave in step {index + 1}: the state before it {told}")
        return True

    def _save_states(self, error: StateDivergedError) -> None:
        """Save the states of replicas that differ, if no vote can decide which one is right."""
        if not self.step.index:
            return
        save_states(self.world, self.step.index, error, self.saver, self.tensors, lambda: (self._facts(), {}))

    def _compute_slot(self, slot: int) -> None:
        """Compute and record the loss of one microbatch of the next step; all ranks of the replica take part."""
        sample = self.step.state_dict()["samples"]["next"] + slot
        batch = self.stream[sample]
        facts = {"sample": sample, "loss": self.engine.loss(batch), "contents": f"{checksum(batch):x}"}
        if self.records.writing:
            FILES.replace(self.run_dir / SLOT, json.dumps(facts).encode())

    @contextmanager
    def _spending(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent[name] = self.spent.get(name, 0.0) + 1e3 * (time.perf_counter() - started)

    def _close(self) -> None:
        """Save the last checkpoint and finish the records. If the writer dies in here, its successor does all of this
        again."""
        if self.replay is not None and self.replay.slot is not None:
            self._compute_slot(self.replay.slot)
        self._last_checkpoint()
        self.records.finish_lines()
        if self.world.replica in writing_replicas(self.world):
            self.saver.finish()
            digest = parameters_digest(self.engine.parameters())  # all ranks of the replica take part
            if self.records.writing:
                self.sinks.close()
                facts: dict[str, Any] = {"gpu": self.gpu_use.card} if self.gpu_use.card else {}
                facts["environment"] = self._environment()
                self.records.write_summary(digest, facts)
            self.saver.finish_uploads()
