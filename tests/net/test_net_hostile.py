"""Payloads that were written to do harm, sent to a live broker, its relay and a shard over real sockets.

Each is answered with ERR, or counted and dropped where docs/wire.md says so; nothing is unpickled, nobody falls over,
and after each of them a client that behaves still trains.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
import zmq
from net_rig import DEADLINE_S, SMALL, RawPeer, Rig, Stepper, header, until
from zmq.utils.monitor import recv_monitor_message

from zasgd.core import wire
from zasgd.core.codec import MAX_BUFFERS
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Ack,
    Bye,
    Describe,
    Description,
    Done,
    Err,
    Expel,
    Grant,
    GrantMsg,
    Hello,
    Kind,
    Message,
    Observe,
    Params,
    Probe,
    Pull,
    Push,
    Rejoin,
    Renew,
    Result,
    Status,
    Welcome,
)  # fmt: skip
from zasgd.net import sockets

pytestmark = pytest.mark.timeout(60)
INF = float("inf")


class Target:
    """What one test sends its payloads with: fresh connections and fresh, well-behaved clients of one live run."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._clients: list[Stepper] = []
        self.control = RawPeer(rig.address, rig.ctx)
        self.relay = RawPeer(rig.relay_address, rig.ctx)
        self.shard = RawPeer(rig.shard(0).address, rig.ctx)

    @cached_property
    def client(self) -> Stepper:
        """At the shards' own sockets."""
        return self._joined(direct=True)

    @cached_property
    def relayed(self) -> Stepper:
        """Through the relay."""
        return self._joined(direct=False)

    def _joined(self, *, direct: bool) -> Stepper:
        found = Stepper(self.rig, direct=direct)
        self._clients.append(found)
        return found

    def peer(self, where: str) -> RawPeer:
        peer: RawPeer = getattr(self, where)
        return peer

    def still_trains(self) -> None:
        """Broker, relay and shards live; both shards apply a push of each client; the broker says so."""
        witness, relayed = Stepper(self.rig, direct=True), Stepper(self.rig)
        for client in (witness, relayed):
            assert isinstance(client.renew(), GrantMsg)
            for shard in range(2):
                client.steps(shard)
        report = witness.control.ask(Status())
        assert isinstance(report, Status)
        assert report.report is not None
        assert report.report["phase"] == "training"
        for client in (witness, relayed):
            client.leave()

    @property
    def alive(self) -> bool:
        return self.rig.running.alive and all(shard.running.alive for shard in self.rig.shards)

    def close(self) -> None:
        for client in self._clients:
            client.leave()
        for peer in (self.control, self.relay, self.shard):
            peer.sock.close(0)


class Runs:
    """The live run; a new one after a test that broke it, so that one failure stays one failure."""

    def __init__(self) -> None:
        self.target: Target | None = None
        self.rig = self._new()

    def _new(self) -> Rig:
        rig = Rig(num_samples=1 << 20, window_bytes=1 << 20)
        seeder = Stepper(rig)
        seeder.open()
        seeder.leave()
        return rig

    def renew(self) -> None:
        self.rig.__exit__()
        self.rig = self._new()


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    found = Runs()
    yield found
    found.rig.__exit__()


@pytest.fixture
def target(runs: Runs) -> Iterator[Target]:
    found = Target(runs.rig)
    sound = False
    try:
        yield found
        found.still_trains()
        sound = found.alive
        found.close()
    finally:
        if not sound:
            runs.renew()
    assert sound, "somebody fell over"


# ---- frames that are no message ------------------------------------------------------------------------


def body(**fields: Any) -> bytes:
    return bytes(msgpack.packb(fields, default=msgpack_numpy.encode))


def pull(**changed: Any) -> list[bytes]:
    return [b"", header(Kind.PULL, shard=0, **changed), body()]


ENVELOPES: dict[str, tuple[list[bytes], str]] = {
    "no delimiter": (pull()[1:], "BAD_FRAME"),
    "one frame that is not even a header": ([b"hello"], "BAD_FRAME"),
    "a delimiter and nothing after it": ([b""], "BAD_FRAME"),
    "four routing frames beside its own": ([b"r"] * 4 + pull(), "BAD_FRAME"),
    "nine routing frames": ([b"r"] * 9 + pull(), "BAD_FRAME"),
    "F0 alone": (pull()[:2], "BAD_FRAME"),
    "100 frames": ([*pull(num_buffers=98), *[b"x"] * 98], "BAD_FRAME"),
    "fewer buffers than F0 says": ([*pull(num_buffers=2, num_bytes=8), b"1234"], "BAD_FRAME"),
    "fewer bytes than F0 says": ([*pull(num_buffers=1, num_bytes=8), b"1234"], "BAD_FRAME"),
    "a buffer nobody refers to": ([*pull(num_buffers=1, num_bytes=4), b"1234"], "BAD_FRAME"),
    "wrong magic": (pull(magic=b"ps"), "BAD_FRAME"),
    "a header cut short": ([b"", header(Kind.PULL)[:-1], body()], "BAD_FRAME"),
    "a header too long": ([b"", header(Kind.PULL) + b"\0", body()], "BAD_FRAME"),
    "protocol 2": (pull(protocol=2), "WRONG_PROTOCOL"),
    "protocol 2 with another header": ([b"", b"ZA\2" + bytes(61), body()], "WRONG_PROTOCOL"),
    "kind 0": ([b"", header(0), body()], "UNKNOWN_KIND"),
    "kind 99": ([b"", header(99), body()], "UNKNOWN_KIND"),
    "kind 255": ([b"", header(255), body()], "UNKNOWN_KIND"),
    "unknown flags": (pull(flags=0x80), "BAD_FRAME"),
    "COMMIT on a pull": (pull(flags=1), "BAD_FRAME"),
    "part 1 of 1": (pull(part=1), "BAD_FRAME"),
    "no parts": (pull(parts=0), "BAD_FRAME"),
    "a body that is no map": ([b"", header(Kind.PULL), msgpack.packb([1, 2])], "BAD_FRAME"),
    "a body that is no msgpack": ([b"", header(Kind.PULL), b"\xc1"], "BAD_FRAME"),
    "a body with something after it": ([b"", header(Kind.PULL), body() + b"\0"], "BAD_FRAME"),
    "an empty body": ([b"", header(Kind.PULL), b""], "BAD_FRAME"),
    "an unknown field": ([b"", header(Kind.PULL), body(exec="rm -rf /")], "BAD_FIELD"),
    "a required field missing": ([b"", header(Kind.PUSH), body()], "BAD_FIELD"),
    "a field of another type": ([b"", header(Kind.PUSH), body(layout_hash=7)], "BAD_FIELD"),
    "a negative offset": ([b"", header(Kind.PUSH), body(layout_hash="", offset=-1)], "BAD_FIELD"),
    "an extension type of its own": (
        [b"", header(Kind.PUSH), body(layout_hash=msgpack.ExtType(5, b"x"))],
        "BAD_FRAME",
    ),
    "a timestamp": ([b"", header(Kind.PUSH), body(layout_hash=msgpack.Timestamp(1))], "BAD_FRAME"),
    "300 nested arrays": ([b"", header(Kind.PUSH), b"\x81\xa1x" + b"\x91" * 300 + b"\xc0"], "BAD_FRAME"),
    "300 headers of 2^32 items": ([b"", header(Kind.PUSH), b"\xdd\xff\xff\xff\xff" * 300], "BAD_FRAME"),
    "a megabyte of headers": ([b"", header(Kind.HELLO), b"\xdd\x00\x00\xff\xff" * (1 << 18)], "BAD_FRAME"),
    "a body over 64 KiB": ([b"", header(Kind.PULL), body(x=bytes(1 << 16))], "TOO_LARGE"),
    "a hello over 4 MiB": ([b"", header(Kind.HELLO), body(role=bytes(4 << 20))], "TOO_LARGE"),
    "a million empty maps": ([b"", header(Kind.HELLO), b"\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000], "BAD_FRAME"),
    "an inline body over 16 MiB": ([b"", header(Kind.PUSH, flags=4), bytes((16 << 20) + 1)], "TOO_LARGE"),
    "a buffer over 4 MiB": (
        [b"", header(Kind.PUSH, num_buffers=1, num_bytes=(4 << 20) + 1), body(), bytes((4 << 20) + 1)],
        "TOO_LARGE",
    ),
    "seq of 2^64 - 1": (pull(seq=(1 << 64) - 1), "BAD_FIELD"),
    "version of 2^64 - 1": (pull(version=(1 << 64) - 1), "BAD_FIELD"),
}


@pytest.mark.parametrize("where", ["control", "shard"])
@pytest.mark.parametrize("name", ENVELOPES)
def test_frames_that_are_no_message_are_refused(target: Target, where: str, name: str) -> None:
    frames, code = ENVELOPES[name]
    assert target.peer(where).refused(frames) == code


@pytest.mark.parametrize("name", ENVELOPES)
def test_the_relay_passes_on_or_drops_and_lives(target: Target, name: str) -> None:
    """What names a connected shard is refused there; the rest is dropped in silence and counted."""
    frames, code = ENVELOPES[name]
    before = target.rig.relay.dropped.total()
    target.relay.send(frames)
    target.relay.say(Observe(run=target.rig.config.run, shard=0, seq=4711))
    answer = target.relay.hear()
    if isinstance(answer, Err) and answer.seq != 4711:
        assert answer.code == code
        answer = target.relay.hear()
    else:
        assert target.rig.relay.dropped.total() == before + 1
    assert isinstance(answer, Params)


# ---- arrays ----------------------------------------------------------------------------------------------


class Canary:
    """What unpickling it leaves behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def hostile_arrays(canary: Path) -> dict[str, Any]:
    packed = np.array([Canary(canary)], dtype=object).dumps()

    def array(dtype: Any, data: bytes = bytes(16), kind: bytes = b"", shape: Any = (2,), nd: Any = True) -> Any:
        return {b"nd": nd, b"type": dtype, b"kind": kind, b"shape": shape, b"data": data}

    return {
        "|O with the sender's pointers": array("|O"),
        "O": array("O"),
        "kind O with a canary": array("|O", packed, b"O"),
        "kind O with a canary and an honest dtype": array("<f4", packed, b"O"),
        "a structure with an object": array([["a", "|O"]], kind=b"V"),
        "|V0": array("|V0", b"", shape=[1 << 60]),
        "|S0": array("|S0", b"", shape=[1 << 60]),
        "<U4": array("<U4"),
        "M8[s]": array("M8[s]"),
        ">f4": array(">f4", bytes(8)),
        "<f16": array("<f16", bytes(32)),
        "<c8": array("<c8"),
        "type is a number": array(7),
        "shape of -1": array("<f4", shape=[-1]),
        "shape of 2^63 elements of nothing": array("<f4", b"", shape=[0, 1 << 62, 1 << 62]),
        "shape of nine axes": array("<f4", bytes(4), shape=[1] * 9),
        "shape and bytes disagree": array("<f4", bytes(12)),
        "nd is 1": array("<f4", bytes(8), nd=1),
        "a boolean that is 2": array("|b1", b"\2\2"),
        "complex": {b"complex": True, b"data": b"1+2j"},
        "a buffer that is not there": array("<f4", msgpack.ExtType(1, b"\0\0")),
    }


ARRAY_NAMES = list(hostile_arrays(Path("/nowhere")))


@pytest.mark.parametrize("where", ["control", "shard", "relay"])
@pytest.mark.parametrize("name", ARRAY_NAMES)
def test_hostile_arrays_are_refused_and_nothing_is_unpickled(
    target: Target, where: str, name: str, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    content = msgpack.packb({"layout_hash": "x", "grads": [hostile_arrays(canary)[name]]})
    code = target.peer(where).refused([b"", header(Kind.PUSH, shard=0, flags=1), content])
    assert code in ("BAD_DTYPE", "BAD_SHAPE", "BAD_FRAME")
    assert not canary.exists()


@pytest.mark.parametrize("where", ["control", "shard"])
def test_1000_damaged_pushes_are_refused_or_were_still_messages(target: Target, where: str) -> None:
    """Bits flipped anywhere in F0 and F1. The last answer is to a question asked after all of them."""
    rng = random.Random(7)
    peer = RawPeer(target.rig.address if where == "control" else target.rig.shard(0).address)
    whole = wire.encode(target.client.push(0, seq=0, version=1 << 40, inline=True))
    for _ in range(1000):
        frames = [bytearray(f) for f in whole]
        for _ in range(rng.randrange(1, 4)):
            frame = rng.choice(frames)
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        peer.send([b"", *(bytes(f) for f in frames)])
    question: Message = Describe() if where == "control" else Observe(run=target.rig.config.run, shard=0, seq=4711)
    peer.say(question)
    until(lambda: isinstance(peer.hear(), Description | Params))
    peer.sock.close(0)
    peer._ctx.term()


# ---- the size of a frame ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["control", "shard", "relay"])
def test_a_frame_over_the_limit_ends_the_connection(target: Target, where: str) -> None:
    addresses = {"control": target.rig.address, "shard": target.rig.shard(0).address, "relay": target.rig.relay_address}
    with RawPeer(addresses[where]) as peer:
        watch = peer.sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.send([b"", header(Kind.PUSH, shard=0), bytes(sockets.MAX_INLINE_MESSAGE_BYTES + 1)])
        assert watch.poll(int(DEADLINE_S * 1000)), "still connected"
        assert recv_monitor_message(watch)["event"] == zmq.EVENT_DISCONNECTED
        peer.sock.disable_monitor()
        watch.close()


# ---- an ERR is never answered ----------------------------------------------------------------------------


ERRS: dict[str, list[bytes]] = {
    "well-formed": [bytes(frame) for frame in wire.encode(Err(code="FENCED", text="you"))],
    "retryable": [bytes(frame) for frame in wire.encode(Err(code="NOT_READY", retryable=True))],
    "of another run": [bytes(frame) for frame in wire.encode(Err(run=1, shard=0, incarnation=9, code="X"))],
    "malformed": [header(Kind.ERR, shard=0), b"\xc1"],
    "of another protocol": [header(Kind.ERR, shard=0, protocol=2), body(code="WRONG_PROTOCOL")],
    "of another protocol with another header": [b"ZA\2" + bytes([Kind.ERR]) + bytes(60), body()],
}


@pytest.mark.parametrize("where", ["control", "shard", "relay"])
@pytest.mark.parametrize("name", ERRS)
def test_an_err_is_not_answered(target: Target, where: str, name: str) -> None:
    """Two peers could refuse each other for ever. The first answer is to the question that came after it."""
    peer = target.peer(where)
    for _ in range(3):
        peer.send([b"", *ERRS[name]])
    run = target.rig.config.run
    answer = peer.ask(Describe() if where == "control" else Observe(run=run, shard=0, seq=1))
    assert isinstance(answer, Description | Params)


# ---- the control port ------------------------------------------------------------------------------------


def layout_rows(*rows: list[Any]) -> dict[str, Any]:
    return {"role": "worker", "token": b"t", "num_samples": 8, "layout": list(rows)}


HELLOS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "no tensors": (layout_rows(), {"NO_LAYOUT", "LAYOUT_MISMATCH"}),
    "2^63 - 1 elements": (layout_rows(["w", [(1 << 63) - 1], "float32", "params", 0]), {"BAD_LAYOUT"}),
    "2^80 elements over two axes": (layout_rows(["w", [1 << 40, 1 << 40], "float32", "params", 0]), {"BAD_LAYOUT"}),
    "2^41 elements over three tensors": (
        layout_rows(*(["w" * i, [1 << 40], "float32", "params", 0] for i in (1, 2, 3))),
        {"BAD_LAYOUT"},
    ),
    "nine axes": (layout_rows(["w", [1] * 9, "float32", "params", 0]), {"BAD_LAYOUT"}),
    "a negative size": (layout_rows(["w", [-1], "float32", "params", 0]), {"BAD_LAYOUT"}),
    "a fractional size": (layout_rows(["w", [1.5], "float32", "params", 0]), {"BAD_LAYOUT"}),
    "one name twice": (layout_rows(*[["w", [1], "float32", "params", 0]] * 2), {"BAD_LAYOUT"}),
    "a name of 2,000 characters": (layout_rows(["w" * 2000, [1], "float32", "params", 0]), {"BAD_LAYOUT"}),
    "dtype object": (layout_rows(["w", [1], "object", "params", 0]), {"BAD_LAYOUT"}),
    "section secrets": (layout_rows(["w", [1], "float32", "secrets", 0]), {"BAD_LAYOUT"}),
    "group 65536": (layout_rows(["w", [1], "float32", "params", 1 << 16]), {"BAD_LAYOUT"}),
    "a group without hyper-parameters": (
        layout_rows(["w", [1], "float32", "params", 3]),
        {"BAD_LAYOUT", "LAYOUT_MISMATCH"},
    ),
    "no parameters": (
        layout_rows(["n", [1], "int64", "counters", 0]),
        {"NO_LAYOUT", "LAYOUT_MISMATCH"},
    ),
    "statistics larger than a frame": (
        layout_rows(["w", [1], "float32", "params", 0], ["m", [1 << 22], "float32", "stats", 0]),
        {"BAD_LAYOUT", "LAYOUT_MISMATCH"},
    ),
    "a text for a layout": ({**layout_rows(), "layout": "w"}, {"BAD_LAYOUT"}),
    "70,000 tensors": (layout_rows(*(["w", [], "float32", "params", 0] for _ in range(70_000))), {"BAD_FRAME"}),
    "no samples": (
        {**layout_rows(["w", [1], "float32", "params", 0]), "num_samples": 0},
        {"NO_LAYOUT", "LAYOUT_MISMATCH"},
    ),
    "2^63 - 1 samples": (
        {"role": "worker", "token": b"t", "num_samples": (1 << 63) - 1, "layout": SMALL.to_plain()},
        {"BAD_FIELD", "LAYOUT_MISMATCH"},
    ),
    "2^63 samples": (
        {"role": "worker", "token": b"t", "num_samples": 1 << 63, "layout": SMALL.to_plain()},
        {"BAD_FIELD"},
    ),
    "another role": ({"role": "root", "token": b"t"}, {"BAD_ROLE"}),
    "a role of 60,000 characters": ({"role": "r" * 60_000, "token": b"t"}, {"BAD_ROLE"}),
    "no token": ({"role": "worker", "token": b""}, {"BAD_FIELD"}),
    "a token of a megabyte": ({"role": "worker", "token": bytes(1 << 20)}, {"BAD_FIELD"}),
    "a token that is text": ({"role": "worker", "token": "t"}, {"BAD_FIELD"}),
}  # fmt: skip


@pytest.mark.parametrize("name", HELLOS)
def test_an_absurd_hello_is_refused(target: Target, name: str) -> None:
    fields, codes = HELLOS[name]
    assert target.control.refused([b"", header(Kind.HELLO), body(**fields)]) in codes


@pytest.mark.parametrize("name", HELLOS)
def test_an_absurd_first_hello_leaves_a_run_that_others_can_begin(fresh: Rig, name: str) -> None:
    fields, codes = HELLOS[name]
    with RawPeer(fresh.address, fresh.ctx) as peer:
        assert peer.refused([b"", header(Kind.HELLO), body(**fields)]) in codes
    assert fresh.report()["phase"] == "waiting for parameters"


@pytest.fixture(scope="module")
def fresh() -> Iterator[Rig]:
    """A run that nobody has shown a layout; in the end it is still one that can be trained."""
    with Rig(epochs=3) as found:
        until(lambda: found.report()["phase"] == "waiting for parameters")
        yield found
        found.worker()
        assert found.completed()["samples"] == 3 * 64


ENDPOINTS = {
    "empty": "",
    "no scheme": "nonsense",
    "no port": "tcp://host",
    "wildcards": "tcp://*:*",
    "another scheme": "ftp://host:1",
    "a port out of range": "tcp://host:99999999",
    "a bracket left open": "tcp://[::1",
    "a host that nobody has": "tcp://no-such-host.invalid:7",
    "70,000 characters": "tcp://" + "x" * 70_000 + ":1",
    "4 MB of characters": "x" * 4_000_000,
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_server_that_cannot_be_dialled_leaves_broker_and_relay_alive(name: str) -> None:
    with Rig(num_servers=1) as rig, RawPeer(rig.address, rig.ctx) as peer, RawPeer(rig.relay_address, rig.ctx) as data:
        rig.shard(0)
        assert isinstance(peer.ask(Hello(role="server", token=b"evil", endpoint=ENDPOINTS[name])), Welcome | Err)
        answer = data.ask(Observe(run=rig.config.run, shard=0, seq=1))
        assert isinstance(answer, Err)
        assert answer.code == "UNSEEDED"
        assert isinstance(peer.ask(Status()), Status)


@pytest.mark.parametrize("field", ["name", "host"])
@pytest.mark.parametrize("role", ["server", "worker", "eval"])
def test_names_of_a_megabyte_do_not_spoil_the_report(role: str, field: str) -> None:
    with Rig(num_shards=2, num_servers=1 if role == "server" else 2) as rig, RawPeer(rig.address, rig.ctx) as peer:
        rig.shard(0)
        if role != "server":
            Stepper(rig).close()
        long: dict[str, Any] = {field: "x" * 4_100_000}
        assert isinstance(
            peer.ask(Hello(role=role, token=b"long", endpoint="tcp://127.0.0.1:9", **long)), Welcome | Err
        )
        report = peer.ask(Status())
        assert isinstance(report, Status)
        assert len(repr(report.report)) < 10_000


WRONG_IDS: dict[str, tuple[type[Message], dict[str, Any], str]] = {
    "renewal of another run": (Renew, {"run": 1}, "WRONG_RUN"),
    "renewal without a run": (Renew, {"run": 0}, "WRONG_RUN"),
    "renewal of an incarnation never given": (Renew, {"incarnation": 999}, "FENCED"),
    "rejoin of an incarnation never given": (Rejoin, {"incarnation": (1 << 32) - 1}, "FENCED"),
    "renewal as a shard that does not exist": (Renew, {"shard": 77, "role": "server"}, "FENCED"),
    "renewal as a shard that is another process": (Renew, {"shard": 0, "role": "server"}, "FENCED"),
    "a message for shards": (Pull, {}, "UNEXPECTED"),
    "an answer of its own": (Done, {}, "UNEXPECTED"),
    "more grants arrived than were issued": (Renew, {"got": 1 << 62, "seq": 1 << 62}, "BAD_FIELD"),
}


@pytest.mark.parametrize("name", WRONG_IDS)
def test_members_that_are_not_are_refused(target: Target, name: str) -> None:
    cls, changed, code = WRONG_IDS[name]
    bystander = Stepper(target.rig)
    answer = target.control.ask(cls(**{**bystander.ids, **changed}))
    assert isinstance(answer, Err)
    assert answer.code == code
    assert isinstance(target.control.ask(Bye(**bystander.ids)), Done)
    bystander.close()


@pytest.mark.parametrize("number", [math.nan, INF, -INF, 1e308, -1e308, (1 << 64) - 1, -(1 << 63), True, "1e3", None])
def test_facts_that_are_no_useful_numbers_do_not_spoil_the_report(target: Target, number: Any) -> None:
    """Whatever a worker says of itself, STATUS is still answered, with numbers that JSON has."""
    liar = Stepper(target.rig)
    names = ("samples", "loss_sum", "step_s", "lag")
    for at in names:
        assert isinstance(liar.renew(facts={name: number if name == at else 1.0 for name in names}), GrantMsg)
        report = target.control.ask(Status())
        assert isinstance(report, Status)
        assert report.report is not None
        mine = next(w for w in report.report["workers"] if w["incarnation"] == liar.ids["incarnation"])
        assert all(math.isfinite(v) for v in mine.values() if isinstance(v, int | float)), mine
        assert report.report["loss"] is None or math.isfinite(report.report["loss"])
    assert isinstance(target.control.ask(Bye(**liar.ids)), Done)
    liar.close()


def test_reports_about_batches_that_one_does_not_hold_change_nothing(target: Target) -> None:
    stranger = Stepper(target.rig)
    before = target.rig.report()["ledger"]
    everything = [[s, [[0, b, 8 * b, 8 * b + 8] for b in range(100)]] for s in range(3)]
    frames = [header(Kind.RENEW, **stranger.ids, seq=1), body(final=everything, torn=everything, refused=[])]
    target.control.send([b"", *frames])
    assert isinstance(target.control.hear(), GrantMsg)
    absurd = [[1, [[(1 << 63) - 1, (1 << 63) - 1, 0, (1 << 63) - 1]]]]
    target.control.send([b"", header(Kind.BYE, **stranger.ids), body(final=absurd, reason="r" * 60_000)])
    assert isinstance(target.control.hear(), Done)
    assert target.rig.report()["ledger"] == before
    stranger.close()


def test_strangers_results_and_expulsions_change_nothing(target: Target) -> None:
    run = target.rig.config.run
    target.control.say(Result(run=run, seq=1, epoch=0, scores={"test_accuracy": 1.0}))
    assert isinstance(target.control.ask(Expel(host="nowhere", pid=1)), Done)
    target.control.say(Params(run=run, shard=0, seq=1))
    assert target.rig.report()["scores"] == {}


# ---- the data port -----------------------------------------------------------------------------------------


F4 = np.float32
PUSHES: dict[str, tuple[dict[str, Any], str]] = {
    "2^63 - 1 samples": ({"num_samples": (1 << 63) - 1}, "BAD_FIELD"),
    "more samples than its grants hold": ({"num_samples": 9, "grants": (Grant(0, 0, 0, 8),)}, "BAD_FIELD"),
    "wrong run": ({"run": 1}, "WRONG_RUN"),
    "an incarnation never admitted": ({"incarnation": 999}, "FENCED"),
    "the incarnation of another worker": ({"worker": 999}, "FENCED"),
    "wrong shard": ({"shard": 1}, "WRONG_SHARD"),
    "shard 65535": ({"shard": 0xFFFF}, "WRONG_SHARD"),
    "another layout": ({"layout_hash": "0" * 16}, "LAYOUT_MISMATCH"),
    "another layout of 60,000 characters": ({"layout_hash": "f" * 60_000}, "LAYOUT_MISMATCH"),
    "hyper-parameters": ({"hyper": {"lr": 1e9}}, "HYPER"),
    "a version never sent": ({"version": 1 << 40}, "NO_SNAPSHOT"),
    "offset beyond the slice": ({"offset": 1 << 62}, "BAD_SHAPE"),
    "one element too many": ({"grads": (np.ones(49, F4),)}, "BAD_SHAPE"),
    "one element too few": ({"grads": (np.ones(47, F4),)}, "INCOMPLETE"),
    "nothing": ({"grads": ()}, "INCOMPLETE"),
    "empty pieces": ({"grads": tuple(np.ones(0, F4) for _ in range(MAX_BUFFERS))}, "INCOMPLETE"),
    "a hole at the beginning": ({"offset": 1, "grads": (np.ones(47, F4),)}, "INCOMPLETE"),
    "statistics that the model has not": ({"stats": np.ones(3, F4)}, "BAD_SHAPE"),
    "counters that the model has not": ({"counters": np.ones(3, np.int64)}, "BAD_SHAPE"),
    "NaN": ({"grads": (np.full(48, math.nan, F4),)}, "NONFINITE"),
    "one infinite element": ({"grads": (np.array([1.0] * 47 + [INF], F4),)}, "NONFINITE"),
    "a double that float32 has not": ({"grads": (np.full(48, 1e300),), "inline": True}, "NONFINITE"),
}


# Through the relay a push reaches the shard that it names.
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (p, n)
        for p in ("client", "relayed")
        for n, (changed, _) in PUSHES.items()
        if p == "client" or "shard" not in changed
    ],
)
def test_a_bad_push_is_refused_and_changes_nothing(target: Target, path: str, name: str) -> None:
    changed, code = PUSHES[name]
    client: Stepper = getattr(target, path)
    pulled = client.pull(0)
    answer = client.exchange(0, client.push(0, **{"version": pulled.version, **changed}))
    assert isinstance(answer, Err)
    assert answer.code == code
    after = client.pull(0)
    assert after.version == pulled.version
    assert np.array_equal(after.params[0], pulled.params[0])


def test_grads_that_are_no_vector_of_floats_are_refused(target: Target) -> None:
    for array in (np.ones((6, 8), F4), np.ones(48, np.int64), np.float32(1)):
        content = body(layout_hash=SMALL.hash, grads=[array])
        frames = [b"", header(Kind.PUSH, **target.client.ids, shard=0, seq=target.client.next_seq(), flags=1), content]
        assert target.shard.refused(frames) in ("BAD_SHAPE", "BAD_DTYPE", "BAD_FIELD")


def test_a_seq_far_below_the_window_is_refused_and_one_inside_it_answered_again(target: Target) -> None:
    client = target.client
    client.steps(0)
    last = client.seq
    for _ in range(70):
        client.pull(0)
    old = client.exchange(0, client.push(0, seq=last))
    assert (old.code, old.seq) == ("OLD_SEQ", last)
    assert client.exchange(0, Probe(**client.ids, shard=0, seq=last)).code == "OLD_SEQ"
    assert isinstance(client.pull(0, seq=client.seq), Params)
    assert client.exchange(0, client.push(0, seq=0)).code == "OLD_SEQ"


def test_a_probe_of_what_was_never_pushed(target: Target) -> None:
    answer = target.client.exchange(0, Probe(**target.client.ids, shard=0, seq=target.client.next_seq()))
    assert (answer.code, answer.retryable) == ("UNKNOWN_SEQ", True)


def parts(client: Stepper, version: int, *cuts: tuple[int, int]) -> list[Push]:
    """A push of ones in parts (start, stop), the last of which commits."""
    seq = client.next_seq()
    return [
        client.push(
            0, seq=seq, version=version, part=i, parts=len(cuts), offset=start, grads=(np.ones(stop - start, F4),),
            commit=i == len(cuts) - 1,
        )
        for i, (start, stop) in enumerate(cuts)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 16), (32, 48)],
        [(0, 32), (16, 48)],
        [(0, 48), (0, 16)],
        [(16, 32), (16, 32)],
        [(0, 16), (16, 32)],
    ],
    ids=["a hole", "an overlap", "a part over the whole", "the middle twice", "the end missing"],
)
def test_parts_that_do_not_make_the_slice_are_not_applied(target: Target, cuts: list[tuple[int, int]]) -> None:
    client = target.client
    version = client.pull(0).version
    answer = client.exchange(0, *parts(client, version, *cuts))
    assert (answer.code, answer.retryable) == ("INCOMPLETE", True)
    assert client.pull(0).version == version


def test_parts_in_any_order_with_one_repeated_are_applied_once(target: Target) -> None:
    client = target.client
    pulled = client.pull(0)
    first, second, last = parts(client, pulled.version, (0, 16), (16, 32), (32, 48))
    acked = client.exchange(0, second, first, second, last)
    assert isinstance(acked, Ack)
    assert acked.version == pulled.version + 1
    assert np.array_equal(acked.params[0], pulled.params[0] - 1)


def test_parts_that_never_commit_are_bounded_by_the_window() -> None:
    """A megabyte of window, a slice of 8 MiB... one push may always be staged whole; more than that is refused."""
    big = Layout((TensorSpec("w", (1 << 20,)),))
    with Rig(num_shards=1, layout=big, window_bytes=1 << 20) as rig:
        client = Stepper(rig)
        client.open()
        version = client.pull(0).version
        seq = client.next_seq()
        part = {"seq": seq, "version": version, "commit": False, "parts": 99}
        overlapping = [client.push(0, **part, part=i, offset=i, grads=(np.ones(1 << 19, F4),)) for i in range(3)]
        answer = client.exchange(0, *overlapping)
        assert (answer.code, answer.retryable) == ("WINDOW", True)
        resident = rig.shard(0).running.look(lambda: rig.shard(0).node.clients[client.ids["incarnation"]].num_bytes)
        assert resident <= 3 * big.sizes["params"] * 4
        whole = tuple(np.ones(1 << 19, F4) for _ in range(2))
        assert isinstance(client.exchange(0, client.push(0, version=version, grads=whole)), Ack)
        client.close()


def test_an_inline_pull_of_more_than_16_mib_comes_in_parts_that_can_be_read() -> None:
    big = Layout((TensorSpec("w", (5 << 20,)),))
    with Rig(num_shards=1, layout=big) as rig:
        client = Stepper(rig, initial=np.arange(5 << 20, dtype=F4))
        client.open()
        client.data[0].say(Pull(**client.ids, shard=0, seq=client.next_seq(), inline=True))
        answers = [client.data[0].hear() for _ in range(5)]
        assert [(a.part, a.parts, a.inline) for a in answers] == [(i, 5, True) for i in range(5)]
        whole = np.concatenate([piece for a in answers for piece in a.params])
        assert np.array_equal(whole, np.arange(5 << 20, dtype=F4))
        client.close()


def test_a_life_that_is_over_pushes_nothing(target: Target) -> None:
    zombie = Stepper(target.rig, direct=True)
    version = zombie.pull(0).version
    assert isinstance(zombie.control.ask(Bye(**zombie.ids)), Done)
    client = target.rig.shard(0).node.clients
    until(lambda: zombie.ids["incarnation"] not in client, what="the fence")
    assert zombie.exchange(0, zombie.push(0, version=version)).code == "FENCED"
    zombie.close()


def test_the_largest_seq_does_not_end_the_run_when_its_owner_leaves(target: Target) -> None:
    odd = Stepper(target.rig, direct=True)
    largest = (1 << 63) - 1
    pulled = odd.pull(0, seq=largest - 1)
    assert isinstance(odd.exchange(0, odd.push(0, seq=largest, version=pulled.version)), Ack)
    assert isinstance(odd.control.ask(Bye(**odd.ids)), Done)
    until(lambda: odd.ids["incarnation"] not in target.rig.broker.run.members.members, what="the fence")
    odd.close()


def test_many_grants_in_many_pushes_do_not_end_the_run_when_their_owner_leaves(target: Target) -> None:
    """Sixty-four pushes that each name the most grants a push may name: their record still fits into one answer."""
    odd = Stepper(target.rig, direct=True)
    grants = tuple(Grant(1 << 40, (1 << 40) + i, i << 40, (i << 40) + 1) for i in range(1024))
    version = odd.pull(0).version
    for _ in range(64):
        answer = odd.exchange(0, odd.push(0, version=version, grants=grants, num_samples=1024))
        version = answer.version if isinstance(answer, Ack) else version
    assert isinstance(odd.control.ask(Bye(**odd.ids)), Done)
    until(lambda: odd.ids["incarnation"] not in target.rig.broker.run.members.members, what="the fence")
    odd.close()


# ---- the same without assertions ---------------------------------------------------------------------------


def test_the_same_payloads_are_refused_under_python_O(tmp_path: Path) -> None:
    """`python -O` takes every `assert` out: no check of ours may have been one."""
    script = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}]
        import test_net_hostile as cases
        from pathlib import Path

        def must(condition, what):
            if not condition:
                raise SystemExit(f"under -O: {{what}}")

        must(not __debug__, "this is not -O")
        rig = cases.Runs().rig
        target = cases.Target(rig)
        for name, (frames, code) in cases.ENVELOPES.items():
            for where in ("control", "shard"):
                found = target.peer(where).refused(frames)
                must(found == code, (where, name, found))
        canary = Path({str(tmp_path / "canary")!r})
        for name, array in cases.hostile_arrays(canary).items():
            content = cases.msgpack.packb({{"layout_hash": "x", "grads": [array]}})
            found = target.shard.refused([b"", cases.header(cases.Kind.PUSH, shard=0, flags=1), content])
            must(found in ("BAD_DTYPE", "BAD_SHAPE", "BAD_FRAME"), (name, found))
        must(not canary.exists(), "the canary sang")
        for name, (changed, code) in cases.PUSHES.items():
            version = target.client.pull(0).version
            found = target.client.exchange(0, target.client.push(0, **{{"version": version, **changed}}))
            must(getattr(found, "code", None) == code, (name, found))
        for name, (fields, codes) in cases.HELLOS.items():
            found = target.control.refused([b"", cases.header(cases.Kind.HELLO), cases.body(**fields)])
            must(found in codes, (name, found))
        target.still_trains()
        must(target.alive, "somebody fell over")
        target.close()
        rig.__exit__()
        print("all refused")
        """
    )
    found = subprocess.run(
        [sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert (found.returncode, found.stdout) == (0, "all refused\n"), found.stderr
