"""The loop beside its sockets: shared memory, effects that a process has no use for, the order of things."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from net_rig import bound_port

from zasgd.core.messages import Message
from zasgd.core.node import Compute, Computed, Effect, Note, PeerId, Record, Save, Share, Stop, Unshare
from zasgd.core.region import Region, RegionPlan, SharedMemoryError, private_region
from zasgd.net import sockets
from zasgd.net.links import MemberLinks
from zasgd.net.loop import Loop

PLAN = RegionPlan(16, 2)
ASKED = Share("a-region", PLAN, create=True)


class Sharer:
    """A core that asks for a region, writes down what comes of it, and ends."""

    def __init__(self) -> None:
        self.done: list[Computed] = []
        self.order: list[str] = []

    def begin(self) -> list[Effect]:
        return [Note("before"), ASKED, Note("after"), Unshare("a-region"), Stop("shared", 0)]

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        return []

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        self.done.append(done)
        return [Note("shared")]

    def on_timer(self, now: float) -> list[Effect]:
        return []

    def next_deadline(self) -> float:
        return math.inf

    def validate(self) -> None:
        pass


@pytest.fixture
def links() -> Iterator[MemberLinks]:
    """Those of a member whose broker never answers."""
    with sockets.context() as ctx, sockets.router(ctx, "127.0.0.1:0", control=True) as broker:
        yield MemberLinks(ctx, f"127.0.0.1:{bound_port(broker)}")
        ctx.destroy(linger=0)


def ran(node: Sharer, links: MemberLinks, **how: Any) -> Loop:
    """A loop that has carried out what the core wants."""
    loop = Loop(node, links, **how)
    loop.post(lambda now: node.begin())
    assert loop.run() == Stop("shared", 0)
    return loop


def test_the_region_that_a_core_asks_for_is_there_before_its_next_effect(links: MemberLinks) -> None:
    node, region, left = Sharer(), private_region(PLAN), []
    ran(node, links, share=lambda asked: region, unshare=left.append, note=lambda note: node.order.append(note.event))
    assert node.order == ["before", "shared", "after"]
    ((task, result),) = [(done.task, done.result) for done in node.done]
    assert task is ASKED
    assert isinstance(result, Region)
    assert result is region
    assert left == [Unshare("a-region")]


def test_a_process_that_shares_no_memory_says_so(links: MemberLinks) -> None:
    node = Sharer()
    ran(node, links)
    (done,) = node.done
    assert isinstance(done.result, SharedMemoryError)
    assert "shares no memory" in str(done.result)


def test_effects_that_a_process_has_no_use_for_are_left_out(links: MemberLinks) -> None:
    loop = Loop(Sharer(), links)
    loop.post(lambda now: [Compute(1), Save("x", 2), Record((3,)), Note("said"), Unshare("x"), Stop("over", 0)])
    assert loop.run() == Stop("over", 0)


def test_what_the_loop_posts_to_itself_needs_no_wake_up(links: MemberLinks) -> None:
    node = Sharer()
    events: list[str] = []

    def compute(effect: Compute) -> None:
        loop.post(lambda now: [Note(f"done {effect.task}"), *([Compute(effect.task + 1)] if effect.task < 3 else last)])

    last: list[Effect] = [Stop("over", 0)]
    loop = Loop(node, links, compute=compute, note=lambda note: events.append(note.event))
    loop.post(lambda now: [Compute(1), Note("asked")])
    assert loop.run() == Stop("over", 0)
    assert events == ["asked", "done 1", "done 2", "done 3"]
