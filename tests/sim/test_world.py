"""The simulator itself, driven with toy processes: time, routes, lives, faults and the trace."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zasgd.core import wire
from zasgd.core.messages import Done, Err, Kind, Message, Push
from zasgd.core.node import (
    BROKER,
    Compute,
    Computed,
    Deadlines,
    Dial,
    Effect,
    InvariantError,
    Note,
    PeerId,
    Record,
    Save,
    Send,
    Stop,
    require,
    shard_peer,
)
from zasgd.sim.faults import Faults, Kill, Link, Network, Pause, Tamper, scattered_kills
from zasgd.sim.world import Route, Violation, World


@dataclass
class Toy:
    """A process that records what happens to it and answers from a script."""

    born_at: float
    life: int = 0
    starts_with: list[Effect] = field(default_factory=list)
    answer: Callable[[PeerId, Message], list[Effect]] = lambda peer, msg: []
    every_s: float = math.inf
    heard: list[tuple[float, PeerId, Message]] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)
    done: list[tuple[float, Any]] = field(default_factory=list)
    broken: bool = False

    def __post_init__(self) -> None:
        self.deadlines = Deadlines()
        if self.starts_with:
            self.deadlines.set("start", self.born_at)
        if self.every_s < math.inf:
            self.deadlines.set("tick", self.born_at + self.every_s)

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        self.heard.append((now - self.born_at, peer, msg))
        return self.answer(peer, msg)

    def on_done(self, now: float, done: Any) -> list[Effect]:
        self.done.append((now - self.born_at, done))
        return []

    def on_timer(self, now: float) -> list[Effect]:
        due = self.deadlines.pop_due(now)
        require(due, "a timer fired before its deadline")
        if "tick" in due:
            self.ticks.append(now - self.born_at)
            self.deadlines.set("tick", now + self.every_s)
        return self.starts_with if "start" in due else []

    def next_deadline(self) -> float:
        return self.deadlines.next()

    def validate(self) -> None:
        require(not self.broken, "the toy is broken")

    @property
    def texts(self) -> list[str]:
        return [msg.text for _, _, msg in self.heard if isinstance(msg, Done)]


def toy(**script: Any) -> Callable[[float, int], Toy]:
    return lambda now, life: Toy(now, life, **script)


def say(text: str, peer: PeerId = BROKER) -> Send:
    return Send(peer, Done(text=text))


def echo(peer: PeerId, msg: Message) -> list[Effect]:
    return [Send(peer, msg)] if isinstance(msg, Done) else []


EXACT = Link(latency_s=0.01, jitter_s=0.0)


def world_of(faults: Faults | None = None, **more: Any) -> World:
    return World(7, link=EXACT, faults=faults, **more)


# ---- time and routes ---------------------------------------------------------------------------------


def test_a_message_travels_through_the_wire_and_back_along_its_route() -> None:
    world = world_of()
    world.add("broker", toy(answer=echo))
    world.add("worker", toy(starts_with=[say("hello")]))
    world.run(1.0)
    [(at, seen_as, heard)] = world.node("broker").heard
    assert (at, seen_as) == (pytest.approx(0.01), Route("worker", 0, BROKER))
    [(at, seen_as, answer)] = world.node("worker").heard
    assert (at, seen_as, answer.text) == (pytest.approx(0.02), BROKER, "hello")
    assert answer is not heard, "decoded anew, not handed over"


def test_a_dialled_peer_is_reached_by_its_name_and_answers_under_it() -> None:
    world = world_of()
    world.add("broker", toy(starts_with=[Dial(shard_peer(1), "sim://b")]))
    world.add("b", toy(answer=echo))
    world.add("worker", toy(starts_with=[say("through the broker's link", shard_peer(1))]), at_s=0.1)
    world.run(1.0)
    assert world.node("b").texts == ["through the broker's link"]
    assert [peer for _, peer, _ in world.node("worker").heard] == [shard_peer(1)]


def test_nobody_behind_a_name_loses_the_message_and_counts_it() -> None:
    world = world_of()
    world.add("worker", toy(starts_with=[say("anyone?"), say("you?", shard_peer(0))]))
    world.run(1.0)
    assert world.trace.counts["unroutable"] == 2


def test_timers_fire_at_their_deadline_on_a_clock_of_their_own() -> None:
    world = world_of()
    world.add("early", toy(every_s=0.7), clock_offset_s=2.5e6)
    world.add("late", toy(every_s=0.7), at_s=1.0)
    world.run(7.5)
    assert world.node("early").ticks == pytest.approx([0.7 * i for i in range(1, 11)])
    assert len(world.node("late").ticks) == 9
    assert world.local_time("early") == 2.5e6 + 7.5


def test_a_moved_deadline_fires_once_at_its_new_time() -> None:
    world = world_of()
    world.add("toy", toy(every_s=5.0))
    node = lambda: world.node("toy")  # noqa: E731
    world.add("broker", toy(starts_with=[say("wake", shard_peer(0))]), at_s=1.0)
    world._names[shard_peer(0)] = "toy"
    world.at(0.5, lambda: node().deadlines.set("tick", node().born_at + 2.0))
    world.run(4.0)
    assert node().ticks == pytest.approx([2.0])


def test_messages_of_one_connection_keep_their_order_whatever_the_jitter() -> None:
    world = World(3, link=Link(0.001, jitter_s=1.0))
    world.add("broker", toy())
    world.add("worker", toy(starts_with=[say(str(i)) for i in range(50)]))
    world.run(5.0)
    assert world.node("broker").texts == [str(i) for i in range(50)]


def test_slow_work_comes_back_after_the_time_the_problem_says() -> None:
    world = world_of(problem=lambda name, life, task: (2.5, f"{name}/{life} did {task}"))
    world.add("worker", toy(starts_with=[Compute("sums")]))
    world.run(10.0)
    assert world.node("worker").done == [(pytest.approx(2.5), Computed("sums", "worker/0 did sums"))]


def test_a_signal_runs_the_shells_call_and_its_effects() -> None:
    world = world_of()
    world.add("broker", toy())
    world.add("worker", toy())
    world.at(1.0, lambda: world.signal("worker", lambda node, now: [say(f"SIGTERM at {now - node.born_at:.1f}")]))
    world.run(2.0)
    assert world.node("broker").texts == ["SIGTERM at 1.0"]


def test_notes_files_and_records_are_kept_and_stop_ends_the_process_after_its_last_words() -> None:
    world = world_of()
    world.add("broker", toy())
    rows: list[Effect] = [Record(("push", 1)), Record(("push", 2))]
    last = [Note("finished", {"steps": 3}), Save("model", b"w"), *rows, say("bye"), Stop("complete", 0)]
    world.add("worker", toy(starts_with=last, every_s=1.0))
    world.run(10.0)
    assert world.noted("finished")[0].fields == {"steps": 3}
    assert world.saved["worker", "model"] == b"w"
    assert world.records["worker"] == [("push", 1), ("push", 2)]
    assert world.node("broker").texts == ["bye"]
    assert world.stopped("worker") and not world.stopped("broker")
    assert world.node("worker").ticks == []


# ---- lives -------------------------------------------------------------------------------------------


def test_a_killed_process_hears_nothing_and_comes_back_as_a_new_one() -> None:
    world = world_of(Faults(kills=(Kill("worker", at_s=1.0, restart_after_s=1.0),)))
    world.add("broker", toy(answer=echo))
    world.add("worker", lambda now, life: Toy(now, life, starts_with=[say(f"life {life}")], every_s=0.3))
    world.at(0.995, lambda: world._send(world.processes["worker"], say("asked just before")))
    world.run(3.0)
    assert world.node("broker").texts == ["life 0", "asked just before", "life 1"]
    assert world.node("worker").texts == ["life 1"], "the answer to its former life is not its own"
    assert world.trace.counts["unroutable"] == 1


def test_a_reply_in_flight_to_a_dead_life_is_unheard() -> None:
    world = world_of(Faults(kills=(Kill("worker", at_s=0.015, restart_after_s=0.001),)))
    world.add("broker", toy(answer=echo))
    world.add("worker", lambda now, life: Toy(now, life, starts_with=[say("?")] if life == 0 else []))
    world.run(3.0)
    assert world.node("worker").life == 1
    assert world.node("worker").heard == []
    assert world.trace.counts["unheard"] == 1


@pytest.mark.parametrize(("cuts_line", "heard"), [(False, ["last words"]), (True, [])])
def test_last_words_arrive_unless_the_line_is_cut(cuts_line: bool, heard: list[str]) -> None:
    world = world_of(Faults(kills=(Kill("worker", at_s=0.005, cuts_line=cuts_line),)))
    world.add("broker", toy())
    world.add("worker", toy(starts_with=[say("last words")]))
    world.run(1.0)
    assert world.node("broker").texts == heard


def test_a_process_can_die_between_two_sends_and_after_an_event() -> None:
    kills = (Kill("half", after_sends=1), Kill("whole", after_events=1))
    world = world_of(Faults(kills=kills))
    world.add("broker", toy())
    world.add("half", toy(starts_with=[say("first half"), say("second half")]))
    world.add("whole", toy(starts_with=[say("never said")]))
    world.run(1.0)
    assert world.node("broker").texts == ["first half"]


def test_a_paused_process_reads_its_mail_in_order_before_its_timers_fire() -> None:
    order: list[str] = []

    class Witness(Toy):
        def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
            order.append(f"{now - self.born_at:.2f} {msg.text}")  # type: ignore[attr-defined]
            return []

        def on_timer(self, now: float) -> list[Effect]:
            order.append(f"{now - self.born_at:.2f} timer")
            return super().on_timer(now)

    world = world_of(Faults(pauses=(Pause("broker", at_s=0.5, for_s=30.0),)))
    world.add("broker", lambda now, life: Witness(now, life, every_s=2.0))
    for i in range(3):
        world.add(f"worker-{i}", toy(starts_with=[say(f"mail {i}")]), at_s=1.0 + i)
    world.run(31.0)
    assert order == ["30.50 mail 0", "30.50 mail 1", "30.50 mail 2", "30.50 timer"]


def test_a_process_killed_in_its_pause_does_not_wake() -> None:
    world = world_of(Faults(pauses=(Pause("toy", 1.0, 10.0),), kills=(Kill("toy", at_s=2.0, restart_after_s=1.0),)))
    world.add("toy", toy(every_s=1.0))
    world.run(12.5)
    assert world.node("toy").life == 1
    assert len(world.node("toy").ticks) == 9


# ---- faults ------------------------------------------------------------------------------------------


def test_a_tampered_message_is_lost_late_or_copied_and_the_others_are_not() -> None:
    tampers = (
        Tamper(Kind.DONE, nth=2, lose=True),
        Tamper(Kind.DONE, nth=3, late_s=30.0),
        Tamper(Kind.DONE, nth=4, copies=2),
        Tamper(Kind.ERR, lose=True),
    )
    world = world_of(Faults(tampers=tampers))
    world.add("broker", toy())
    world.add("worker", toy(starts_with=[say(str(i)) for i in range(1, 6)]))
    world.run(29.0)
    assert sorted(world.node("broker").texts) == ["1", "4", "4", "4", "5"]
    world.run(31.0)
    assert world.node("broker").texts[-1] == "3"


def test_the_rates_of_random_faults_are_those_asked_for() -> None:
    faults = Faults(drop=0.02, duplicate=0.03, stall=0.01, until_s=1.0)
    network = Network(random.Random(1), EXACT, faults)
    fates = [network.arrivals(0.0, f"{i}", "broker", Kind.PUSH) for i in range(20_000)]
    flat = [at for fate in fates for at in fate]
    assert sum(at > 29.0 for at in flat) / 20_000 == pytest.approx(0.01, rel=0.2)
    assert sum(len(fate) == 2 for fate in fates) / 20_000 == pytest.approx(0.03, rel=0.2)
    lost = sum(not fate for fate in fates) / 20_000
    assert lost == pytest.approx(0.02, rel=0.2)
    assert network.arrivals(1.0, "a", "b", Kind.PUSH) == [pytest.approx(1.01)], "the storm is over"


def test_scattered_kills_are_the_same_for_the_same_seed() -> None:
    plan = {"start_s": 10.0, "stop_s": 100.0, "restart_s": (1.0, 5.0)}
    kills = scattered_kills(["a", "b"], 60, seed=4, **plan)
    assert kills == scattered_kills(["a", "b"], 60, seed=4, **plan)
    assert len(kills) == 60
    assert {k.name for k in kills} == {"a", "b"}
    assert all(10.0 <= (k.at_s or 0) <= 100.0 for k in kills)


# ---- what the network costs ----------------------------------------------------------------------------

LINE = Link(latency_s=0.5, jitter_s=0.0, bytes_per_s=1000.0)
"""500 bytes hold a server's line for half a second."""


def network_of(*servers: str, link: Link = LINE, faults: Faults | None = None) -> Network:
    network = Network(random.Random(1), link, faults or Faults())
    for server in servers:
        network.serve(server)
    return network


def test_messages_to_one_server_at_once_pass_its_line_one_after_another() -> None:
    network = network_of("shard-0")
    found = [network.arrivals(10.0, f"worker-{i}", "shard-0", Kind.PUSH, 500) for i in range(4)]
    assert found == [[11.0], [11.5], [12.0], [12.5]]
    assert network.arrivals(20.0, "worker-0", "shard-0", Kind.PUSH, 1000) == [21.5], "idle again, no debt"


def test_two_servers_and_two_directions_share_nothing() -> None:
    network = network_of("shard-0", "shard-1")
    for _ in range(3):
        network.arrivals(0.0, "worker-0", "shard-0", Kind.PUSH, 500)
    assert network.arrivals(0.0, "worker-0", "shard-1", Kind.PUSH, 500) == [1.0]
    assert network.arrivals(0.0, "shard-0", "worker-1", Kind.ACK, 500) == [1.0]
    assert network.arrivals(0.0, "shard-0", "worker-2", Kind.ACK, 500) == [1.5]


def test_control_messages_and_peers_that_are_no_servers_pay_the_latency_alone() -> None:
    network = network_of("shard-0")
    for _ in range(10):
        network.arrivals(0.0, "worker-0", "shard-0", Kind.PUSH, 5000)
    assert network.arrivals(0.0, "broker", "shard-0", Kind.FENCE, 200) == [0.5]
    assert network.arrivals(0.0, "shard-0", "broker", Kind.RENEW, 200) == [0.5]
    assert network.arrivals(0.0, "worker-1", "broker", Kind.PUSH, 5000) == [0.5]
    [after] = network.arrivals(0.0, "worker-0", "shard-0", Kind.PROBE, 48)
    assert after == 50.5, "but nothing overtakes within one connection"


def test_a_line_without_a_limit_takes_no_time_and_a_lost_message_has_held_its_line() -> None:
    free = network_of("shard-0", link=EXACT)
    assert [free.arrivals(0.0, f"{i}", "shard-0", Kind.PUSH, 10**9) for i in range(2)] == [[0.01], [0.01]]
    network = network_of("shard-0", faults=Faults(tampers=(Tamper(Kind.PUSH, lose=True),)))
    assert network.arrivals(0.0, "worker-0", "shard-0", Kind.PUSH, 500) == []
    assert network.arrivals(0.0, "worker-1", "shard-0", Kind.PUSH, 500) == [1.5]


def test_a_world_charges_the_encoded_size_to_those_that_serve() -> None:
    gradient = Push(layout_hash="", grads=(np.zeros(1000, np.float32),), commit=True)
    size = sum(len(frame) for frame in wire.encode(gradient))
    world = World(7, link=LINE)
    world.add("broker", toy(), serves=True)
    for name in ("a", "b"):
        world.add(name, toy(starts_with=[Send(BROKER, gradient)]))
    world.run(60.0)
    assert size > 4000
    assert [at for at, _, _ in world.node("broker").heard] == pytest.approx([0.5 + n * size / 1000.0 for n in (1, 2)])


def test_a_round_trip_over_an_idle_line_takes_what_the_link_says() -> None:
    link = Link(0.2, 0.1, bytes_per_s=1000.0)
    assert link.round_trip_s(500.0) == pytest.approx(2 * (0.25 + 0.5))
    assert Link(0.2, 0.0).round_trip_s(500.0) == pytest.approx(0.4)


# ---- what the world refuses --------------------------------------------------------------------------


def test_a_broken_invariant_ends_the_run_and_names_seed_time_and_process() -> None:
    world = world_of()
    world.add("toy", toy(every_s=1.0))
    world.at(2.5, lambda: setattr(world.node("toy"), "broken", True))
    with pytest.raises(Violation, match=r"seed 7, 3\.000000 s, toy: the toy is broken"):
        world.run(5.0)


def test_a_timer_that_never_lets_time_pass_is_found() -> None:
    class Spinning(Toy):
        def next_deadline(self) -> float:
            return self.born_at

        def on_timer(self, now: float) -> list[Effect]:
            return []

    world = world_of()
    world.add("toy", Spinning)
    with pytest.raises(Violation, match="without time moving on"):
        world.run(1.0)


def test_a_watch_sees_every_event_and_may_object() -> None:
    class NoErrors:
        def handled(self, at_s: float, name: str, node: Any, message: Message | None, effects: list[Effect]) -> None:
            if isinstance(message, Err):
                raise InvariantError(f"{name} was refused: {message.code}")

        def sent(self, at_s: float, name: str, node: Any, message: Message) -> None:
            pass

    world = world_of(watches=[NoErrors()])
    world.add("broker", toy(answer=lambda peer, msg: [Send(peer, Err(code="NO"))]))
    world.add("worker", toy(starts_with=[say("please")]))
    with pytest.raises(Violation, match="worker was refused: NO"):
        world.run(1.0)


def test_a_world_that_is_told_to_validate_less_often_finds_it_later_or_never() -> None:
    for every, found_at in ((4, 4.0), (0, None)):
        world = world_of(validate_every=every)
        world.add("toy", toy(every_s=1.0))
        world.at(0.5, lambda world=world: setattr(world.node("toy"), "broken", True))
        if found_at is None:
            world.run(9.5)
            assert len(world.node("toy").ticks) == 9
        else:
            with pytest.raises(Violation, match="is broken"):
                world.run(9.5)
            assert world.now == pytest.approx(found_at)


# ---- sameness ----------------------------------------------------------------------------------------


def stormy_digest(seed: int) -> str:
    """The trace of ten chatting toys under every random fault."""
    names = [f"w{i}" for i in range(10)]
    faults = Faults(
        drop=0.05, duplicate=0.05, delay=0.1, stall=0.02,
        kills=scattered_kills(names, 20, start_s=1, stop_s=90, restart_s=(0, 5), seed=seed),
    )  # fmt: skip
    world = World(seed, faults=faults)
    world.add("broker", toy(answer=echo))
    for i in range(10):
        world.add(f"w{i}", toy(starts_with=[say("a"), say("b")], every_s=0.5, answer=echo))
    world.run(100.0)
    return world.trace.digest()


def digest_in_a_new_process(module: str, call: str, hash_seed: int) -> str:
    """What `call` of a test module returns in an interpreter with its own string hashing."""
    root = Path(__file__).parents[2]
    code = f"from tests.sim.{module} import *; print({call})"
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_same_seed_gives_the_same_trace_and_another_seed_does_not() -> None:
    assert stormy_digest(1) == stormy_digest(1)
    assert stormy_digest(1) != stormy_digest(2)


def test_a_trace_that_is_not_wanted_holds_nothing_and_changes_nothing() -> None:
    runs = []
    for traced in (True, False):
        world = World(5, faults=Faults(drop=0.1, duplicate=0.2), traced=traced)
        world.add("broker", toy(answer=echo))
        world.add("worker", toy(starts_with=[say("a"), Note("asked")], every_s=0.5, answer=echo))
        world.run(20.0)
        runs.append(world)
    seen, unseen = runs
    assert unseen.trace.digest() == "" and not unseen.trace.counts and not unseen.trace.tail
    assert seen.trace.digest() != "" and seen.trace.counts["note"] == 1
    assert [at for at, _, _ in seen.node("worker").heard] == [at for at, _, _ in unseen.node("worker").heard]


def test_the_trace_does_not_depend_on_string_hashing() -> None:
    found = {digest_in_a_new_process("test_world", "stormy_digest(1)", h) for h in (1, 2)}
    assert found == {stormy_digest(1)}
