"""Run by every rank of the checkpoint-restart baseline, under torchrun: stock torch from end to end.

DistributedDataParallel, fully_shard on a 2-D mesh, or tensor and pipeline parallelism; gloo; asynchronous
torch.distributed.checkpoint. A death ends all processes, torchrun starts them again, and they go on from the last whole
checkpoint. The argument is the job as JSON. Little is imported, because a restart pays for it.
"""

from __future__ import annotations

import os
import time

started = time.time()  # before torch is imported

import json  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
from contextlib import AbstractContextManager, nullcontext  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from recover_lab.peers.events import Events  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict  # noqa: E402

from recover.data import open_stream  # noqa: E402
from recover.train.models import Llama, LlamaConfig  # noqa: E402
from recover.train.pace import Pace  # noqa: E402

job = json.loads(sys.argv[1])
place = Path(job["place"])
rank, ranks, shard = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), job["shard"]
size = shard * job["tp"] * job["pp"]
in_grid = size > shard
replica, local = divmod(rank, size)
accum = job["accum"]
struck = bool(os.environ.get("STRUCK"))  # this rank's host will lose its power
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if job.get("struck_from_outside"):  # the agents of several hosts count restarts differently
    again = int(any(place.glob("killed-*")))
events = Events(place, rank, again)
events.note("start", at=started)
events.note("imported")
torch.set_num_threads(1)
patience = timedelta(seconds=job.get("timeout", 1800))  # how long to wait for a rank that is silent
if in_grid:  # a world for every replica, and for each of its ranks a group across replicas
    from torch.distributed.rendezvous import rendezvous

    store = next(rendezvous("env://"))[0]
    inner = dist.PrefixStore(f"replica-{replica}", store)
    dist.init_process_group("gloo", store=inner, rank=local, world_size=size)
    cross: Any = dist.ProcessGroupGloo(dist.PrefixStore(f"across-{local}", store), replica, ranks // size)  # type: ignore[call-arg]
else:
    dist.init_process_group("gloo", timeout=patience)
saving_group = dist.new_group(
    timeout=patience, backend="gloo"
)  # checkpoints are written while the other one reduces gradients
events.note("joined")

torch.manual_seed(job["seed"])
model: Any = Llama(LlamaConfig(**job["shape"]))
if in_grid:
    from recover_lab.peers.grid_training import GridTraining

    training = GridTraining(model, job["tp"], job["pp"], cross)
    model = training.model
elif shard > 1:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks // shard, shard), mesh_dim_names=("replicate", "shard"))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
else:
    from torch.nn.parallel import DistributedDataParallel

    warnings.filterwarnings("ignore", message="`broadcast_buffers`")  # renamed in torch 2.13
    model = DistributedDataParallel(model, broadcast_buffers=False)  # the buffers never change
optimizer = torch.optim.AdamW(model.parameters(), lr=job["lrs"][0], betas=(0.9, 0.95), weight_decay=0.1)
stream = open_stream(job["data"], "bytes", job["seq_len"], shard, job["seed"])
pace = Pace(job["pace"])
BY_PARAMETER = StateDictOptions(flatten_optimizer_state_dict=True)  # a stage has a part of each group


step = 0  # the step in progress


def die() -> None:
    """Die inside the gradient reduction; only once, not again after the restart."""
    (place / f"killed-{step}").touch()
    if job.get("struck_from_outside"):
        events.note("waiting", step=step)
        time.sleep(600)
    events.note("failure", step=step)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def doomed() -> bool:
    if job.get("struck_from_outside"):  # torchrun decides which host has which rank
        mine = struck and os.environ["LOCAL_RANK"] == "0" and step in [when for when, _ in job["kills"]]
    else:
        mine = [step, rank] in job["kills"]
    return mine and not (place / f"killed-{step}").exists()


def reduce_and_die(state, bucket):  # torch refuses annotations that are text
    """DDP's own reduction of a bucket, during which the victim is killed."""
    reducing = allreduce_hook(state, bucket)
    if doomed():
        time.sleep(job["in_flight"])
        die()
    return reducing


def synchronised(last: bool) -> AbstractContextManager[Any]:
    """Gradients are reduced across replicas in the last microbatch only."""
    if shard == 1:
        return nullcontext() if last else model.no_sync()
    model.set_requires_all_reduce(last)
    return nullcontext()


def train_step() -> float:
    for group in optimizer.param_groups:
        group["lr"] = job["lrs"][step - 1]
    loss = round_of_microbatches() if in_grid else microbatches()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def round_of_microbatches() -> float:
    first = (step - 1) * job["global_batch"] + replica * accum
    batches = [stream[first + number] for number in range(accum)]
    pace.wait(accum)
    loss = training.accumulate(batches)
    pace.note(accum)

    def in_flight() -> None:
        if doomed():
            time.sleep(job["in_flight"])
            die()

    training.reduce(job["global_batch"], job["clip"], in_flight)
    return loss / job["global_batch"]


def microbatches() -> float:
    total = torch.zeros(1, dtype=torch.float64)
    for number in range(accum):
        last = number == accum - 1
        batch = stream[(step - 1) * job["global_batch"] + replica * accum + number]
        mine = (batch[name].chunk(shard)[local] for name in ("tokens", "targets"))
        pace.wait()
        with synchronised(last):
            loss = model(*mine) / accum
            loss.backward()
        if not last or accum == 1:
            pace.note()  # the last one also waits for all other ranks, which is not computing
        total += loss.detach()
    dist.all_reduce(total)
    torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip"])
    return float(total) / ranks


def whole_checkpoints() -> list[int]:
    """Steps whose checkpoints are on disk; the metadata is written last, and under another name at first."""
    return sorted(int(path.parent.name) for path in (place / "checkpoints").glob("*/.metadata"))


def state() -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=BY_PARAMETER)
    return {"model": weights, "optimizer": moments}


def save() -> Any:
    """Copies the state, and writes it in a thread while training goes on."""
    events.note("save-begin", step=step)
    saving: Any = dcp.async_save(
        state(), checkpoint_id=place / "checkpoints" / str(step), process_group=saving_group
    )
    events.note("save-end", step=step)
    now = step
    saving.add_done_callback(lambda done: events.note("saved", step=now))
    for old in whole_checkpoints()[:-1] if rank == 0 else ():
        shutil.rmtree(place / "checkpoints" / str(old), ignore_errors=True)
    return saving


def load(newest: int) -> None:
    found = state()
    dcp.load(found, checkpoint_id=place / "checkpoints" / str(newest), process_group=saving_group)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=BY_PARAMETER,
    )


if in_grid:
    pass  # GridTraining reduces by itself
elif shard > 1:
    # The hook is called when the first of several groups is reduced, and the others are not yet.
    model.blocks[-1].set_all_reduce_hook(lambda reduced: die() if doomed() else None)
elif struck or any(rank == victim for _, victim in job["kills"]):
    model.register_comm_hook(None, reduce_and_die)
if newest := max(whole_checkpoints(), default=0):
    events.note("load-begin")
    load(newest)
    events.note("load-end")
saving = None
for step in range(newest + 1, job["steps"] + 1):
    events.note("step-begin", step=step)
    loss = train_step()
    events.note("step-end", step=step, loss=loss)
    # In a grid one replica saves for all; otherwise the ranks share the writing.
    if step % job["save_every"] == 0 and step < job["steps"] and not (in_grid and replica):
        if saving is not None:
            saving.result()
        saving = save()
if saving is not None:
    saving.result()
dist.destroy_process_group()
