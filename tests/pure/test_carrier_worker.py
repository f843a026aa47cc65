"""The communication thread: an operation that a device still finishes does not delay the next one."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import PATIENCE, wait_until

from recover.gradients.bucket_layout import BucketSlice
from recover.gradients.buckets import Bucket
from recover.gradients.norm import squared_norms
from recover.world.carriers.gloo import _Task
from recover.world.carriers.worker import Completion, Work, Worker


def test_worker_begins_the_next_operation_while_the_device_is_busy() -> None:
    worker, device, begun = Worker(), threading.Event(), list[int]()

    def task(number: int) -> Completion:
        begun.append(number)
        return Completion(device.wait)

    works = [worker.post(lambda number=number: task(number)) for number in range(3)]  # type: ignore[misc]
    for work in works:
        assert work.started.wait(5)
    while len(begun) < 3:
        pass
    assert begun == [0, 1, 2]
    assert not any(work.done for work in works)
    assert worker.busy
    device.set()
    worker.drain()
    assert all(work.ok for work in works)
    assert not worker.busy


@pytest.mark.guarantee(
    "Membership", "The vote waits for all sums queued on the device, not for the host's part alone."
)
def test_worker_drain_waits_for_the_device_after_a_later_failure() -> None:
    worker, device, drained = Worker(), threading.Event(), threading.Event()

    def fail() -> None:
        raise RuntimeError("refused")

    first = worker.post(lambda: Completion(device.wait))
    second = worker.post(fail)
    assert not second.wait(5)
    assert second.done

    def drain() -> None:
        worker.drain()
        drained.set()

    threading.Thread(target=drain, daemon=True).start()
    assert not drained.wait(0.05)
    assert not first.done
    device.set()
    assert drained.wait(5)
    assert first.ok


def test_device_error_is_kept_with_its_buffers() -> None:
    worker = Worker()

    def breaks() -> None:
        raise RuntimeError("the kernel was aborted")

    work: Work = worker.post(lambda: Completion(breaks))
    assert not work.wait(5)
    assert "aborted" in str(work.error)
    worker.drain()
    while not (failed := worker.take_failed()):
        pass
    assert failed == [work]


class _Passed:
    """An event of a device, and how often an operation was queued behind it."""

    def __init__(self) -> None:
        self.device, self.asked_behind = threading.Event(), 0

    def wait(self) -> None:
        self.asked_behind += 1


def test_bucket_is_queued_behind_a_device_sum_and_awaited_on_the_host() -> None:
    worker, passed, on_host = Worker(), _Passed(), threading.Event()
    gradient = torch.ones(4)
    on_device = Bucket(gradient)
    cross: Any = SimpleNamespace(
        all_reduce=lambda *_: worker.post(lambda: Completion(passed.device.wait, passed))
    )
    work = on_device.post(cross, 1, contribute=True)
    assert on_device.is_coming()  # although the device has not finished
    assert not work.done
    assert passed.asked_behind == 1
    passed.device.set()
    cross.all_reduce = lambda *_: worker.post(on_host.wait)
    near = Bucket(gradient)
    near.post(cross, 1, contribute=True)
    threading.Timer(0.05, on_host.set).start()
    assert near.is_coming()
    assert on_host.is_set()

    def fail() -> None:
        raise RuntimeError("a death")

    cross.all_reduce = lambda *_: worker.post(fail)
    lost = Bucket(gradient)
    lost.post(cross, 1, contribute=True)
    assert not lost.is_coming()
    assert squared_norms([near, lost]) == [0.0]
    cross.all_reduce = lambda *_: Work.failed(RuntimeError("refused"))
    lost.post(cross, 1, contribute=True)
    assert not lost.is_coming()


def test_gradients_are_views_of_the_result_of_this_step() -> None:
    place = BucketSlice(torch.nn.Parameter(torch.zeros(2)), 0, 0, torch.zeros(4)[1:3])
    first, second = torch.arange(4.0), torch.arange(4.0) + 10
    assert place.gradient_in(first, True).tolist() == [1, 2]
    first += 1
    assert place.gradient_in(first, True).tolist() == [2, 3]
    assert place.gradient_in(second, True).tolist() == [
        11,
        12,
    ]  # after a failed reduction the result lies in another buffer
    rounded = second.double()
    assert place.gradient_in(rounded, False).tolist() == [11, 12]
    assert place.gradient_in(rounded + 1, False).tolist() == [12, 13]


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A rank has its initial threads, sockets and files after any number of deaths, also without garbage "
    "collection of cycles.",
)
def test_failed_resources_are_freed_without_cycle_collection() -> None:
    """Such as a group of sockets and threads. Users who train large models often run the garbage collector rarely, or
    never."""
    held: list[weakref.ref[Any]] = []

    def fail() -> None:
        group = threading.Event()
        held.append(weakref.ref(group))
        try:
            raise ValueError("a connection was closed")
        except ValueError as error:
            raise RuntimeError("given up") from error

    gc.disable()
    try:
        worker = Worker()
        work = worker.post(fail)
        assert not work.wait()
        assert str(work.error) == "given up"
        worker.drain()
        del work
        assert wait_until(lambda: bool(worker.take_failed()))
        assert held[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_gloo_task_leaves_no_cycle_with_its_carrier(fails: bool) -> None:
    """The sockets and threads of a carrier are freed when it is dropped, also without garbage collection."""

    class Carrier:
        def __init__(self) -> None:
            self.task = _Task("test", lambda: self.introduce())

        def introduce(self) -> None:
            if fails:
                raise ValueError("a peer is gone")

    gc.collect()
    gc.disable()
    try:
        carrier = Carrier()
        assert carrier.task.wait(PATIENCE)
        assert (carrier.task.error is not None) == fails
        dropped = weakref.ref(carrier)
        del carrier
        assert dropped() is None
    finally:
        gc.enable()
