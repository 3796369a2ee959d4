"""Which socket a message goes out on, and whose name an incoming one bears.

A core addresses BROKER, a shard, or the opaque peer of a request it answers; these classes turn that into sockets and
routing frames. They never look into a message beyond F0 and never decide anything.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import zmq

from zasgd.core.codec import Buffer, WireError
from zasgd.core.node import BROKER, PeerId, shard_peer
from zasgd.core.wire import HEADER_BYTES
from zasgd.net import sockets
from zasgd.net.frames import content, read, waits, write
from zasgd.net.relay import Relay

MAX_ROUTE_FRAMES = 4
_EMPTY = b""
_SHARD_AT = struct.Struct("<H")
SHARD_OFFSET = 6
"""Where in F0 the shard number stands."""


class Links(Protocol):
    """The sockets of one process."""

    dropped: Counter[str]

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """What the loop polls; grows only when a link is dialled."""
        ...

    def take(self, sock: zmq.Socket[bytes]) -> tuple[PeerId, list[Buffer]] | None:
        """The next message without routing frames, None for one to ignore; raises zmq.Again when none is waiting."""
        ...

    def send(self, peer: PeerId, frames: list[Buffer]) -> None:
        """Hand a message over, or count it as dropped: the cores repeat what matters."""
        ...

    def dial(self, peer: PeerId, endpoint: str) -> None:
        """Open the link to a peer."""
        ...

    def close(self) -> None:
        """Let the last messages out and close every socket."""
        ...


def send(sock: zmq.Socket[bytes], route: Sequence[Buffer], frames: list[Buffer], dropped: Counter[str]) -> None:
    """Send without ever blocking; what cannot go is counted."""
    try:
        write(sock, (*route, _EMPTY, *frames))
    except zmq.Again:
        dropped["not connected or full"] += 1
    except zmq.ZMQError as e:
        if e.errno != zmq.EHOSTUNREACH:
            raise
        dropped["peer departed"] += 1


def take(sock: zmq.Socket[bytes]) -> tuple[tuple[bytes, ...], list[Buffer]]:
    """(route, frames after the delimiter) of the next message; a malformed envelope has no frames. Raises zmq.Again."""
    parts = read(sock)
    for i, part in enumerate(parts[: MAX_ROUTE_FRAMES + 1]):
        if not len(part):
            return tuple([p.bytes for p in parts[:i]]), [content(p) for p in parts[i + 1 :]]
    return ((parts[0].bytes,) if sock.type == zmq.ROUTER else ()), []


def receive(sock: zmq.Socket[bytes], at_most: int = 64) -> Iterator[tuple[tuple[bytes, ...], list[Buffer]]]:
    """What `take` returns of each message that is waiting."""
    for _ in range(at_most):
        if not waits(sock):
            return
        yield take(sock)


def shard_of(frames: Sequence[Buffer]) -> PeerId:
    """The shard that a reply says it is from."""
    if not frames or len(frames[0]) != HEADER_BYTES:
        raise WireError("a reply without F0")
    return shard_peer(_SHARD_AT.unpack_from(frames[0], SHARD_OFFSET)[0])


class BrokerLinks:
    """Control ROUTER; data goes through the relay, which has sockets and a thread of its own."""

    def __init__(self, ctx: zmq.Context[zmq.Socket[bytes]], address: str, relay: Relay) -> None:
        self.dropped: Counter[str] = Counter()
        self._router = sockets.router(ctx, address, control=True)
        self._relay = relay

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._router,)

    def take(self, sock: zmq.Socket[bytes]) -> tuple[PeerId, list[Buffer]] | None:
        return take(sock)

    def send(self, peer: PeerId, frames: list[Buffer]) -> None:
        send(self._router, peer, frames, self.dropped)  # type: ignore[arg-type]

    def dial(self, peer: PeerId, endpoint: str) -> None:
        self._relay.dial(peer[1], endpoint)  # type: ignore[index]

    def close(self) -> None:
        sockets.linger_for_goodbye(self._router)
        self._router.close()


class ShardLinks:
    """Control DEALER to the broker; data ROUTER for relays and direct workers alike."""

    def __init__(self, ctx: zmq.Context[zmq.Socket[bytes]], broker: str, data: zmq.Socket[bytes]) -> None:
        self.dropped: Counter[str] = Counter()
        self._control = sockets.dealer(ctx, f"tcp://{broker}", control=True)
        sockets.await_connection(self._control)
        self._data = data

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._control, self._data)

    def take(self, sock: zmq.Socket[bytes]) -> tuple[PeerId, list[Buffer]] | None:
        route, frames = take(sock)
        return (BROKER if sock is self._control else route), frames

    def send(self, peer: PeerId, frames: list[Buffer]) -> None:
        if peer == BROKER:
            send(self._control, (), frames, self.dropped)
        else:
            send(self._data, peer, frames, self.dropped)  # type: ignore[arg-type]

    def dial(self, peer: PeerId, endpoint: str) -> None:
        raise ValueError("a shard dials nobody but its broker")

    def close(self) -> None:
        for sock in self.sockets():
            sockets.linger_for_goodbye(sock)
            sock.close()


class MemberLinks:
    """A worker or the evaluator: control DEALER to the broker, data DEALERs to the relay or to the shards."""

    def __init__(self, ctx: zmq.Context[zmq.Socket[bytes]], broker: str) -> None:
        self.dropped: Counter[str] = Counter()
        self._ctx = ctx
        self._broker_host = sockets.split_address(broker)[0]
        self._control = sockets.dealer(ctx, f"tcp://{broker}", control=True)
        sockets.await_connection(self._control)
        self._data: dict[PeerId, zmq.Socket[bytes]] = {}
        self._by_endpoint: dict[str, zmq.Socket[bytes]] = {}

    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        return (self._control, *self._by_endpoint.values())

    def take(self, sock: zmq.Socket[bytes]) -> tuple[PeerId, list[Buffer]] | None:
        _, frames = take(sock)
        if sock is self._control:
            return BROKER, frames
        return (shard_of(frames), frames) if frames and len(frames[0]) == HEADER_BYTES else None

    def send(self, peer: PeerId, frames: list[Buffer]) -> None:
        sock = self._control if peer == BROKER else self._data.get(peer)
        if sock is None:
            self.dropped["not dialled"] += 1
        else:
            send(sock, (), frames, self.dropped)

    def dial(self, peer: PeerId, endpoint: str) -> None:
        endpoint = endpoint.replace("*", self._broker_host, 1)
        try:
            if endpoint not in self._by_endpoint:
                self._by_endpoint[endpoint] = sockets.dealer(self._ctx, endpoint, control=False)
                sockets.await_connection(self._by_endpoint[endpoint])
            self._data[peer] = self._by_endpoint[endpoint]
        except sockets.AddressError:  # a server may call itself anything
            self.dropped["an endpoint that cannot be dialled"] += 1

    def close(self) -> None:
        for sock in self.sockets():
            sockets.linger_for_goodbye(sock)
            sock.close()
