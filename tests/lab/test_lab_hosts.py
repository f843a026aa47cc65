"""A lab's hosts are real to the software on them, can be struck like real ones, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from patience import PATIENCE, LeavesNothing, wait_until
from recover_lab.lab import namespaces
from recover_lab.lab.hosts import Host, Lab

PORT = 5000
SILENCE = 0.3  # seconds without a message: a message that is not lost arrives in well under a millisecond
T = TypeVar("T")
pytestmark = pytest.mark.usefixtures("a_lab_can_be_made_here")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        yield lab


def run(host: Host, program: str, *args: str) -> Any:
    """The output of a Python program on this host, read as JSON."""
    process = host.start([sys.executable, "-c", program, *args], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    return json.loads(output)


def at(host: Host, action: Callable[[], T]) -> T:
    """Run an action in the host's network namespace: a socket made there stays there, though this process has it."""
    pidfd = os.pidfd_open(host.init)
    try:
        return namespaces.in_those_of(pidfd, namespaces.NET, action)
    finally:
        os.close(pidfd)


def listener(host: Host) -> socket.socket:
    return at(host, lambda: socket.create_server((host.address, PORT)))


def connected(client: Host, server: Host) -> socket.socket:
    return at(client, lambda: socket.create_connection((server.address, PORT), timeout=PATIENCE))


def pair(client: Host, server: Host) -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection."""
    with listener(server) as door:
        here = connected(client, server)
        there, _ = door.accept()
    there.settimeout(PATIENCE)
    return here, there


def mailbox(host: Host) -> socket.socket:
    def made() -> socket.socket:
        box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        box.bind((host.address, PORT))
        box.setblocking(False)
        return box

    return at(host, made)


def arrived(box: socket.socket, letters: set[bytes], within: float) -> int:
    """How many of these letters arrive at the socket `box` within so many seconds; returns early if all are there."""
    missing, deadline = set(letters), time.monotonic() + within
    while missing and time.monotonic() < deadline:
        try:
            missing.discard(box.recv(100))
        except BlockingIOError:
            time.sleep(0.01)
    return len(letters) - len(missing)


def posted(sender: socket.socket, receiver: socket.socket, number: int, within: float = PATIENCE) -> int:
    """Send so many letters. Returns how many arrive."""
    letters = {os.urandom(16) for _ in range(number)}
    for letter in letters:
        sender.sendto(letter, receiver.getsockname())
    return arrived(receiver, letters, within)


def outlasting(sender: socket.socket, receiver: socket.socket, number: int) -> int:
    """Send so many letters. Returns how many arrive before a last one, which is sent until it arrives."""
    receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE: the box must hold them all
    for _ in range(number):
        sender.sendto(b"letter", receiver.getsockname())
    seen, deadline = 0, time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if receiver.recv(100) == b"end":
                return seen
            seen += 1
        except BlockingIOError:
            sender.sendto(b"end", receiver.getsockname())
            time.sleep(0.05)
    raise TimeoutError("nothing arrives")


IDENTITY = """
import json, os, socket, sys
import recover_lab.lab.hosts as ours
name, place, *_ = sys.argv[1:]
door = socket.create_server(("127.0.0.1", 0))
socket.create_connection(door.getsockname()).close()
for directory in ("/tmp", "/dev/shm"):
    assert set(os.listdir(directory)) <= {part for path in sys.argv[2:] for part in path.split("/")}
    open(f"{directory}/{name}-was-here", "w").close()
open(f"{place}/{name}", "w").close()
print(json.dumps({
    "name": socket.gethostname(),
    "addresses": [socket.gethostbyname(f"h{number}") for number in (1, 2, 3)],
    "interfaces": sorted(os.listdir("/sys/class/net")),
    "init": b"first_process" in open("/proc/1/cmdline", "rb").read(),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    "code": ours.__file__, "directory": os.getcwd(), "pid": os.getpid(),
}))
"""


@pytest.mark.guarantee(
    "Emulated hosts",
    "Each emulated host has its own name, address, processes and files, and knows the others.",
)
def test_lab_hosts_have_their_own_name_address_processes_and_files(lab: Lab, tmp_path: Path) -> None:
    for host in lab:
        seen = run(host, IDENTITY, host.name, str(tmp_path), *lab.shared)
        assert seen["name"] == host.name
        assert seen["addresses"] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        assert seen["interfaces"] == ["eth0", "lo"]
        assert seen["init"]
        assert seen["processes"] == 2, "more than its init and the program itself"
        assert seen["code"] == sys.modules["recover_lab.lab.hosts"].__file__
        assert seen["directory"] == os.getcwd()
    assert {path.name for path in tmp_path.iterdir()} == {"h1", "h2", "h3"}, "what is shared, all write to"
    assert not [
        place
        for place in ("/tmp", "/dev/shm")
        for host in lab
        if os.path.exists(f"{place}/{host.name}-was-here")
    ]
    for client in lab:
        for server in lab:
            here, there = pair(client, server)
            with here, there:
                assert there.getpeername()[0] == client.address


@pytest.mark.guarantee(
    "Emulated hosts",
    "Each emulated host has its own name, address, processes and files, and knows the others.",
)
def test_lab_process_is_an_ordinary_child_with_pipes_and_signals(lab: Lab) -> None:
    host = lab["h2"]
    told = host.start(["sh", "-c", "cat; exit 7"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert told.communicate("words", timeout=PATIENCE)[0] == "words"
    assert told.returncode == 7
    sleeper = host.start(["sleep", "1000"])
    assert wait_until(lambda: host.processes() == {sleeper.pid: "sleep 1000"})
    assert lab["h1"].processes() == {}
    sleeper.terminate()
    assert sleeper.wait(PATIENCE) == -signal.SIGTERM
    assert host.processes() == {}
    with pytest.raises(FileNotFoundError):
        host.start(["no-such-program"])


# Connects to every peer from processes of several kinds, none of which ends by itself or at SIGTERM.
CROWD = """
import os, signal, socket, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for kind in ("child", "session", "orphan"):
    if os.fork() == 0:
        if kind != "child": os.setsid()
        if kind == "orphan" and os.fork(): os._exit(0)
        break
lines = [socket.create_connection((peer, 5000)) for peer in sys.argv[1:]]
for line in lines: line.sendall(b"hello")
time.sleep(1000)
"""


@pytest.mark.guarantee(
    "Emulated hosts", "A power cut ends everything on a host at once, and its peers hear silence."
)
def test_lab_power_cut_ends_all_processes_at_once_without_notice_to_peers(lab: Lab) -> None:
    victim, *peers = lab
    doors = [listener(peer) for peer in peers]
    crowd = victim.start([sys.executable, "-c", CROWD, *(peer.address for peer in peers)])
    lines = [door.accept()[0] for door in doors for _ in range(4)]
    for line in lines:
        line.settimeout(PATIENCE)
        assert line.recv(5) == b"hello"
    living = victim.processes()
    assert len(living) == 4

    victim.power_cut()
    assert crowd.returncode == -signal.SIGKILL
    assert not victim.up
    assert victim.processes() == {}
    assert not [pid for pid in living if os.path.exists(f"/proc/{pid}")]
    time.sleep(SILENCE)
    for line in lines:
        line.setblocking(False)
        with pytest.raises(BlockingIOError):  # neither an end nor an error: the line is just silent
            line.recv(1)
        line.send(b"are you there?")
    for refused in (victim.cut, lambda: victim.start(["true"])):
        with pytest.raises(RuntimeError, match="h1 has no power"):
            refused()
    victim.power_cut()  # there is nothing more to cut

    victim.power_on()
    with pytest.raises(RuntimeError, match="h1 has power already"):
        victim.power_on()
    assert run(victim, "import os; print(os.listdir('/dev/shm'))") == []
    assert len(victim.processes()) == 0
    with listener(victim) as door, connected(peers[0], victim) as line:
        assert line.getpeername() == door.getsockname()
    for line in [*lines, *doors]:
        line.close()


@pytest.mark.guarantee(
    "Emulated hosts", "Cables are cut in the requested direction, heal, and are as bad as configured."
)
def test_lab_cut_drops_packets_in_its_direction_only_until_healed(lab: Lab) -> None:
    struck, peer, bystander = lab
    boxes = {host.name: mailbox(host) for host in lab}
    process = struck.start(["sleep", "1000"])

    # After some seconds a host asks again for another one's address, and a host that cannot answer is sent nothing.
    for host in lab:
        known = host.start(
            ["sh", "-c", "echo 3600000 > /proc/sys/net/ipv4/neigh/eth0/base_reachable_time_ms"]
        )
        assert known.wait(PATIENCE) == 0

    def heard(sender: Host, receiver: Host, within: float = PATIENCE) -> bool:
        return posted(boxes[sender.name], boxes[receiver.name], 3, within) == 3

    def ways(hears: bool, is_heard: bool) -> None:
        assert heard(peer, struck, PATIENCE if hears else SILENCE) == hears
        assert heard(struck, peer, PATIENCE if is_heard else SILENCE) == is_heard

    here, there = pair(struck, peer)
    ways(hears=True, is_heard=True)
    struck.cut("out")
    ways(hears=True, is_heard=False)
    struck.cut("in")
    ways(hears=False, is_heard=False)
    here.sendall(b"sent into the dark")
    assert heard(peer, bystander)
    struck.heal()
    assert there.recv(100) == b"sent into the dark", "TCP sends it again"
    ways(hears=True, is_heard=True)
    struck.cut("in")
    ways(hears=False, is_heard=True)
    struck.heal()
    struck.cut()
    ways(hears=False, is_heard=False)
    struck.heal()
    ways(hears=True, is_heard=True)
    assert process.poll() is None, "a cut cable ends no process"
    with pytest.raises(ValueError, match="direction 'up'"):
        struck.cut("up")  # type: ignore[arg-type]
    for line in [here, there, *boxes.values()]:
        line.close()


@pytest.mark.guarantee(
    "Emulated hosts", "Cables are cut in the requested direction, heal, and are as bad as configured."
)
def test_lab_bad_cable_delays_drops_and_limits_as_configured(lab: Lab) -> None:
    struck, peer, _ = lab
    here, there = pair(struck, peer)
    for line in (here, there):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round_trip() -> float:
        start = time.monotonic()
        here.sendall(b"?")
        there.recv(1)
        there.sendall(b"!")
        here.recv(1)
        return time.monotonic() - start

    struck.shape(delay_ms=60)
    assert min(round_trip() for _ in range(4)) >= 0.12
    struck.shape(delay_ms=300, direction="in")
    struck.shape(direction="out")
    # Late on one way, not on both: on a busy machine a round may take longer, but not each.
    assert wait_until(lambda: 0.3 <= round_trip() < 0.6)

    struck.shape(rate_mbit=8)
    load = bytes(500_000)
    sending = threading.Thread(target=here.sendall, args=(load,))
    start = time.monotonic()
    sending.start()
    received = 0
    while received < len(load):
        received += len(there.recv(100_000))
    sending.join()
    assert time.monotonic() - start >= 0.5, "half a megabyte at a megabyte a second"

    struck.shape(loss=0.3, direction="out")
    struck.shape(direction="in")
    out, back = mailbox(struck), mailbox(peer)
    assert 65 <= 400 - outlasting(out, back, 400) <= 175, "120 of 400, give or take six standard deviations"
    assert posted(back, out, 30) == 30, "the other way is sound"
    for wrong in ({"loss": 30}, {"delay_ms": -1}, {"rate_mbit": -1}):
        with pytest.raises(ValueError, match="loss is a share from 0 to 1"):
            struck.shape(**wrong)
    for line in (here, there, out, back):
        line.close()


@pytest.mark.guarantee(
    "Emulated hosts",
    "Labs are isolated, have no name on the machine and leave nothing behind, also after `kill -9` of their "
    "owner.",
)
def test_labs_are_isolated_from_each_other_and_from_their_process() -> None:
    with LeavesNothing(), Lab(hosts=2) as one, Lab(hosts=2) as other:
        doors = [listener(lab["h2"]) for lab in (one, other)]
        lines = [connected(lab["h1"], lab["h2"]) for lab in (one, other)]
        for number, door in enumerate(doors):
            there, _ = door.accept()
            there.sendall(str(number).encode())
            there.close()
        assert [line.recv(1) for line in lines] == [b"0", b"1"]
        for line in [*doors, *lines]:
            line.close()
        one["h1"].power_cut()
        assert run(other["h1"], "print(1)") == 1
    assert not any(host.up for lab in (one, other) for host in lab)


SUM = """
import json, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="tcp://10.77.0.1:5000", rank=int(sys.argv[1]), world_size=2)
numbers = torch.arange(100_000.0) + dist.get_rank()
dist.all_reduce(numbers)
assert torch.equal(numbers, 2 * torch.arange(100_000.0) + 1)
dist.barrier()
print(json.dumps(int(open("/sys/class/net/eth0/statistics/tx_bytes").read())))
"""

WORLD = """
import socket, recover
world = recover.init()
assert world.agree(1) == 1
print(socket.gethostname(), world.rank, len(world.members), flush=True)
"""


@pytest.mark.guarantee("Emulated hosts", "Gloo and Open MPI run unchanged on emulated hosts.")
def test_lab_runs_gloo_across_hosts_and_open_mpi_inside_one(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORLD)
    command = [
        sys.executable,
        "-P",
        "-m",
        "recover.cli",
        "run",
        "-n",
        "2",
        "--run-dir",
        "/tmp/run",
        str(script),
    ]
    job = lab["h3"].start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ranks = [
        host.start([sys.executable, "-c", SUM, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank, host in enumerate((lab["h1"], lab["h2"]))
    ]
    for rank in ranks:
        sent, _ = rank.communicate(timeout=2 * PATIENCE)
        assert rank.returncode == 0
        assert int(sent) >= 4 * 100_000 / 2, "the sum did not go over the wire"
    output, _ = job.communicate(timeout=2 * PATIENCE)
    assert job.returncode == 0, output
    assert sorted(output.splitlines()) == ["[rank 0] h3 0 2", "[rank 1] h3 1 2"]
    assert lab["h3"].processes() == {}, "the launcher leaves nothing on its host"
