"""Loopback ports: where a block of them is free, who of us may take it, and who has one that is not.

A free port is free only until somebody takes it: whoever binds still handles EADDRINUSE. A claim keeps away
other zasgd processes alone, and never the port itself.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from zasgd.launch import LaunchError

_SHOWN = 120  # characters of a command line; a script given with -c may be long and of many lines
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_RAY_WORKER_PORTS = range(10002, 20000)
_EPHEMERAL_FROM = 32768  # a waiting client on such a port can be connected to itself (libzmq issue 4588)


@dataclass(frozen=True, slots=True, eq=False)
class PortClaim:
    """The block of ports from `base` on, kept from other claims until `release`, or until this process ends.

    A context manager that releases. Children do not inherit it.
    """

    base: int
    _held: ExitStack

    def release(self) -> None:
        """Let others claim the ports; once is enough, again does no harm."""
        self._held.close()

    def __enter__(self) -> PortClaim:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def claim_port_block(
    count: int, start: int = 7470, below: int = _EPHEMERAL_FROM, avoid: range = _RAY_WORKER_PORTS
) -> PortClaim:
    """As free_port_block, and nobody else's claim holds a port of the block from now on.

    Raises LaunchError if there is no such block. The claims are abstract Unix sockets: no file is left behind,
    and like ports they count per network namespace.
    """
    with ExitStack() as held:

        def obstacle(base: int) -> int | None:
            held.close()  # the claims on the block before it
            return _first_unclaimable(base, count, held) or _first_obstacle(base, count, avoid)

        return PortClaim(_search(obstacle, count, start, below), held.pop_all())


def free_port_block(
    count: int, start: int = 7470, below: int = _EPHEMERAL_FROM, avoid: range = _RAY_WORKER_PORTS
) -> int:
    """The first port of `count` consecutive ones, from `start` on, that can be bound on 127.0.0.1.

    The whole block lies below `below` and outside `avoid`. Raises LaunchError if there is no such block.
    """
    return _search(lambda base: _first_obstacle(base, count, avoid), count, start, below)


def port_owner(port: int) -> str | None:
    """`pid 4711 (python -m http.server)` for the process listening on TCP `port`, None if it cannot be known.

    The processes of other users can be seen by root only.
    """
    inodes = set(_listening_inodes(port))
    if not inodes:
        return None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and inodes & _socket_inodes(entry):
            return f"pid {entry.name} ({_command_of(entry)})"
    return None


def _search(obstacle: Callable[[int], int | None], count: int, start: int, below: int) -> int:
    """The first base without an obstacle; behind one the search goes on."""
    base = start
    while base + count <= below:
        found = obstacle(base)
        if found is None:
            return base
        base = found + 1
    raise LaunchError(f"no {count} consecutive free ports on 127.0.0.1 from {start} to {below - 1}")


def _first_unclaimable(base: int, count: int, held: ExitStack) -> int | None:
    return next((port for port in range(base, base + count) if not _can_claim(port, held)), None)


def _can_claim(port: int, held: ExitStack) -> bool:
    claim = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        claim.bind(f"\0zasgd-port-{port}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"port {port} cannot be claimed: {error.strerror}") from None
        return False
    return True


def _first_obstacle(base: int, count: int, avoid: range) -> int | None:
    with ExitStack() as held:
        for port in range(base, base + count):
            if port in avoid or not _can_listen(port, held):
                return port
    return None


def _can_listen(port: int, held: ExitStack) -> bool:
    listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as libzmq does: TIME_WAIT does not block it
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1)
    except OSError:
        return False
    return True


def _listening_inodes(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for fields in map(str.split, lines):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _socket_inodes(process: Path) -> set[str]:
    try:
        targets = [_target_of(fd) for fd in (process / "fd").iterdir()]
    except OSError:  # it ended, or it is another user's
        return set()
    return {target[len("socket:[") : -1] for target in targets if target.startswith("socket:[")}


def _target_of(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:  # closed since it was listed
        return ""


def _command_of(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "ended"
    line = " ".join(b" ".join(words).decode(errors="replace").split())
    return (line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}...") or "unknown"
