"""Run by every replica of torchft in a comparison: its own loop, wrapper and optimizer, with its README's timeouts.

Either its DistributedDataParallel, or its Manager.allreduce on one flat gradient: the wrapper does not survive a kill.
Runs in a virtual environment that has torchft. The argument is the job as JSON. Every step is one microbatch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from recover_lab.peers.events import Events

from recover.data import open_stream
from recover.train.models import Llama, LlamaConfig
from recover.train.pace import Pace

AFTER = 4  # steps with all replicas after one has rejoined
job = json.loads(sys.argv[1])
replica = job["replica"]
events = Events(Path(job["place"]), replica)
torch.set_num_threads(1)
torch.manual_seed(job["seed"])
net = Llama(LlamaConfig(**job["shape"]))
inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
stream = open_stream(job["data"], "bytes", job["seq_len"], 1, job["seed"])
address = job.get("address", "localhost")
store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
manager: Any = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=lambda state: (net.load_state_dict(state["net"]), inner.load_state_dict(state["inner"])),
    state_dict=lambda: {"net": net.state_dict(), "inner": inner.state_dict()},
    replica_id=f"replica_{replica}",
    timeout=timedelta(seconds=30),
    rank=0,
    world_size=1,
    store_addr=address,
    store_port=store.port,
)
reduce = manager.allreduce


def reduce_and_die(*args: Any, **kwargs: Any) -> Any:
    work = reduce(*args, **kwargs)
    if manager.current_step() + 1 == job["kill"] and replica == job["victim"]:
        time.sleep(job["in_flight"])
        if job.get("struck_from_outside"):
            events.note("waiting", step=job["kill"])
            time.sleep(600)
        events.note("failure", step=job["kill"])
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return work


manager.allreduce = reduce_and_die
wrapped = job["way"] == "DistributedDataParallel"
model: Any = torchft.DistributedDataParallel(manager, net) if wrapped else net
optimizer = torchft.Optimizer(manager, inner)
pace = Pace(job["pace"])
whole = 0  # steps with all replicas since one of them has rejoined


def through() -> bool:
    return whole == AFTER if job.get("returns") else manager.current_step() >= job["steps"]


# All begin together: torchft's lighthouse would let the first replicas go ahead.
(Path(job["place"]) / f"ready-{replica}").touch()
while len(list(Path(job["place"]).glob("ready-*"))) < job["replicas"]:
    time.sleep(0.02)
came = not job["kill"]  # this replica has rejoined itself, or no replica is to die
while not through():
    step = manager.current_step() + 1
    events.note("step-begin", step=step)
    batch = stream[(step - 1) * job["replicas"] + replica]
    optimizer.zero_grad()
    pace.wait()
    model(batch["tokens"], batch["targets"]).backward()
    if not wrapped:
        gradients: list[Any] = [parameter.grad for parameter in net.parameters()]
        flat = torch._utils._flatten_dense_tensors(gradients)
        manager.allreduce(flat).wait()
        for gradient, mean in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True
        ):
            gradient.copy_(mean)
    optimizer.step()
    if manager.current_step() == step:
        there = manager.num_participants()
        events.note("step-end", step=step, microbatches=there)
        came |= step >= job["kill"] and there < job["replicas"]
        whole += came and there == job["replicas"]
    else:
        events.note("discarded", step=step)
os._exit(0)  # without a shutdown of torchft's servers: they hold nothing to hand over
