"""Emulated hosts on one machine, each with an address, a name, processes, /tmp and /dev/shm of its own.

    with Lab(hosts=3) as lab:
        process = lab["h1"].start([sys.executable, "train.py"])  # a subprocess.Popen
        lab["h2"].shape(delay_ms=200, loss=0.2)
        lab["h1"].power_cut()

Needs Linux, root and `ip`; `unavailable()` says what is missing. Nothing has a name outside of the lab, and nothing
outlives the process that made the lab, however that process ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from recover_lab.lab import namespaces
from recover_lab.locations import PACKAGES

NETWORK = (
    "10.77.0"  # inside namespaces of the lab: it does not collide with another lab or the machine's network
)
MOST_HOSTS = 254
_HERE = Path(__file__).parent
_NOWHERE = "02:00:00:4d:00:fe"  # the hardware address of no host
_PLAIN = {"delay": 0.0, "loss": 0.0, "rate": 0.0}

Direction = Literal["both", "in", "out"]


def unavailable() -> str | None:
    """The reason why no lab can run here, found by trying; None if it can."""
    if sys.platform != "linux":
        return f"hosts are made of Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which needs root"
    if shutil.which("ip") is None:
        return "hosts need the program `ip` (package iproute2)"
    try:
        with Lab(hosts=1) as lab:
            lab["h1"].shape(loss=1)
    except (OSError, RuntimeError) as error:
        return f"hosts cannot be made here: {error}"
    return None


class Host:
    """One host. It is up after the start of the lab, and again after `power_on`."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.name, self.address = f"h{number}", f"{NETWORK}.{number}"
        self._lab, self._number, self._boots = lab, number, 0
        self._init: subprocess.Popen[str] | None = None
        self._pidfd = -1
        self._started: list[subprocess.Popen[Any]] = []
        self._cable = {"out": _PLAIN, "in": _PLAIN}
        self._cut: set[str] = set()

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address}, {'up' if self.up else 'without power'})"

    @property
    def up(self) -> bool:
        return self._init is not None

    @property
    def init(self) -> int:
        """The pid of the host's first process, as seen from outside."""
        return self._living().pid

    def start(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host, in a session of its own, as by ssh, in the directory of the caller.

        Options are those of `subprocess.Popen`; the pid of the result is the one seen from outside.
        """
        self._living()
        options = dict[str, Any](cwd=os.getcwd(), start_new_session=True) | options
        process: subprocess.Popen[Any] = namespaces.in_those_of(
            self._pidfd, namespaces.WHOLE_HOST, lambda: subprocess.Popen(command, **options)
        )
        self._started = [*(known for known in self._started if known.poll() is None), process]
        return process

    def processes(self) -> dict[int, str]:
        """Processes of this host without its init: command lines by pid, both as seen from outside."""
        return {} if self._init is None else dict(_living_with(self._init.pid))

    def power_cut(self) -> None:
        """Kill everything on this host at once. Its link is cut first, so that no peer sees a connection closed."""
        if self._init is None:
            return
        self.cut()
        self._off()

    def power_on(self) -> None:
        """Start the host again with the same name and address: empty /tmp, no process, a sound link."""
        if self._init is not None:
            raise RuntimeError(f"{self.name} has power already")
        self._cable, self._cut = {"out": _PLAIN, "in": _PLAIN}, set()
        self._boot()
        self._connect()

    def cut(self, direction: Direction = "both") -> None:
        """Cut the link: packets are dropped silently, and all processes run on.

        `in`: the host receives nothing; `out`: nothing that it sends arrives.
        """
        self._living()
        self._cut |= _ways(direction)
        self._plug()

    def heal(self) -> None:
        """Restore the link, without delay, loss or limit."""
        self._living()
        self._cable, self._cut = {"out": _PLAIN, "in": _PLAIN}, set()
        self._plug()

    def cut_link(self, other: Host) -> None:
        """Drop silently what this host sends to another one; all other ways stay as they are.

        A wrong hardware address: frames leave, and no port of the switch takes them.
        """
        self._set_neighbour(other, "replace", "lladdr", _NOWHERE, "nud", "permanent")

    def heal_link(self, other: Host) -> None:
        self._set_neighbour(other, "del")

    def _set_neighbour(self, other: Host, verb: str, *words: str) -> None:
        command = ["ip", "neigh", verb, other.address, "dev", "eth0", *words]
        if code := self.start(command).wait():
            raise RuntimeError(f"{self.name}: `{' '.join(command)}` ended with {code}")

    def shape(
        self, delay_ms: float = 0.0, loss: float = 0.0, rate_mbit: float = 0.0, direction: Direction = "both"
    ) -> None:
        """Make the link bad in this direction: delay, share of lost frames, bandwidth in Mbit/s (0: no limit).

        The other direction is unchanged.
        """
        if delay_ms < 0 or not 0 <= loss <= 1 or rate_mbit < 0:
            raise ValueError(
                f"a link with delay_ms={delay_ms}, loss={loss}, rate_mbit={rate_mbit}: "
                "loss is a share from 0 to 1, the others are not negative"
            )
        self._living()
        shape = {"delay": delay_ms / 1e3, "loss": float(loss), "rate": rate_mbit * 1e6 / 8}
        self._cable = self._cable | dict.fromkeys(_ways(direction), shape)
        self._plug()

    def _living(self) -> subprocess.Popen[str]:
        if self._init is None:
            raise RuntimeError(f"{self.name} has no power: power_on() first")
        return self._init

    # Boot: the init first, then the link.

    def _boot(self) -> None:
        facts = {"name": self.name, "hosts": self._lab.names, "shared": self._lab.shared}
        self._init = namespaces.in_new(
            namespaces.WHOLE_HOST,
            lambda: _plain_python("first_process.py", self._lab.owner, json.dumps(facts)),
        )
        self._pidfd = os.pidfd_open(self._init.pid)
        self._boots += 1

    def _connect(self) -> None:
        init = self._living()
        _answer(init, "up")
        # The same after power_on, as with a real machine: neighbours have cached it.
        mac = f"02:00:00:4d:00:{self._number:02x}"
        self._lab.ip(
            f"link add name {self._port} type veth peer name eth0 address {mac} netns {init.pid}",
            f"link set {self._port} up",
        )
        namespaces.in_those_of(
            self._pidfd,
            namespaces.NET,
            lambda: _ip("link set lo up", f"address add {self.address}/24 dev eth0", "link set eth0 up"),
        )
        self._plug()

    def _off(self) -> None:
        if self._init is None:
            return
        # The kernel kills the other processes of its PID namespace, and its exit waits until all are reaped.
        self._init.kill()
        for process in self._started:
            process.wait()
        self._init.wait()
        for pipe in (self._init.stdin, self._init.stdout, self._init.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self._pidfd)
        self._init, self._pidfd, self._started = None, -1, []

    @property
    def _port(self) -> str:
        # Unique for each boot: the port of a host without power disappears with its namespace, a little later.
        return f"{self.name}.{self._boots}"

    def _plug(self) -> None:
        """Connect the host to the switch directly, through a bad link, or not at all."""
        cut = {way: shape | {"loss": 1.0} for way, shape in self._cable.items() if way in self._cut}
        ways = self._cable | cut
        if len(cut) == 2:
            self._lab.ip(f"link set {self._port} nomaster")
        elif all(shape == _PLAIN for shape in ways.values()):
            self._lab.take_cable_out(self.name)
            self._lab.ip(f"link set {self._port} master lan")
        else:
            self._lab.lay_cable(self.name, ways)
            self._lab.ip(f"link set {self._port} master {self.name}")


class Lab:
    """Hosts h1, h2, ... on a switch of their own, inside `with`, once.

    `shared` are directories below /tmp or /dev/shm that all hosts see, as on a shared file system. They see all other
    files of the machine anyway.
    """

    def __init__(self, hosts: int, shared: Sequence[str | os.PathLike[str]] = ()) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"a lab has 1 to {MOST_HOSTS} hosts, not {hosts}")
        self._hosts = {host.name: host for host in (Host(self, number + 1) for number in range(hosts))}
        self.names = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
            f"{host.address} {host.name}\n" for host in self
        )
        needed = [Path(path) for path in (*shared, sys.prefix, sys.base_prefix)]
        needed += [package.parent for package in PACKAGES]
        self.shared = sorted({str(path.resolve()) for path in needed if _hidden(path.resolve())})
        self._cables: set[str] = set()
        self._made = ExitStack()
        self._switch: subprocess.Popen[str]
        self._switch_fd = self.owner = -1

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Lab:
        try:
            self.owner = os.pidfd_open(os.getpid())  # the processes of the lab end when this one does
            self._made.callback(os.close, self.owner)
            self._switch = namespaces.in_new(namespaces.NET, lambda: _plain_python("wire.py", self.owner))
            self._made.enter_context(self._switch)  # closes its pipes and waits
            self._made.callback(self._switch.kill)
            self._switch_fd = os.pidfd_open(self._switch.pid)
            self._made.callback(os.close, self._switch_fd)
            for host in self:
                self._made.callback(host._off)
                host._boot()
            _answer(self._switch, "up")
            self.ip("link add name lan type bridge", "link set lan up")
            for host in self:
                host._connect()
        except BaseException:
            self._made.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def ip(self, *commands: str) -> None:
        """Run commands of `ip` in the switch's namespace."""
        namespaces.in_those_of(self._switch_fd, namespaces.NET, lambda: _ip(*commands))

    def lay_cable(self, name: str, ways: dict[str, dict[str, float]]) -> None:
        """Make a bridge of this name the near end of a bad link, whose far end is in the switch."""
        near, far = f"{name}.near", f"{name}.far"
        if name not in self._cables:
            self._cables.add(name)
            self.ip(
                f"link add name {name} type bridge",
                *(f"tuntap add dev {tap} mode tap" for tap in (near, far)),
                *(f"link set {device} up" for device in (name, near, far)),
                f"link set {near} master {name}",
            )
        assert self._switch.stdin is not None
        print(json.dumps({"taps": [near, far]} | ways), file=self._switch.stdin, flush=True)
        _answer(self._switch, "set")
        self.ip(f"link set {far} master lan")

    def take_cable_out(self, name: str) -> None:
        """Disconnect a bad link; the switch forgets the addresses behind it."""
        if name in self._cables:
            self.ip(f"link set {name}.far nomaster")


def _hidden(path: Path) -> bool:
    return any(path.is_relative_to(place) for place in ("/tmp", "/dev/shm"))


def _ways(direction: Direction) -> set[str]:
    ways = {"both": {"in", "out"}, "in": {"in"}, "out": {"out"}}
    if direction not in ways:
        raise ValueError(f"direction {direction!r}: must be one of {', '.join(ways)}")
    return ways[direction]


def _plain_python(program: str, owner: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a program in this directory, with the standard library only; a pidfd tells it when its owner ends."""
    return subprocess.Popen(
        [sys.executable, "-IS", str(_HERE / program), str(owner), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[owner],
        start_new_session=True,  # Ctrl-C must reach only the user of the lab
    )


def _answer(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdout.readline() != f"{expected}\n":
        last_words = process.stderr.read().strip().splitlines()
        raise RuntimeError(
            f"a part of the lab has ended: {last_words[-1] if last_words else 'it was killed'}"
        )


def _ip(*commands: str) -> None:
    done = subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip refused one of {'; '.join(commands)}: {done.stderr.strip()}")


def _living_with(init: int) -> Iterator[tuple[int, str]]:
    """All processes in the PID namespace of process `init`, without `init` itself."""
    place = os.stat(f"/proc/{init}/ns/pid").st_ino
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != init:
            try:
                os.stat(f"/proc/{name}/ns/net")  # a zombie has no namespaces
                if os.stat(f"/proc/{name}/ns/pid").st_ino == place:
                    line = Path("/proc", name, "cmdline").read_bytes()
                    yield int(name), line.replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                pass  # the process has ended, or is about to
