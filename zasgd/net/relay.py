"""The relay: data between workers and shards through the broker's one address.

Reads F0 and copies nothing; owns its thread and its sockets, nobody else touches them. Decides only which shard's link
a message takes. What cannot be forwarded is counted and dropped: workers probe and repeat.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from typing import Any

import zmq
from zmq.backend import zmq_poll

from zasgd.core.codec import MAX_BUFFERS
from zasgd.core.wire import HEADER_BYTES, MAGIC
from zasgd.net import sockets
from zasgd.net.frames import read, write

MAX_ROUTE_FRAMES = 4
_POLLIN = int(zmq.POLLIN)


class Relay:
    """Forwards from a data ROUTER to one DEALER per shard and back. Start it, dial shards, stop it."""

    def __init__(self, ctx: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """address: HOST:PORT to listen on; raises sockets.BindError."""
        self.dropped: Counter[str] = Counter()
        self._ctx = ctx
        self._router = sockets.router(ctx, address, control=False)
        self.endpoint = str(self._router.get_string(zmq.LAST_ENDPOINT))
        self._orders: deque[tuple[int, str] | None] = deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return sockets.split_address(self.endpoint)[1]

    def start(self) -> None:
        """Begin forwarding."""
        self._thread.start()

    def dial(self, shard: int, endpoint: str) -> None:
        """Open, or replace, the link to a shard."""
        self._order((shard, endpoint))

    def stop(self) -> None:
        """End the thread and close its sockets."""
        if self._thread.ident is not None:
            self._order(None)
            self._thread.join(timeout=5)
        else:
            self._router.close(0)
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _order(self, order: tuple[int, str] | None) -> None:
        self._orders.append(order)
        os.write(self._wake_w, b"x")

    # ---- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        dealers: dict[int, zmq.Socket[bytes]] = {}
        polled = self._polled(dealers)
        while True:
            for ready, _ in zmq_poll(polled, -1):  # one message of each that has some, so none waits for another's many
                if ready is self._router:
                    self._to_shard(dealers)
                elif ready is self._wake_r:
                    os.read(self._wake_r, 4096)
                else:
                    self._to_worker(ready)
            if self._orders:
                if not self._obey(dealers):
                    break
                polled = self._polled(dealers)
        for sock in (self._router, *dealers.values()):
            sock.close(0)

    def _polled(self, dealers: dict[int, zmq.Socket[bytes]]) -> list[tuple[Any, int]]:
        return [(item, _POLLIN) for item in (self._wake_r, self._router, *dealers.values())]

    def _obey(self, dealers: dict[int, zmq.Socket[bytes]]) -> bool:
        while self._orders:
            order = self._orders.popleft()
            if order is None:
                return False
            shard, endpoint = order
            if shard in dealers:
                dealers.pop(shard).close(0)
            try:
                dealers[shard] = sockets.dealer(self._ctx, endpoint, control=False)
            except sockets.AddressError:
                self.dropped["a shard's endpoint that cannot be dialled"] += 1
        return True

    def _to_shard(self, dealers: dict[int, zmq.Socket[bytes]]) -> None:
        frames = read(self._router)
        dealer = dealers.get(_shard_of(frames))
        if dealer is None:
            self.dropped["malformed or for no shard"] += 1
            return
        try:
            write(dealer, frames)
        except zmq.Again:
            self.dropped["shard not connected"] += 1

    def _to_worker(self, dealer: zmq.Socket[bytes]) -> None:
        try:
            write(self._router, read(dealer))
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.dropped["worker departed"] += 1


def _shard_of(frames: list[zmq.Frame]) -> int:
    """The shard named in F0 of a well-formed envelope; -1 otherwise."""
    for i, frame in enumerate(frames[: MAX_ROUTE_FRAMES + 1]):
        if not len(frame):
            rest = frames[i + 1 :]
            if 2 <= len(rest) <= 2 + MAX_BUFFERS and len(rest[0]) == HEADER_BYTES:
                header = rest[0].bytes
                if header[:2] == MAGIC:
                    return header[6] | header[7] << 8
            return -1
    return -1
