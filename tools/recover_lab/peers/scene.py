"""The scene of a comparison: one training job with its deaths, the same for every system.

Comparisons are *paced*: every microbatch takes at least a set time, most of it waiting, as if each rank had an
accelerator of its own. Ranks that share a few cores would get faster when one of them dies, which would flatter the
system that continues without it. Communication, failures, restarts and checkpoints are real.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

VOCAB = 256  # bytes
PACE = 0.15  # seconds of a microbatch: with 8 ranks on 2 cores, computing is a tenth of it
SHAPE_HIDDEN = 128
# A LLaMA so small (0.4M parameters) that computing takes little of the pace, even with several ranks to a core.
SHAPE = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": SHAPE_HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 320,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Scene:
    """`kills` are (step, replica): SIGKILL of one of its ranks inside the gradient reduction of that step."""

    replicas: int = 6
    shard: int = 1  # ranks that hold a shard each; more than one: HSDP
    tp: int = 1  # tensor parallel ranks and (pp) pipeline stages; more than one: 3D
    pp: int = 1
    accum: int = 4
    pace: float = PACE
    steps: int = 24
    kills: tuple[tuple[int, int], ...] = ()
    save_every: int = 0  # steps between the baseline's checkpoints
    hidden: int = SHAPE_HIDDEN  # width of the model, which sets the size of the state
    seq_len: int = 64
    seed: int = 0
    join: str = "pause"  # how a joining replica of ours gets the state

    @property
    def replica_size(self) -> int:
        return self.shard * self.tp * self.pp

    @property
    def ranks(self) -> int:
        return self.replicas * self.replica_size

    @property
    def global_batch(self) -> int:
        return self.replicas * self.accum

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.shard * self.seq_len

    def victims(self) -> list[int]:
        """Half of the replicas, in random order."""
        return random.Random(self.seed).sample(range(self.replicas), self.replicas // 2)

    def victim(self, step: int, replica: int) -> int:
        """The rank that is killed: any rank of the replica, the same for every system."""
        local = random.Random(f"{self.seed}/{step}/{replica}").randrange(self.replica_size)
        return replica * self.replica_size + local

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        derived = ("replica_size", "global_batch", "tokens_per_step")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def words(self, place: Path) -> list[str]:
        """The keys of `recover train`; the model is written to `place`."""
        model = place / "model.json"
        wide = {"hidden_size": self.hidden, "intermediate_size": self.hidden * 5 // 2}
        model.write_text(json.dumps(SHAPE | wide))
        return [
            f"model={model}",
            f"replicas={self.replicas}",
            f"join={self.join}",
            *(["parallel=hsdp", f"shard={self.shard}"] if self.shard > 1 else []),
            *(["parallel=3d", f"tp={self.tp}", f"pp={self.pp}"] if self.tp * self.pp > 1 else []),
            f"accum={self.accum}",
            f"microbatch_size={self.shard}",
            f"seq_len={self.seq_len}",
            f"pace={self.pace}",
            f"steps={self.steps}",
            f"seed={self.seed}",
            "device=cpu",
            "warmup_steps=4",
            "checkpoint.every=0",
            "log.tensorboard=false",
        ]

    def kill_words(self) -> list[str]:
        size = self.replica_size
        return [
            f"{step}:{replica}.{self.victim(step, replica) % size}:in-reduce" for step, replica in self.kills
        ]


def hidden_for(megabytes: float) -> int:
    """Width of a model whose state (parameters, and AdamW's two moments) has about this size, in MB."""
    parameters = megabytes * 1e6 / 12
    width = next(n for n in range(8, 1 << 16, 8) if 21 * n * n + 2 * VOCAB * n >= parameters)
    return max(16, width)


def inside(words: Sequence[str]) -> dict[str, int]:
    """How a replica is built, from `parallel=hsdp shard=2` or `parallel=3d tp=2 pp=2`, as fields of a scene."""
    given = dict(word.partition("=")[::2] for word in words)
    kinds: dict[str, dict[str, str]] = {"ddp": {}, "hsdp": {"shard": "2"}, "3d": {"tp": "2", "pp": "1"}}
    expected = kinds.get(given.pop("parallel", "ddp"))
    fields = {**(expected or {}), **given}
    if (
        expected is None
        or fields.keys() != expected.keys()
        or not all(n.isdigit() and int(n) for n in fields.values())
    ):
        raise ValueError(
            f"{' '.join(words)!r} is not understood; write parallel=ddp, parallel=hsdp shard=2 or parallel=3d tp=2 pp=2"
        )
    sizes = {name: int(number) for name, number in fields.items()}
    if sizes and max(sizes.values()) == 1:
        raise ValueError(f"{' '.join(words)!r}: replicas of one rank are parallel=ddp")
    return sizes
