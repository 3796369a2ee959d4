"""The one loop that drives a core over ZeroMQ: poll, decode, hand over, carry out.

Owns its sockets: only the thread that calls `run` touches them. Everybody else uses `post`. Sockets are drained before
a timer fires, so a loop that stood still hears the renewals that waited before it judges anybody.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.backend import zmq_poll

from zasgd.core import wire
from zasgd.core.codec import Buffer, WireError
from zasgd.core.messages import Err, Kind
from zasgd.core.node import (
    Compute,
    Computed,
    Dial,
    Effect,
    Node,
    Note,
    PeerId,
    Record,
    Save,
    Send,
    Share,
    Stop,
    Unshare,
)
from zasgd.core.region import SharedMemoryError
from zasgd.net.frames import waits
from zasgd.net.links import Links

MAX_POLL_S = 60.0
MAX_BATCH = 64
"""Messages that one socket may bring before a timer fires, or another socket is looked at."""
MAX_HEARING_S = 0.25
"""A timer waits no longer for messages that are already there: 64 pushes of a large model take seconds."""
MAX_GARBAGE_ANSWERS_PER_S = 100
KIND_OFFSET = 3
"""Where in F0 the kind stands, under every protocol version."""


class Loop:
    """Drives `node` until it stops; `run` returns the Stop."""

    def __init__(
        self,
        node: Node,
        links: Links,
        *,
        compute: Callable[[Compute], None] | None = None,
        note: Callable[[Note], None] | None = None,
        save: Callable[[Save], None] | None = None,
        record: Callable[[tuple[Any, ...]], None] | None = None,
        share: Callable[[Share], Any] | None = None,
        unshare: Callable[[Unshare], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """compute, note, save, record, share, unshare: carry out those effects; they must return at once."""
        self.node = node
        self.links = links
        self.garbage: Counter[str] = Counter()
        self._clock = clock
        self._share = share
        self._effects: dict[type[Any], Callable[[Any], object]] = {
            Dial: self._dial,
            Compute: compute or _ignore,
            Share: self._carry_out_share,
            Unshare: unshare or _ignore,
            Save: save or _ignore,
            Record: (lambda effect: record(effect.row)) if record else _ignore,
            Note: note or _ignore,
            Stop: self._end,
        }
        self._posted: deque[Callable[[float], list[Effect]]] = deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop: Stop | None = None
        self._thread_id = 0
        self._polled: list[tuple[Any, int]] = []
        self._carrying = False
        self._answer_budget = 0.0
        self._budget_at = clock()

    @property
    def wakeup_fd(self) -> int:
        """For signal.set_wakeup_fd: a signal then ends the poll at once."""
        return self._wake_w

    def post(self, event: Callable[[float], list[Effect]]) -> None:
        """Have `event(now)` run by the loop's thread; safe from any thread and from a signal handler."""
        self._posted.append(event)
        if self._carrying and threading.get_ident() == self._thread_id:
            return  # the loop itself, which looks here before it sleeps
        try:
            os.write(self._wake_w, b"x")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already
        except OSError:
            self._posted.clear()  # the loop is over

    def run(self) -> Stop:
        """Until the node stops; closes the links. Exceptions of the node pass through: they are our bugs."""
        self._thread_id = threading.get_ident()
        self._look_at_sockets()
        try:
            while self._stop is None:
                self._once()
            return self._stop
        finally:
            self.links.close()
            os.close(self._wake_r)
            os.close(self._wake_w)

    def _look_at_sockets(self) -> None:
        self._polled = [(item, int(zmq.POLLIN)) for item in (self._wake_r, *self.links.sockets())]

    def _once(self) -> None:
        """What was posted, else the timer that is due, else a message of each socket that has some."""
        if self._posted:
            self._carry_out(self._posted.popleft()(self._clock()))
            return
        wait_s = self.node.next_deadline() - self._clock()
        if wait_s <= 0:
            self._fire()
            return
        for ready, _ in zmq_poll(self._polled, -int(-min(wait_s, MAX_POLL_S) * 1000 // 1)):
            if self._stop is not None:
                return
            if ready is self._wake_r:
                os.read(self._wake_r, 4096)
            else:
                self._take(ready)

    def _fire(self) -> None:
        """Hear everybody first: what is due may be to judge their silence. But a busy shard must renew, too."""
        until = self._clock() + MAX_HEARING_S
        for sock in self.links.sockets():
            for _ in range(MAX_BATCH):
                if self._stop is not None or not waits(sock) or self._clock() > until:
                    break
                self._take(sock)
        now = self._clock()
        if self._stop is None and self.node.next_deadline() <= now:
            self._carry_out(self.node.on_timer(now))

    def _take(self, sock: zmq.Socket[bytes]) -> None:
        """One message of a socket that has some."""
        found = self.links.take(sock)
        if found is None:
            return
        peer, frames = found
        try:
            msg = wire.decode(frames)
        except WireError as e:
            self._refuse(peer, frames, e)
            return
        self._carry_out(self.node.on_message(self._clock(), peer, msg))

    def _refuse(self, peer: PeerId, frames: list[Buffer], error: WireError) -> None:
        """Answer garbage with ERR, at most so many times a second; count all of it."""
        self.garbage[error.code] += 1
        now = self._clock()
        refill = (now - self._budget_at) * MAX_GARBAGE_ANSWERS_PER_S
        self._answer_budget = min(MAX_GARBAGE_ANSWERS_PER_S, self._answer_budget + refill)
        self._budget_at = now
        if self._answer_budget < 1 and self.garbage.total() > MAX_GARBAGE_ANSWERS_PER_S:
            return
        self._answer_budget -= 1
        if _is_err(frames):
            return  # an ERR is never answered, or two peers could refuse each other for ever
        ids: dict[str, int] = {}
        try:
            header = wire.read_header(frames[0])
            ids = {"run": header.run, "shard": header.shard, "seq": header.seq, "incarnation": header.incarnation}
        except (WireError, IndexError):
            pass  # there is nothing to refer to
        self.links.send(peer, wire.encode(Err(**ids, code=error.code, text=str(error)[:512])))

    def _carry_out(self, effects: list[Effect]) -> None:
        before, self._carrying = self._carrying, True
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self.links.send(effect.peer, wire.encode(effect.message))  # type: ignore[union-attr]
            else:
                self._effects[kind](effect)
        self._carrying = before

    def _dial(self, effect: Dial) -> None:
        self.links.dial(effect.peer, effect.endpoint)
        self._look_at_sockets()

    def _carry_out_share(self, effect: Share) -> None:
        shared = self._share(effect) if self._share else SharedMemoryError("this process shares no memory")
        self._carry_out(self.node.on_done(self._clock(), Computed(effect, shared)))

    def _end(self, effect: Stop) -> None:
        self._stop = effect


def _ignore(effect: Effect) -> None:
    """An effect that this process has no use for."""


def _is_err(frames: list[Buffer]) -> bool:
    start = bytes(frames[0][: KIND_OFFSET + 1]) if frames else b""
    return start[:2] == wire.MAGIC and start[KIND_OFFSET:] == bytes([Kind.ERR])
