"""The state for a joining replica: complete and bitwise equal, whatever state it had before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from recover.step.joining.parcel import OtherStateError, Parcel
from recover.step.joining.stripes import PIECE, SMALL_PIECE, TURNS, Stripes
from recover.world.carriers.worker import Work


class Holder:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Odd(torch.nn.Module):
    """A model with parameters of several types, a parameter that is not contiguous, and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.short = torch.nn.Parameter(torch.randn(3, 5).bfloat16())
        self.turned = torch.nn.Parameter(torch.randn(4, 6).t())
        self.single = torch.nn.Parameter(torch.randn(()))
        self.spin = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.randn(0, 2))
        self.register_buffer("seen", torch.tensor([seed > 0] * 5))
        self.register_buffer("count", torch.tensor(seed))


def trained(seed: int, steps: int) -> tuple[Odd, torch.optim.Optimizer, Any]:
    model = Odd(seed)
    optimizer = torch.optim.AdamW(
        [{"params": [model.short, model.turned]}, {"params": [model.single, model.spin], "lr": 0.3}]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (step + 1)
        optimizer.step()
        scheduler.step()
    if steps:  # the state of an optimizer that keeps more digits than the parameter
        optimizer.state[model.short]["exp_avg"] = torch.full((3, 5), 1 / 3, dtype=torch.float32)
        optimizer.state[model.short]["note"] = ["anything", (torch.arange(3), {0: torch.eye(2), "m": 2})]
    return model, optimizer, scheduler


def bits(value: Any) -> Any:
    """A nested value in a form that compares bits."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), value.stride(), bytes(flat.tolist()))
    if isinstance(value, dict):
        return type(value).__name__, {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(each) for each in value]
    return value


def pass_on(giver: Parcel, taker: Parcel, position: dict[str, Any]) -> dict[str, Any]:
    head, parts = giver.pack(position)
    for mine, theirs in zip(taker.open(head), parts, strict=True):
        mine.copy_(theirs)
    return taker.install()


@pytest.mark.guarantee(
    "Joining",
    "The handed-over state equals the sender's to the bit, and a receiver with another kind of state is "
    "refused with the differences.",
)
@pytest.mark.guarantee(
    "The trajectory",
    "Gradients and handed-over moments keep the strides of autograd, so fused kernels are right for "
    "`channels_last` and own DDP models.",
)
def test_parcel_delivers_state_to_the_bit() -> None:
    there, here = trained(1, 5), trained(0, 0)
    there[0].single.requires_grad_(False)
    ordered = OrderedDict(a=torch.arange(4), b={"deep": (torch.eye(2).double(), "x")})
    extra = {"average": Holder(dict(ordered)), "ordered": Holder({"all": ordered})}
    mine = {"average": Holder({}), "ordered": Holder({})}
    position = pass_on(Parcel(*there, extra), Parcel(*here, mine), {"index": 7, "next": torch.tensor(3)})
    assert bits(position) == bits({"index": 7, "next": torch.tensor(3)})
    assert bits(here[0].state_dict()) == bits(there[0].state_dict())
    assert bits(here[1].state_dict()) == bits(there[1].state_dict())
    assert here[2].state_dict() == there[2].state_dict()
    assert [p.requires_grad for p in here[0].parameters()] == [p.requires_grad for p in there[0].parameters()]
    for name in extra:
        assert bits(mine[name].state) == bits(extra[name].state)
    # Both go on alike: no tensor shares memory with the received bytes, and the scheduler drives this optimizer.
    for model, optimizer, scheduler in (there, here):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        del optimizer.state[model.short]["note"]
        optimizer.state[model.short]["exp_avg"] = optimizer.state[model.short]["exp_avg"].bfloat16()
        optimizer.step()
        scheduler.step()
    assert bits(here[0].state_dict()) == bits(there[0].state_dict())
    assert bits(here[1].state_dict()) == bits(there[1].state_dict())


@pytest.mark.guarantee(
    "Joining",
    "The handed-over state equals the sender's to the bit, and a receiver with another kind of state is "
    "refused with the differences.",
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda parts: parts[0].register_buffer("more", torch.ones(1)), "parameters and buffers"),
        (lambda parts: setattr(parts[0], "short", torch.nn.Parameter(torch.ones(3, 4))), "'short'"),
        (lambda parts: parts[1].param_groups.pop(), "in each group of the optimizer"),
        (lambda parts: parts.__setitem__(2, None), "kind of scheduler"),
        (lambda parts: parts[3].update(more=Holder({})), "names in extra="),
    ],
)
def test_parcel_of_another_kind_is_refused_with_the_differences(change: Any, said: str) -> None:
    head, _ = Parcel(*trained(1, 1), {}).pack({})
    parts: list[Any] = [*trained(0, 0), {}]
    change(parts)
    with pytest.raises(
        OtherStateError, match=r"this replica cannot join: .*start it with the script"
    ) as refused:
        Parcel(*parts).open(head)
    assert said in str(refused.value)


class Wires:
    """A group that keeps sent data until the other side takes them; `spoil` loses one exchange."""

    def __init__(self, index: int, peers: tuple[int, ...], mail: dict[tuple[int, int], list[Any]]) -> None:
        self.index, self.peers, self._mail = index, peers, mail
        self.spoil: int | None = None

    def exchange(self, out: dict[int, Any], into: dict[int, Any]) -> Work:
        if self.spoil is not None:
            self.spoil -= 1
            if self.spoil < 0:
                return Work.failed(RuntimeError("a death"))
        for peer, data in out.items():
            self._mail.setdefault((self.index, peer), []).append(np.array(data))
        for peer, data in into.items():
            data[...] = self._mail[peer, self.index].pop(0)
        work = Work(lambda: None)
        work.run()
        return work


@pytest.mark.guarantee(
    "Joining", "Stripes deliver every byte of the state once, and both sides learn of a lost piece."
)
@pytest.mark.parametrize("givers", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[0], [1], [8, 3, 0, 64, 5], [8 * 5000 + 3, 1, 8 * 3001]])
def test_stripes_deliver_every_byte_once_for_any_senders(
    givers: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes stripes of many pieces, and of none."""
    monkeypatch.setattr("recover.step.joining.stripes.PIECE", 1000)
    rng, peers = np.random.default_rng(0), tuple(range(10, 10 + givers + 2))
    parts = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    mail: dict[tuple[int, int], list[Any]] = {}
    ranks, takers = peers[:givers], peers[givers:]
    head = b"what it is made of" * 5
    for index in range(givers):
        stripes = Stripes(Wires(index, peers, mail), ranks, takers)  # type: ignore[arg-type]
        assert stripes.send_head(head)
        assert stripes.give(parts)
    words = sum(len(data) for (_, to), sent in mail.items() if to == givers for data in sent)
    assert words == -(-sum(sizes) // 8) + 1 + -(-len(head) // 8), "each byte travels once"
    for index in range(givers, len(peers)):
        stripes = Stripes(Wires(index, peers, mail), ranks, takers)  # type: ignore[arg-type]
        assert stripes.receive_head() == head
        received = [np.zeros_like(part) for part in parts]
        assert stripes.take(received)
        assert all((mine == theirs).all() for mine, theirs in zip(received, parts, strict=True))
    assert PIECE > 1000


@pytest.mark.parametrize("givers", [1, 3])
@pytest.mark.parametrize("megabytes", [0.1, 5, 33, 500, 20_000])
def test_small_state_is_filled_in_while_it_travels(givers: int, megabytes: float) -> None:
    """It travels in several pieces, none of them so small that it costs more to send, nor so large that it takes much
    memory."""
    stripes = Stripes(Wires(0, tuple(range(givers + 1)), {}), range(givers), [givers])  # type: ignore[arg-type]
    words = int(megabytes * 1e6) // 8
    for giver in range(givers):
        pieces = stripes._pieces([range(words * 8)], giver)
        sizes = [stop - start for start, stop in pieces]
        assert sum(sizes) == words * (giver + 1) // givers - words * giver // givers
        assert max(sizes) <= PIECE
        assert len(pieces) >= min(TURNS, sum(sizes) // SMALL_PIECE)
        assert all(size >= SMALL_PIECE for size in sizes[:-1])


@pytest.mark.guarantee(
    "Joining", "Stripes deliver every byte of the state once, and both sides learn of a lost piece."
)
def test_lost_stripe_piece_is_reported_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recover.step.joining.stripes.PIECE", 10)
    parts, mail = [np.arange(800, dtype=np.uint8)], dict[tuple[int, int], list[Any]]()
    for lost in range(10):
        giver, taker = Wires(0, (0, 1), mail), Wires(1, (0, 1), mail)
        mail.clear()
        giver.spoil = lost
        assert not Stripes(giver, [0], [1]).give(parts)  # type: ignore[arg-type]
        mail.clear()
        giver.spoil = None
        assert Stripes(giver, [0], [1]).give(parts)  # type: ignore[arg-type]
        taker.spoil = lost
        assert not Stripes(taker, [0], [1]).take([np.zeros(800, np.uint8)])  # type: ignore[arg-type]


class LateWires(Wires):
    """Wires that read sent data, and write received data, only when a caller waits for a work; in the order of the
    calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.posted: list[Work] = []

    def exchange(self, out: dict[int, Any], into: dict[int, Any]) -> Work:
        work = LateWork(self, lambda: Wires.exchange(self, out, into).wait())
        self.posted.append(work)
        return work


class LateWork(Work):
    def __init__(self, wires: LateWires, task: Any) -> None:
        super().__init__(task)
        self._wires = wires

    def wait(self, timeout: float | None = None) -> bool:
        while not self.done:
            self._wires.posted.pop(0).run()
        return super().wait(timeout)


@pytest.mark.guarantee(
    "Joining", "Stripes deliver every byte of the state once, and both sides learn of a lost piece."
)
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 9])
def test_stripe_buffers_are_not_touched_while_they_travel(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stripe of many pieces goes through two buffers; each buffer is filled again only after its piece has
    arrived."""
    for name in ("PIECE", "SMALL_PIECE"):
        monkeypatch.setattr(f"recover.step.joining.stripes.{name}", 10)
    part = np.random.default_rng(0).integers(0, 256, pieces * 80 - 3, np.uint8)
    mail: dict[tuple[int, int], list[Any]] = {}
    assert Stripes(LateWires(0, (0, 1), mail), [0], [1]).give([part])  # type: ignore[arg-type]
    received = np.zeros_like(part)
    assert Stripes(LateWires(1, (0, 1), mail), [0], [1]).take([received])  # type: ignore[arg-type]
    assert (received == part).all(), "a piece was overwritten by a later one"
