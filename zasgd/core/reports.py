"""What became of a worker's batches, until the broker has it on record.

Decides which renewal carries what and when an entry may be forgotten; never decides how a batch ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from zasgd.core.messages import Applied, Grant, Refused

KINDS = ("final", "torn", "refused")
"""Acknowledged by all shards; by some and refused by others; by none."""


class Reports:
    """Entries in the order in which they arose. Each goes with every renewal until one that carried it is answered."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, str, Applied | Refused]] = []
        self._num_refused = 0

    def add(self, kind: str, what: Applied) -> None:
        """Take note of a push that is `final` or `torn`; no renewal has carried it yet."""
        self._entries.append((0, kind, what))

    def add_refused(self, grants: Iterable[Grant], reason: str) -> None:
        """Take note of batches that no shard applied; numbered, since being told twice must not count twice."""
        for grant in grants:
            self._num_refused += 1
            self._entries.append((0, "refused", Refused(grant, reason, self._num_refused)))

    def carry(self, renewal: int) -> dict[str, tuple[Applied | Refused, ...]]:
        """The fields of Renew or Bye; entries that travel for the first time are marked with this renewal."""
        self._entries = [(first or renewal, kind, what) for first, kind, what in self._entries]
        return {kind: tuple(what for _, k, what in self._entries if k == kind) for kind in KINDS}

    def answered(self, renewal: int) -> None:
        """The broker has on record what this renewal and earlier ones carried."""
        self._entries = [entry for entry in self._entries if not 0 < entry[0] <= renewal]

    @property
    def num_pushes(self) -> int:
        """Pushes that some shard applied and the broker has not confirmed."""
        return sum(1 for _, kind, _ in self._entries if kind != "refused")
