"""A gradient's memory is free again once every shard has acknowledged its push: nothing here reads it later.

Large frames leave straight from that memory (vLLM's PR 50053 sent what had been overwritten meanwhile).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from net_rig import Running, bound_port

from zasgd.core import wire
from zasgd.core.messages import Ack, Message, Push
from zasgd.core.node import Computed, Dial, Effect, PeerId, Send, Stop, shard_peer
from zasgd.net import sockets
from zasgd.net.links import MemberLinks, ShardLinks
from zasgd.net.loop import Loop

NUM_PUSHES = 200
NUM_SHARDS = 2
SIZES = (600_000, 300_000)
"""Elements per shard: pieces of 1 MiB, which are not copied, and at the end one that is smaller."""


class Node:
    """A core without timers or slow work."""

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        return []

    def on_timer(self, now: float) -> list[Effect]:
        return []

    def next_deadline(self) -> float:
        return math.inf

    def validate(self) -> None:
        pass


class Summing(Node):
    """A shard that keeps the checksum of every push and acknowledges it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sums: list[int] = []

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        assert isinstance(msg, Push)
        if msg.part == 0:
            self.sums.append(0)
        for piece in msg.grads:
            self.sums[-1] = zlib.crc32(piece, self.sums[-1])
        if not msg.commit:
            return []
        return [Send(peer, Ack(shard=self.number, seq=msg.seq))]


class Overwriting(Node):
    """A worker that writes its next gradient where the last one lies as soon as all shards have acknowledged that."""

    def __init__(self) -> None:
        self.grads = tuple(np.empty(size, np.float32) for size in SIZES)
        self.sums: list[list[int]] = [[] for _ in SIZES]
        self.waiting: set[int] = set()
        self.seq = 0
        self._rng = np.random.default_rng(20240917)

    def begin(self) -> list[Effect]:
        self.seq += 1
        self.waiting = set(range(NUM_SHARDS))
        effects: list[Effect] = []
        for shard, grads in enumerate(self.grads):
            self._rng.random(out=grads, dtype=np.float32)
            self.sums[shard].append(zlib.crc32(grads))
            effects += self._push(shard, grads)
        return effects

    def _push(self, shard: int, grads: Any) -> list[Effect]:
        cuts = list(wire.split(grads))
        return [
            Send(
                shard_peer(shard),
                Push(
                    shard=shard, seq=self.seq, layout_hash="x", part=i, parts=len(cuts), offset=offset, grads=pieces,
                    commit=i == len(cuts) - 1,
                ),
            )
            for i, (offset, pieces) in enumerate(cuts)
        ]  # fmt: skip

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        assert isinstance(msg, Ack)
        self.waiting.discard(msg.shard)
        if self.waiting:
            return []
        return self.begin() if self.seq < NUM_PUSHES else [Stop("all pushed", 0)]


@pytest.fixture
def ctx() -> Iterator[Any]:
    found = sockets.context()
    yield found
    found.destroy(linger=0)


def test_a_buffer_overwritten_as_soon_as_all_shards_have_acknowledged_arrived_whole_200_times(ctx: Any) -> None:
    broker = sockets.router(ctx, "127.0.0.1:0", control=True)  # nobody answers there
    address = f"127.0.0.1:{bound_port(broker)}"
    shards, running, endpoints = [], [], []
    for number in range(NUM_SHARDS):
        data = sockets.router(ctx, "127.0.0.1:0", control=False)
        endpoints.append(f"tcp://127.0.0.1:{bound_port(data)}")
        shards.append(Summing(number))
        running.append(Running(Loop(shards[-1], ShardLinks(ctx, address, data)), f"shard {number}"))
    worker = Overwriting()
    loop = Loop(worker, MemberLinks(ctx, address))
    loop.post(lambda now: [Dial(shard_peer(k), endpoint) for k, endpoint in enumerate(endpoints)])
    loop.post(lambda now: worker.begin())
    pushing = Running(loop, "worker")
    try:
        assert pushing.result(60.0) == Stop("all pushed", 0)
        assert [shard.sums for shard in shards] == worker.sums
        assert [len(sums) for sums in worker.sums] == [NUM_PUSHES] * NUM_SHARDS
    finally:
        for each in (*running, pushing):
            each.loop.post(lambda now: [Stop("the test is over", 0)])
            each.thread.join(10)
        broker.close(0)
