"""The paper's primitives through a failure, on 5 replicas: a spare steps in, then there is none left."""

from __future__ import annotations

import json
import os

import torch

import recover
from recover.dropin import ProcessGroupULFM, ulfm_allreduce, ulfm_consensus
from recover.policy.roles import Role

world = recover.init()
group = ProcessGroupULFM(world)
roles = {0: Role.MAJOR, 1: Role.MAJOR, 2: Role.MINOR, 3: Role.MAJOR_SPARE, 4: Role.MINOR_SPARE}
group.set_roles(roles)
diary = open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", "w")  # noqa: SIM115


def note(name: str, work: object) -> None:
    facts = {
        "kind": name,
        "failures": work.has_failures(),
        "failed": list(work.get_failed_ranks()),
        "roles": {str(role): n for role, n in sorted(work.role_counts.items())},
        "contributions": work.contributions,
        "boundary": work.at_boundary,
        "epoch": group.world_epoch(),
        "mine": str(group.control.role),
    }
    diary.write(json.dumps(facts) + "\n")
    diary.flush()


def reduce(name: str) -> float:
    bucket = torch.full((1000,), 10.0**world.replica)
    work = ulfm_allreduce(bucket, group)
    work.wait()
    note(name, work)
    return bucket[0].item()


group.set_contributed(4 if roles[world.replica] in (Role.MAJOR, Role.MAJOR_SPARE) else 2)
assert reduce("clean") == 111.0  # spares are zeroed

world.hooks.step = 1
world.hooks("bucket")  # replica 1, a major, dies here
untouched = reduce("first death")
assert untouched == 10.0**world.replica  # detected before any data moved
assert reduce("after promotion") == 1101.0  # replica 3 stands in for 1

world.hooks.step = 2
world.hooks("bucket")  # replica 0, a major, dies here: no major-spare is left
work = ulfm_consensus(group)
work.wait()
note("second death", work)

group.set_quiesce(True)
bucket = torch.ones(1)
quiet = ulfm_allreduce(bucket, group)
quiet.wait()
assert not quiet.has_failures()
assert bucket.item() == 1.0  # a no-op
group.set_quiesce(False)
group.at_boundary = True
assert reduce("boundary") == 11100.0  # at a boundary the spares' gradients are kept
