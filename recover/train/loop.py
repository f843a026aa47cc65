"""What every rank runs: the training loop, top to bottom. Started by `recover train`, never by hand.

Arguments: the configuration as JSON, and the checkpoint to go on from ("" for none).
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import recover
from recover.data import open_stream
from recover.faults import parse_faults
from recover.job.machine import processor
from recover.job.process import rank_on_host
from recover.policy import RestoreMode
from recover.step.errors import StateDivergedError
from recover.step.incident import Incident
from recover.step.inside import replica_of
from recover.train import checkpoint
from recover.train.checkpoint import CheckpointError, Found
from recover.train.config import Config
from recover.train.inside import Inside, make_inside
from recover.train.journal import Journal, settle
from recover.train.lines import incident_line, parameters_digest, step_line, summary, write_json
from recover.train.saver import Saver
from recover.train.shape import shape_of
from recover.train.sinks import Sinks
from recover.train.tensors import Tensors
from recover.world import ending
from recover.world.world import World

LOWEST_LR = 0.1  # of the highest: where the cosine ends


def main(config: Config, resume: Path | None) -> None:
    world = recover.init()
    assert world.job.run_dir is not None
    run_dir = Path(world.job.run_dir)
    torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    if config.reduction == "reproducible":
        ask_for_determinism()
    stream, heldout = (
        open_stream(
            config.data.path,
            config.tokenizer,
            config.seq_len,
            config.microbatch_size,
            config.seed,
            split,
            config.eval.fraction,
        )
        for split in ("train", "heldout")
    )
    shape = shape_of(config, stream.vocab)
    inside = make_inside(config, shape, world, device)
    model = inside.model
    optimizer = make_optimizer(config, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(config, done))
    tensors = Tensors(model, optimizer, world.grid.replica_size)
    saved = load_checkpoint(resume, tensors, inside, world) if resume else None
    step = recover.Step(
        world,
        model,
        optimizer,
        config.global_batch,
        policy=config.policy,
        samples=config.samples,
        reduction=config.reduction,
        clip=config.clip,
        scheduler=scheduler,
        seed=config.seed,
        bucket_mb=config.bucket_mb,
    )
    if saved:
        step.load_state_dict(saved["position"])
        scheduler.load_state_dict(saved["scheduler"])
        scheduler.base_lrs = [config.lr for _ in scheduler.base_lrs]  # another lr may have been asked for
        for group in optimizer.param_groups:
            group["lr"] = config.lr * lr_factor(config, step.index)

    resumed_at = step.index
    sinks = Sinks(config, run_dir)
    journal = Journal(run_dir, world, sinks)
    saver = Saver(
        run_dir,
        config.checkpoint.every,
        config.checkpoint.keep,
        world.replica,
        first=world.shard == 0,
        alone=world.grid.replica_size == 1,
    )
    kills = parse_faults(world.job.faults)

    def lost(ranks: Sequence[int], seconds: float) -> None:
        """Ranks died before the first step or after the last one: there is nothing to run again."""
        died = Incident(
            step=max(step.index, resumed_at + 1),
            epoch=world.epoch,
            dead_ranks=tuple(ranks),
            dead_replicas=world.grid.replicas_of(ranks),
            complete=True,
            boundary=False,
            restore=RestoreMode.SKIP,
            extra_microbatches=0,
            discarded_microbatches=0,
            noticed_at=time.time(),
            noticed_in="advance",
            detect_ms=0.0,
            repair_ms=seconds * 1e3,
        )
        journal.incidents.kept.append(incident_line(died, kills, exact=False))

    def save() -> None:
        facts = {
            "step": step.index,
            "position": step.state_dict(),
            "scheduler": scheduler.state_dict(),
            "model": asdict(shape),
            "config": config.model_dump(),
        }
        saver.save(step.index, tensors, facts)

    def together(decided: bool) -> bool:
        """What the first rank of this replica has decided, on all of its ranks."""
        vote = torch.tensor([float(decided and world.shard == 0)], dtype=torch.float64)
        return bool(replica_of(model).combine(vote))

    def prepare() -> None:
        if journal.writing:
            (run_dir / "config.yaml").write_text(config.to_yaml())
            for lines in (journal.steps, journal.incidents):
                lines.cut_after(resumed_at)
            saver.start()

    def save_last() -> None:
        """The last state, too, counts only when all have been compared after it was taken."""
        wanted = config.checkpoint.every or step.index < config.steps
        writer = None
        while writer != world.replicas[0]:  # again, if it was the writer that was lost over it
            writer = world.replicas[0]
            if wanted and world.replica == writer and together(saver.lacks(step.index)):
                save()
            differing, seconds = step.confirm()
            if differing:
                lost(differing, seconds)
            saver.found_equal(step.index + 1, world.replicas)

    def close() -> None:
        """The writer may die before its last line, or over it: then its successor does all of this again."""
        save_last()
        journal.write()
        if world.replica == world.replicas[0]:
            # The writer's replica: a digest takes all of its ranks.
            saver.finish()
            digest = parameters_digest(inside.parameters())
            if journal.writing:
                sinks.close()
                facts = summary(run_dir, world, digest, resumed_at)
                facts["environment"] = environment(step, world, optimizer, device)
                write_json(run_dir / "summary.json", facts)

    if len(world.members) < world.grid.ranks:  # somebody died before the first step
        dead = sorted(set(range(world.grid.ranks)) - set(world.members))
        lost(dead, world.last_census.seconds)
    settle(world, prepare, lost)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: stop_after_this_step(number, step))

    if config.reduction == "reproducible" and world.replica == world.replicas[0]:
        for name in operations_that_vary(inside, stream[0]):
            if journal.writing:
                print(
                    f"recover: {name} has no deterministic form on {device.type}: bits may vary", flush=True
                )

    stop = run_dir / "stop"
    while step.index < config.steps and not step.stop_agreed and len(world.replicas) >= config.min_replicas:
        started, lr = time.perf_counter(), optimizer.param_groups[0]["lr"]
        for _ in inside.work(step, stream):
            if stop.exists():
                step.request_stop()
        line = step_line(step, world, config, lr, time.perf_counter() - started)
        if config.eval.every and step.index % config.eval.every == 0:
            line["heldout_loss"] = evaluate(inside, heldout, config)
        exact = config.samples == "exact"
        ending.log(f"step {step.index}: loss {step.loss:.6f}, samples {spans(step.samples)}")
        journal.commit(line, [incident_line(incident, kills, exact) for incident in step.incidents])
        saver.found_equal(step.index, world.replicas)
        if saver.comes(step.index, lost=any(incident.dead_ranks for incident in step.incidents)):
            step.compare_optimizers()
            if world.replica == world.replicas[0] and together(saver.due(step.index)):
                save()
        if config.checkpoint.every and step.index % config.checkpoint.every == 0:
            world.hooks.under_way("checkpoint")
    settle(world, close, lost)


def ask_for_determinism() -> None:
    """Kernels that give the same bits each time; where torch has none it warns, and the run says so at the start."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)


def operations_that_vary(inside: Inside, batch: Any) -> list[str]:
    """What torch warns of in one microbatch, run for this alone."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside.rehearse(batch)
    return [str(w.message).partition(" ")[0] for w in caught if "deterministic" in str(w.message)]


def environment(
    step: recover.Step, world: World, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Any]:
    """All that the bits of a run depend on beside its configuration, for who compares two runs."""
    kind = {name: optimizer.defaults.get(name) for name in ("foreach", "fused")}
    return {
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "optimizer": f"{type(optimizer).__name__} {kind}",
        "replica_size": world.grid.replica_size,
        **step.numerics,
    }


def pick_device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = rank_on_host() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def make_optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)


def lr_factor(config: Config, done: int) -> float:
    """Of the highest learning rate, after so many committed steps: linear warm-up, then a cosine."""
    if done < config.warmup_steps:
        return (done + 1) / config.warmup_steps
    way = min(1.0, (done - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    return LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * way))


def evaluate(inside: Inside, heldout: Any, config: Config) -> float:
    """The mean loss on held-out data. Every replica computes it: none has to wait for another, or miss it."""
    batches = range(min(config.eval.batches, len(heldout)))
    return sum(inside.loss(heldout[index]) for index in batches) / len(batches)


def spans(numbers: Sequence[int]) -> str:
    """`0-3, 8`"""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends) or "none"


def load_checkpoint(path: Path, tensors: Tensors, inside: Inside, world: World) -> dict[str, Any]:
    """Into whatever this rank holds of model and optimizer. The parameters must be those that were saved."""
    found = Found(path, int(path.name.rpartition("-")[2]))
    facts = found.facts()
    tensors.load(path, facts["files"])
    digest = parameters_digest(
        inside.parameters()
    )  # all ranks of a replica take part; the first one has them all
    if world.shard == 0 and digest != facts["parameters_digest"]:
        raise CheckpointError(
            f"{path} is damaged: its parameters_digest is {facts['parameters_digest']}, and what was loaded from it "
            f"has {digest}; {found.mend()}"
        )
    return facts


def name_the_way_on(error: StateDivergedError) -> None:
    """The step knows that nobody can tell which parameters are right; we know which were."""
    run_dir = Path(recover.init().job.run_dir or "")
    found = checkpoint.latest(run_dir)
    error.add_note(
        f"The last good checkpoint is {found.path}; `recover train --resume {run_dir}` goes on from it."
        if found
        else "There is no checkpoint to go on from."
    )


def stop_after_this_step(number: int, step: recover.Step) -> None:
    """The first signal asks all replicas to stop together; the second one finds no handler, and kills."""
    step.request_stop()
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_DFL)


if __name__ == "__main__":
    try:
        main(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None)
    except StateDivergedError as error:
        name_the_way_on(error)
        raise
