"""One question to a broker and its answer: `describe`, `status`, `drain`, `stop`, `expel`.

Blocks; for command lines and supervisors. Repeats the question until the answer comes or the time is up.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TypeVar

from zasgd.core import wire
from zasgd.core.codec import WireError
from zasgd.core.messages import Describe, Description, Done, Drain, Err, Expel, Message, Status, StopMsg
from zasgd.net import sockets
from zasgd.net.links import receive, send

ASK_EVERY_S = 1.0
M = TypeVar("M", bound=Message)


class BrokerError(Exception):
    """No usable answer; `code` is the exit code that fits: 3 unreachable, 2 refused."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Client:
    """A connection for questions. Use it as a context manager, from one thread."""

    def __init__(self, broker: str) -> None:
        """broker: HOST:PORT; raises sockets.AddressError."""
        host, port = sockets.split_address(broker)
        self.address = f"{host}:{port}"
        self._ctx = sockets.context()
        self._sock = sockets.dealer(self._ctx, f"tcp://{self.address}", control=True)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close(0)
        self._ctx.term()

    def describe(self, timeout_s: float) -> Description:
        """What the run trains."""
        return self._ask(Describe(), Description, timeout_s)

    def status(self, timeout_s: float) -> dict[str, object]:
        """The state of the run; see Broker.report for its keys."""
        return self._ask(Status(), Status, timeout_s).report or {}

    def drain(self, target: str, timeout_s: float) -> str:
        """Let a worker leave; returns what the broker says."""
        return self._ask(Drain(target=target), Done, timeout_s).text

    def stop(self, timeout_s: float, *, interrupted: bool = False) -> str:
        """End the run."""
        return self._ask(StopMsg(interrupted=interrupted), Done, timeout_s).text

    def expel(self, host: str, pid: int, reason: str, timeout_s: float) -> None:
        """Tell the broker that a process is dead."""
        self._ask(Expel(host=host, pid=pid, reason=reason), Done, timeout_s)

    def _ask(self, question: Message, answer: type[M], timeout_s: float) -> M:
        give_up_at = time.monotonic() + timeout_s
        ask_at = 0.0
        frames = wire.encode(question)
        while (now := time.monotonic()) < give_up_at:
            if now >= ask_at:
                # Without a connection the send is dropped at once, so ask again soon.
                sent = self._send(frames)
                ask_at = now + (ASK_EVERY_S if sent else 0.05)
            self._sock.poll(max(1, int(1000 * (min(ask_at, give_up_at) - now))))
            found = self._answer(answer)
            if found is not None:
                return found
        raise BrokerError(f"no broker answers at {self.address} (waited {timeout_s:g} s)", 3)

    def _send(self, frames: list[wire.Buffer]) -> bool:
        dropped: Counter[str] = Counter()
        send(self._sock, (), frames, dropped)
        return not dropped

    def _answer(self, answer: type[M]) -> M | None:
        for _, frames in receive(self._sock):
            try:
                msg = wire.decode(frames)
            except WireError as e:
                raise BrokerError(f"the peer at {self.address} is no zasgd broker of this version: {e}", 3) from None
            if isinstance(msg, Err):
                code = 3 if msg.code == "WRONG_PROTOCOL" else 2
                raise BrokerError(f"the broker at {self.address} refused: {msg.text}", code)
            if isinstance(msg, answer):
                return msg
        return None
