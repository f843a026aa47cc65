"""The grid of a replica (tp, pp, ep) as numbers, and checks that a model fits it. Starts
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Schedule = Literal["1f1b", "gpipe", "interleaved"]
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "interleaved")
INTERLEAVED = 2  # stages per rank


class Decoder(Protocol):
    """The sizes of a decoder that the grid must divide."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def experts(self) -> int: ...


@dataclass(frozen=True)
class ModelCut:
    """The grid of a replica: `tp` ranks share every matrix, `pp` share the layers, `ep` share the experts
    and the rows of a microbatch."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1; 1 is to do without it")
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule={self.schedule!r} is not known; choose one of {', '.join(map(repr, SCHEDULES))}"
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.ep

    @property
    def stages_per_rank(self) -> int:
        return INTERLEAVED if self.schedule == "interleaved" and self.pp > 1 else 1

    @property
    def stages(self) -> int:
        return self.pp * self.stages_per_rank

    def layers_of(self, stage: int, layers: int) -> range:
        """Layers of a stage: as equal as possible; the first stages get the remainder."""
        each, left = divmod(layers, self.stages)
        start = stage * each + min(stage, left)
        return range(start, start + each + (stage < left))

    def check_ranks(self, replica_size: int) -> None:
        """Raises ValueError unless the grid fills a replica."""
        if self.ranks == replica_size:
            return
        if self.ep > 1 and self.ranks > replica_size and self.tp * self.pp <= replica_size:
            raise ValueError(
                f"ep={self.ep} with tp={self.tp} and pp={self.pp} takes {self.ranks} ranks, and a replica has "
                f"{replica_size}: expert groups would span replicas, and the loss of one would stop the others; "
                f"make replicas of {self.ranks} ranks, or lower ep"
            )
        raise ValueError(
            f"tp={self.tp} x pp={self.pp} x ep={self.ep} makes {self.ranks} ranks, and a replica has {replica_size}; "
            f"make replicas of {self.ranks} ranks"
        )

    def check_model(self, model: Decoder) -> None:
        """Raises ValueError unless the model can be cut over the grid."""
        for name in ("heads", "kv_heads", "hidden", "seq_len"):
            if getattr(model, name) % self.tp:
                raise ValueError(
                    f"{name} {getattr(model, name)} of the model is not a multiple of tp={self.tp}; choose another tp"
                )
        if model.layers < self.stages:
            raise ValueError(
                f"{model.layers} layer(s) cannot be cut into {self.stages} stages (pp={self.pp}, "
                f"schedule={self.schedule!r}); lower pp"
            )
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            raise ValueError(
                f"the model has {model.experts} experts, which cannot be shared among ep={self.ep} ranks; "
                "choose an ep that divides them, 1 for a model without"
            )
        if model.dropout and self.tp > 1:
            raise ValueError(
                f"dropout={model.dropout} is not supported with tp={self.tp}: tensor-parallel ranks draw each for "
                "themselves, which is wrong wherever they hold the same values; set it to 0, or use pp or ep"
            )

    def check_rows(self, rows: int) -> None:
        """Raises ValueError unless the rows of a microbatch can be shared among the ranks."""
        if rows % self.ep:
            raise ValueError(
                f"a microbatch of {rows} rows cannot be shared among ep={self.ep} ranks; choose a multiple of {self.ep}"
            )
