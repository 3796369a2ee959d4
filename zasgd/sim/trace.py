"""What happened, as one running hash, counters and the last few lines.

Two runs that show the same digest did the same things in the same order at the same virtual times, down to
the bytes of every message. Decides nothing; holds no more than `keep` lines, however long the run. A trace that is
not wanted records nothing, and whoever would write to it asks first, so that not even a line is made.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque


class Trace:
    """The record of one simulated run; of an unwanted one nothing is ever recorded, counted or hashed."""

    def __init__(self, keep: int = 200, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self._hash = hashlib.blake2b(digest_size=16)
        self.counts: Counter[str] = Counter()
        self.tail: deque[str] = deque(maxlen=keep)

    def record(self, at_s: float, node: str, kind: str, detail: str = "", content: bytes = b"") -> None:
        """Add one event: virtual seconds (hashed to the microsecond), who, what, and bytes to hash."""
        if not self.wanted:
            return
        line = f"{at_s:.6f} {node} {kind} {detail}"
        self._hash.update(line.encode())
        self._hash.update(b"\n%d\n" % len(content))
        self._hash.update(content)
        self.counts[kind] += 1
        self.tail.append(line)

    def digest(self) -> str:
        """32 hexadecimal digits over everything recorded so far; "" of a trace that was not wanted."""
        return self._hash.copy().hexdigest() if self.wanted else ""
