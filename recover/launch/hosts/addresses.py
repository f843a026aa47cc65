"""The address under which other hosts reach this one: of an interface that leads to them, never of
the loopback."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from recover.launch.preflight import Refusal

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>


def resolved(name: str) -> tuple[str, ...]:
    """The addresses of a name; () if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_of_this_host(address: str) -> bool:
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def leads_to(address: str, port: int) -> str | None:
    """This host's own address on the route to another one; nothing is sent. None if there is no
    route."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def address_of_interface(name: str) -> str | None:
    """The IPv4 address of an interface; None if there is no such interface, or it has no
    address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of_address(address: str) -> str | None:
    return next((name for _, name in socket.if_nameindex() if address_of_interface(name) == address), None)


def own_address(asked: str | None, endpoints: list[tuple[str, int]], alone: bool) -> str:
    """The address under which other hosts reach this one: of the interface (or the address) `asked`
    for, or on the route to etcd. `alone`: there is no other host, and the loopback is allowed.
    Raises Refusal.
    """
    if asked is not None:
        given = address_of_interface(asked) or asked
        try:
            fits = is_of_this_host(given)
        except ValueError:
            fits = False
        if not fits:
            names = ", ".join(name for _, name in socket.if_nameindex() if address_of_interface(name))
            raise Refusal(
                f"--interface {asked} is neither an interface nor an address of this host; it has {names}"
            )
        found = given
    else:
        ways = (leads_to(address, port) for host, port in endpoints for address in resolved(host))
        found = next((way for way in ways if way), "")
        if not found:
            raise Refusal(
                f"no way leads from this host to {', '.join(f'{host}:{port}' for host, port in endpoints)}: the names "
                "have no address here, or there is no route; check --rdzv-endpoint, or give --interface"
            )
    if is_loopback(found) and not alone:
        raise Refusal(
            f"this host would be reached at {found}, which no other host can; give --interface, or an --rdzv-endpoint "
            "that resolves to a real address (Debian writes 127.0.1.1 for the host's own name into /etc/hosts)"
        )
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET
