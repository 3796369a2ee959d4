"""How one life of a worker reaches each shard: through the relay, directly, or by memory that both share.

Decides which shards are dialled where and offered memory, and who has proved to have it. Never asks anybody and never
computes.
"""

from __future__ import annotations

from collections.abc import Iterable

from zasgd.core.messages import Attached, Welcome
from zasgd.core.node import Dial, shard_peer

DATA_PATHS = ("auto", "arena", "direct", "relay")
"""auto: memory shared with the shards of the same host, else the relay. arena: shared memory with any shard that can.

direct: a connection to each shard. relay: through the broker, its one address.
"""


class Paths:
    """The ways to the shards of a run. dialled: shard -> `direct` or `relay`. attached: those that share memory.

    token: what stands in the region that was offered; region: its name, empty while there is none.
    """

    def __init__(self, wanted: str, host: str, msg: Welcome) -> None:
        """wanted: one of DATA_PATHS. host: this worker's, empty if it may share memory with nobody by itself."""
        self.attached: set[int] = set()
        self.region = ""
        self.token = b""
        self._relay = f"tcp://*:{msg.data_port}"
        self._endpoints = msg.endpoints
        near = {k for k in range(msg.num_shards) if host and msg.hosts[k : k + 1] == (host,)}
        # Asked without the broker in between where memory may be shared: its messages are small and many.
        direct = near if wanted in ("auto", "arena") else set(range(msg.num_shards)) if wanted == "direct" else set()
        self.dialled = {k: "direct" if k in direct else "relay" for k in range(msg.num_shards)}
        self.offers_memory = wanted == "arena" or (wanted == "auto" and bool(near))

    def dials(self) -> list[Dial]:
        """The way to each shard, as it is now."""
        return [self._dial(k) for k in self.dialled]

    def fall_back(self, shards: Iterable[int]) -> list[Dial]:
        """Reach these through the broker, which is always reached."""
        changed = list(shards)
        self.dialled |= dict.fromkeys(changed, "relay")
        return [self._dial(k) for k in changed]

    def proved(self, msg: Attached) -> None:
        """A shard has told what it read in the region: it shares the memory if that is what stands there."""
        if self.region and msg.token == self.token:
            self.attached.add(msg.shard)

    @property
    def name(self) -> str:
        """As `zasgd status` shows it."""
        ways = {"arena" if k in self.attached else way for k, way in self.dialled.items()}
        return "+".join(sorted(ways))

    def _dial(self, shard: int) -> Dial:
        direct = self.dialled[shard] == "direct"
        return Dial(shard_peer(shard), self._endpoints[shard] if direct else self._relay)
