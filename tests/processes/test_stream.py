"""`recover.stream`: microbatch i is the same wherever and whenever it is read, and no two draws meet."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import wait_until
from torch.utils.data import DataLoader, Dataset, IterableDataset

import recover
from recover.data.indexed import IterableStream, MapStream
from recover.data.sending import SMALL
from recover.step.in_flight import check_stream
from recover.step.samples import ExactSamples, PartitionedSamples


class Noisy(Dataset):
    """Item i, and what it draws from every generator while it is read."""

    def __init__(self, items: int = 37) -> None:
        self._items = items

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self._items:
            raise IndexError(index)
        return {"item": index, "drawn": torch.rand(2), "more": [random.random(), np.random.rand()]}


def noisy_items() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        yield {"item": number, "drawn": torch.rand(2), "more": [random.random(), np.random.rand()]}
        number += 1


MAKERS: dict[str, Callable[..., Any]] = {
    "map": lambda **given: recover.stream(Noisy(), batch_size=4, shuffle=True, seed=3, **given),
    "iterable": lambda **given: recover.stream(noisy_items(), batch_size=4, seed=3, **given),
}


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [each for key in sorted(value) for each in flat(value[key])]
    return (
        value.tolist() if isinstance(value, torch.Tensor) else [each for one in value for each in flat(one)]
    )


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


@pytest.mark.guarantee(
    "User code",
    "A microbatch of `recover.stream` depends on its seed and index only, and no generator of the user is "
    "touched.",
)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("workers", [0, 1])
def test_stream_microbatch_depends_on_seed_and_index_only(kind: str, workers: int) -> None:
    """A function of (seed, i) alone: in any order, read ahead or not, after other draws of the user's."""
    expected = [flat(MAKERS[kind]()[index]) for index in range(12)]
    stream = MAKERS[kind](workers=workers)
    for seed, order in ((1, range(12)), (2, [7, 3, 3, 11, 0]), (3, [10, 2])):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        before = generators()
        stream.expect(list(order)[::2], range(12))  # the others are not announced
        for index in order:
            assert flat(stream[index]) == expected[index]
        assert generators() == before
    assert flat(MAKERS[kind]()[5]) == expected[5]
    other_seed = recover.stream(Noisy(), batch_size=4, shuffle=True, seed=4)
    assert flat(other_seed[0]) != expected[0]


@pytest.mark.guarantee(
    "User code",
    "A microbatch of `recover.stream` depends on its seed and index only, and no generator of the user is "
    "touched.",
)
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_stream_pass_has_each_item_at_most_once_and_cuts_like_dataloader(
    items: int, batch_size: int, seed: int, shuffle: bool
) -> None:
    if items < batch_size:
        with pytest.raises(
            ValueError, match=f"{items} items, fewer than one microbatch of batch_size={batch_size}"
        ):
            recover.stream(range(items), batch_size=batch_size)
        return
    stream = recover.stream(range(items), batch_size=batch_size, shuffle=shuffle, seed=seed, epochs=2)
    assert isinstance(stream, MapStream)
    loader = DataLoader(range(items), batch_size=batch_size, drop_last=True)  # type: ignore[arg-type]
    assert len(stream) == len(loader)
    for number in range(2):
        batches = [stream[number * len(stream) + i].tolist() for i in range(len(stream))]
        used = [item for batch in batches for item in batch]
        assert len(set(used)) == len(used) == len(stream) * batch_size
        assert set(used) <= set(range(items))
        if not shuffle:
            assert batches == [batch.tolist() for batch in loader]
    with pytest.raises(IndexError, match=r"2 epoch\(s\) of \d+ microbatches are all"):
        stream[2 * len(stream)]


def test_stream_uses_batched_reads_and_the_users_collate() -> None:
    class Rows:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"row {index}" for index in indices]

    stream = recover.stream(Rows(), batch_size=3, collate_fn=" + ".join)
    assert [stream[i] for i in (0, 2, 3)] == [
        "row 0 + row 1 + row 2",
        "row 6 + row 7 + row 8",
        "row 0 + row 1 + row 2",
    ]


@pytest.mark.guarantee(
    "User code",
    "A stream prefetches what is read next, survives a worker's death, and its workers never outlive their "
    "rank.",
)
def test_stream_prefetches_announced_microbatches() -> None:
    """Slow items that were announced are read by the workers, not by the process that asks for them."""

    class Slow(Noisy):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.05)
            return os.getpid()

    stream = recover.stream(Slow(), workers=2)
    stream.expect(range(6), range(6))
    assert {int(stream[index]) for index in range(6)} - {os.getpid()} == {
        worker.process.pid for worker in stream._readers._workers
    }
    assert int(stream[9]) == os.getpid()  # was not announced


@pytest.mark.guarantee(
    "User code",
    "A stream prefetches what is read next, survives a worker's death, and its workers never outlive their "
    "rank.",
)
def test_stream_worker_death_costs_only_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    class Deadly(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 2 and os.getpid() != rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return index

    rank = os.getpid()
    stream = recover.stream(Deadly(), workers=2)
    for first in (0, 6, 12):
        stream.expect(range(first, first + 12), range(12))
        assert [int(stream[index]) for index in range(first, first + 6)] == list(range(first, first + 6))
    assert "a process that read data has ended (signal 9" in capfd.readouterr().err
    assert len(stream._readers._workers) == 2


def test_stream_worker_exception_is_raised_where_the_microbatch_is_read() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise KeyError("this sample cannot be read")
            return lambda: None if index == 3 else index  # an item that cannot be sent between processes

    stream = recover.stream(Broken(), workers=1, collate_fn=lambda items: items[0])
    stream.expect(range(4), range(4))
    with pytest.raises(KeyError, match="this sample cannot be read"):
        stream[1]
    with pytest.raises(Exception, match="microbatch 3 ahead"):
        stream[3]


@pytest.mark.guarantee(
    "User code", "Tensors arrive unchanged from a stream worker, small ones without an open file."
)
def test_stream_worker_tensors_arrive_unchanged_without_open_files() -> None:
    kinds = (
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    )

    def make(index: int) -> dict[str, Any]:
        rows = torch.arange(60).reshape(6, 10) + index
        return {
            "kinds": [(rows % 3).to(kind) for kind in kinds],
            "shared": (rows, rows[:, 1:], rows.t()[2], rows[1, 4]),
            "empty": torch.empty(0, 3),
            "conjugate": [(rows + 2j * rows).conj(), torch.full((SMALL,), 1j).conj()],
            "large": torch.full((SMALL,), index),
            "trained": torch.nn.Parameter(torch.full((3,), float(index))),
        }

    stream = recover.stream(range(200), workers=1, collate_fn=lambda items: make(items[0]))
    stream.expect(range(8), range(8))
    for index in range(8):
        got, made = stream[index], make(index)
        for name in made:
            torch.testing.assert_close(got[name], made[name], rtol=0, atol=0)
        assert isinstance(got["trained"], torch.nn.Parameter)
        assert got["large"].is_shared()
        got["shared"][0].fill_(-1)
        assert all((part == -1).all() for part in got["shared"]), "views of one tensor are so no longer"
    small = recover.stream(range(200), batch_size=4, workers=1)
    small.expect(range(50), range(50))
    held = [small[index] for index in range(50)]
    assert not any(batch.is_shared() for batch in held), "a file for each"
    assert [batch.tolist() for batch in held] == [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(50)]


@pytest.mark.guarantee(
    "User code",
    "A stream prefetches what is read next, survives a worker's death, and its workers never outlive their "
    "rank.",
)
def test_stream_worker_never_outlives_its_rank(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time, recover

            class Slow(list):
                def __getitem__(self, index):
                    time.sleep(3600)

            stream = recover.stream(Slow(range(9)), workers=2)
            stream.expect(range(4), range(4))
            print(*(worker.process.pid for worker in stream._readers._workers), flush=True)
            sys.stdin.read()
            """
        )
    )
    rank = subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert rank.stdout
    assert rank.stdin
    workers = [Path("/proc", pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
    assert all(path.exists() for path in workers)
    rank.kill()
    rank.wait()
    rank.stdin.close(), rank.stdout.close()
    gone = wait_until(lambda: not any(path.exists() for path in workers))
    for path in workers:
        if path.exists():
            os.kill(int(path.name), signal.SIGKILL)
    assert gone


@pytest.mark.guarantee(
    "User code",
    "A stream of an iterable rewinds one window only, and an object that is no stream is refused with the "
    "remedy.",
)
def test_stream_of_an_iterable_rewinds_one_window_only() -> None:
    stream = recover.stream(iter(range(100)), batch_size=2, window=4)
    assert stream[9].tolist() == [18, 19]
    assert stream[6].tolist() == [12, 13]
    with pytest.raises(
        IndexError, match="microbatch 5 of an iterable has been left behind: 10 were read and window=4"
    ):
        stream[5]
    with pytest.raises(
        ValueError, match=r"a step has 5 microbatches, and window=4: .* give recover.stream window=5"
    ):
        stream.expect([], range(10, 15))
    with pytest.raises(IndexError, match="there is no microbatch 50: the iterable has ended after 100 items"):
        stream[50]


@pytest.mark.guarantee(
    "User code", "A stream of an iterable warns once, when it is resumed, which items are read again."
)
@pytest.mark.parametrize("workers", [0, 1])
def test_stream_of_an_iterable_warns_once_when_it_is_resumed(workers: int) -> None:
    fresh, resumed = (recover.stream(iter(range(100)), batch_size=2, workers=workers) for _ in range(2))
    with pytest.warns(UserWarning, match="goes on at microbatch 20, .* 40 items are read and passed over"):
        resumed.expect(range(20, 24), range(20, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.expect(range(20, 28), range(20, 24))
        fresh.expect(range(4), range(4))
        fresh.expect(range(4, 8), range(4, 8))
    assert resumed[20].tolist() == [40, 41]


@pytest.mark.guarantee(
    "User code",
    "A stream of an iterable rewinds one window only, and an object that is no stream is refused with the "
    "remedy.",
)
def test_stream_worker_one_step_ahead_still_holds_skipped_microbatches() -> None:
    stream = recover.stream(iter(range(100)), window=8, workers=1)
    stream.expect([*range(4, 8), *range(12, 16)], range(8))
    assert [int(stream[index]) for index in range(4, 8)] == [4, 5, 6, 7]
    stream.expect([*range(4), *range(8, 16)], range(8))  # the first four were those of a lost replica
    assert [int(stream[index]) for index in range(4)] == [0, 1, 2, 3]


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10**9))


@pytest.mark.guarantee(
    "User code",
    "A stream of an iterable rewinds one window only, and an object that is no stream is refused with the "
    "remedy.",
)
def test_object_that_is_no_stream_is_refused_with_the_remedy() -> None:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, collate_fn=lambda items: items)
    mend = r"write recover.stream\(loader.dataset, batch_size=4, shuffle=True, seed=0, workers=2, collate_fn="
    with pytest.raises(TypeError, match=mend):
        check_stream(loader)
    with pytest.raises(TypeError, match=mend):
        recover.stream(loader)
    with pytest.raises(TypeError, match=r"write recover.stream\(loader.dataset, batch_size=1\)$"):
        check_stream(DataLoader(Noisy()))
    for no_stream in (Endless(), noisy_items(), iter([1]), {1, 2}, 7):
        with pytest.raises(
            TypeError, match=r"cannot be asked for microbatch i; make one of it: recover.stream\("
        ):
            check_stream(no_stream)
    for stream in ([1, 2], torch.arange(4), Noisy(), recover.stream(Noisy()), recover.stream(Endless())):
        check_stream(stream)
    assert isinstance(recover.stream(Endless()), IterableStream)
    for wrong in (7, {"train": Noisy()}, "text"):
        with pytest.raises(TypeError, match=r"one split: dataset\['train'\]"):
            recover.stream(wrong)
    for given_, text in (
        ({"shuffle": True}, "shuffle an iterable itself"),
        ({"epochs": 2}, "an iterable ends where it ends"),
        ({"workers": 2}, "by one process at most"),
        ({"window": 0}, "window=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            recover.stream(Endless(), **given_)
    for given_, text in (
        ({"window": 5}, "window=5 is for what is read in order"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"workers": -1}, "workers=-1 must be at least 0"),
    ):
        with pytest.raises(ValueError, match=text):
            recover.stream(Noisy(), **given_)
    for given_, text in (
        ({"batch_size": "4"}, "batch_size='4' must be a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number"),
        ({"workers": 1.5}, "workers=1.5 must be a whole number"),
        ({"epochs": True}, "epochs=True must be a whole number"),
        ({"collate_fn": 3}, "collate_fn=3 must be a function"),
    ):
        with pytest.raises(TypeError, match=text):
            recover.stream(Noisy(), **given_)
    with pytest.raises(IndexError, match="numbered from 0"):
        recover.stream(Noisy())[-1]
    with pytest.raises(TypeError, match="one at a time, by its number"):
        recover.stream(Noisy())[0:2]
    assert recover.stream(Noisy(), batch_size=np.int64(4))[np.int64(0)] is not None


@pytest.mark.guarantee(
    "User code",
    "A stream prefetches what is read next, survives a worker's death, and its workers never outlive their "
    "rank.",
)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stream_announces_what_is_read_next(data: st.DataObject) -> None:
    """In every step, and in the next one while the layout stays: in both modes, also after `put_back` or a resume."""
    replicas, accum = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    replica = data.draw(st.integers(0, replicas - 1))
    slots = list(range(replica * accum, (replica + 1) * accum))
    modes = [ExactSamples(replicas * accum), PartitionedSamples(replica, replicas)]
    if data.draw(st.booleans()):
        modes[1].load_state_dict({"used": [data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))]})
    for samples in modes:
        expected_next: list[int] = []
        for step in range(1, 4):
            coming, kept = samples.coming(slots)
            if expected_next:
                assert coming[:accum] == expected_next
            asked = [samples.index(step, slot) for slot in slots]
            if data.draw(st.booleans()):
                samples.put_back()
                assert [samples.index(step, slot) for slot in slots] == asked
            assert asked == coming[:accum]
            assert set(asked) <= set(kept)
            expected_next = coming[accum:]
            # The other replicas used samples of their own partitions.
            others = (
                []
                if samples is modes[0]
                else [s for r in range(replicas) if r != replica for s in _draw(modes[1], r, accum)]
            )
            samples.committed([*asked, *others], contributed=True)


def _draw(samples: PartitionedSamples, replica: int, count: int) -> list[int]:
    """The draws of another replica of the same run in the same step."""
    other = PartitionedSamples(replica, len(samples.state_dict()["used"][-1]))
    other.load_state_dict(samples.state_dict())
    return [other.index(0, slot) for slot in range(count)]
