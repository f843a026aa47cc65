"""The init of an emulated host: sets up its name and file systems, and lives as long as the process that made the host.

Run as a plain file with the standard library only, so that it starts in milliseconds, as process 1 of new namespaces.
When it ends, the kernel kills every other process of the host, and namespaces and mounts vanish with the last of them.

    first_process.py PIDFD-OF-THE-OWNER '{"name": "h1", "hosts": "10.77.0.1 h1\\n", "shared": ["/tmp/seen-by-all"]}'
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys

_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000  # of <sys/mount.h>
_libc = ctypes.CDLL(None, use_errno=True)


def main(owner: int, name: str, hosts: str, shared: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the host are reaped, and leave no zombies
    _mount("none", "/", flags=_RECURSIVE | _PRIVATE)  # the mounts below are not visible outside
    kept = [(os.open(path, os.O_PATH), path) for path in ("/sys/fs/cgroup", *shared) if os.path.isdir(path)]
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")  # the interfaces of this host, not of the machine
    for place in ("/tmp", "/dev/shm"):
        _mount("tmpfs", place, "tmpfs", data="mode=1777")
    for fd, path in kept:
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", path, flags=_BIND | _RECURSIVE)
        os.close(fd)
    with open("/tmp/hosts", "w") as file:
        file.write(hosts)
    _mount("/tmp/hosts", "/etc/hosts", flags=_BIND)
    os.unlink("/tmp/hosts")
    socket.sethostname(name)
    if os.path.exists(later := "/proc/sys/net/ipv6/conf/default/disable_ipv6"):
        with open(later, "w") as file:
            file.write("1")  # for new interfaces; loopback has ::1 already
    os.write(1, b"up\n")
    watch = select.poll()
    watch.register(owner, select.POLLIN)
    watch.poll()


def _mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode() or None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot mount {source} ({kind}) on {target}: {os.strerror(error)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), **json.loads(sys.argv[2]))
