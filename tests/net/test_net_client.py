"""Questions to a broker, addresses, ports, the relay and the loop itself: what people and hosts run into first."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from net_rig import RawPeer, Rig, Stepper, header, until

from zasgd.core import wire
from zasgd.core.messages import Done, Err, Kind, Message, Observe, Params
from zasgd.core.node import BROKER, Computed, Effect, PeerId, Send, Stop, shard_peer
from zasgd.net import sockets
from zasgd.net.client import BrokerError, Client
from zasgd.net.links import MemberLinks
from zasgd.net.loop import Loop
from zasgd.net.processes import host_name, run_shard
from zasgd.net.relay import Relay

# ---- a broker that is not there, or is something else ------------------------------------------------


@contextmanager
def listener(answer: Callable[[list[bytes]], list[bytes] | None]) -> Iterator[str]:
    """A ROUTER that gives every question the frames that `answer` makes of it."""
    with zmq.Context() as ctx, ctx.socket(zmq.ROUTER) as router, ctx.socket(zmq.PAIR) as stop_r:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        stop_r.bind(f"inproc://stop-{port}")

        def serve() -> None:
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(stop_r, zmq.POLLIN)
            while stop_r not in dict(poller.poll()):
                identity, *frames = router.recv_multipart()
                found = answer(frames)
                if found is not None:
                    router.send_multipart([identity, *found])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{port}"
        with ctx.socket(zmq.PAIR) as stop_w:
            stop_w.connect(f"inproc://stop-{port}")
            stop_w.send(b"")
            thread.join(10)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


QUESTIONS: dict[str, Callable[[Client, float], Any]] = {
    "describe": lambda client, patience: client.describe(patience),
    "status": lambda client, patience: client.status(patience),
    "drain": lambda client, patience: client.drain("0", patience),
    "stop": lambda client, patience: client.stop(patience),
    "expel": lambda client, patience: client.expel("here", 1, "dead", patience),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_without_a_broker_every_question_ends_with_its_address_after_the_timeout(question: str) -> None:
    address = f"127.0.0.1:{unused_port()}"
    began = time.monotonic()
    with Client(address) as client, pytest.raises(BrokerError) as raised:
        QUESTIONS[question](client, 0.3)
    assert time.monotonic() - began >= 0.3
    assert (raised.value.code, str(raised.value)) == (3, f"no broker answers at {address} (waited 0.3 s)")


def test_a_listener_that_never_answers_is_no_broker_either() -> None:
    with listener(lambda frames: None) as address, Client(address) as client:
        with pytest.raises(BrokerError, match=f"no broker answers at {address}") as raised:
            client.status(0.3)
        assert raised.value.code == 3


@pytest.mark.parametrize(
    "answer",
    [
        [b"", header(Kind.ERR, protocol=2) + b"more of it", b"\x80"],
        [b"", header(Kind.STATUS, protocol=9), b"\x80"],
    ],
    ids=["another header too", "the same header"],
)
def test_a_broker_of_another_protocol_version_is_named_in_one_line(answer: list[bytes]) -> None:
    with listener(lambda frames: answer) as address, Client(address) as client:
        with pytest.raises(BrokerError, match=f"the peer at {address} is no zasgd broker of this version") as raised:
            client.status(10)
        assert raised.value.code == 3
        assert "\n" not in str(raised.value)
        assert "protocol" in str(raised.value)


def test_a_broker_that_says_we_are_of_another_version_is_quoted() -> None:
    def answer(frames: list[bytes]) -> list[bytes]:
        err = Err(code="WRONG_PROTOCOL", text="the peer speaks protocol 1, not 2")
        return [b"", *(bytes(f) for f in wire.encode(err))]

    with listener(answer) as address, Client(address) as client, pytest.raises(BrokerError) as raised:
        client.status(10)
    assert raised.value.code == 3
    assert str(raised.value) == f"the broker at {address} refused: the peer speaks protocol 1, not 2"


@pytest.mark.parametrize("answer", [[b"", b"hello"], [b"x", b"y", b"z"], [b"", header(Kind.STATUS), b"\xc1"]])
def test_something_else_that_answers_is_named_in_one_line(answer: list[bytes]) -> None:
    with listener(lambda frames: answer) as address, Client(address) as client:
        with pytest.raises(BrokerError, match=f"the peer at {address} is no zasgd broker of this version") as raised:
            client.status(10)
        assert raised.value.code == 3
        assert "\n" not in str(raised.value)


def test_a_question_repeats_until_a_broker_that_came_late_answers() -> None:
    """byteps#37, in small: the client was there first."""
    port = unused_port()
    answers: list[dict[str, object]] = []
    with Client(f"127.0.0.1:{port}") as client:
        thread = threading.Thread(target=lambda: answers.append(client.status(20)))
        thread.start()
        with Rig(control=f"127.0.0.1:{port}"):
            thread.join(20)
    (status,) = answers
    assert status["phase"] in ("waiting for servers", "waiting for parameters")


def test_questions_are_answered_and_refusals_have_code_2() -> None:
    with Rig() as rig, Client(rig.address) as client:
        until(lambda: client.status(10)["phase"] == "waiting for parameters")
        description = client.describe(10)
        assert (description.num_shards, description.recipe) == (2, "{}")
        with pytest.raises(BrokerError, match=r"no live worker 'nobody'; there are: none") as raised:
            client.drain("nobody", 10)
        assert raised.value.code == 2
        rig.worker(name="one")
        until(lambda: rig.events("run_completed"))


def test_stop_ends_every_process_in_order() -> None:
    with Rig(num_samples=1 << 20) as rig, Client(rig.address) as client:
        worker = rig.worker()
        until(lambda: worker.node.steps >= 3)
        assert client.stop(10) == "the run is ending"
        for running in (rig.running, worker.running, *(s.running for s in rig.shards)):
            assert running.result() == Stop("the run is stopped", 0)
        (stopped,) = rig.events("run_stopped")
        assert stopped["samples"] >= 16


# ---- addresses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7470", ("127.0.0.1", 7470)),
        ("tcp://127.0.0.1:7470", ("127.0.0.1", 7470)),
        ("gpu-7.cluster_a.example:1", ("gpu-7.cluster_a.example", 1)),
        ("localhost", ("localhost", 7470)),
        ("7471", ("127.0.0.1", 7471)),
        ("0", ("127.0.0.1", 0)),
        ("*:65535", ("*", 65535)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_an_address_is_read(address: str, parts: tuple[str, int]) -> None:
    assert sockets.split_address(address) == parts


@pytest.mark.parametrize(
    "address",
    ["", ":", ":7470", "host:", "host:port", "host:65536", "host:-1", "host:7 0", "a b:1", "http://host:1", "host:1:2",
     "host:1\n", "ｈost:1", "host:१", "ipc:///tmp/x", "-x y"],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(sockets.AddressError) as raised:
        sockets.split_address(address)
    assert str(raised.value) == f"{address!r} is not HOST:PORT, for example 127.0.0.1:7470"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost"])
def test_loopback_needs_no_consent(host: str) -> None:
    assert sockets.check_bind(f"{host}:7470", insecure=False) == (host, 7470)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "10.0.0.1", "gpu-7", "1270.0.0.1", "127.evil.example", "localhost.evil"]
)
def test_anything_beyond_loopback_needs_consent(host: str) -> None:
    with pytest.raises(sockets.AddressError, match="add --insecure") as raised:
        sockets.check_bind(f"{host}:7470", insecure=False)
    assert "\n" not in str(raised.value)
    assert sockets.check_bind(f"{host}:7470", insecure=True) == (host, 7470)


@pytest.mark.parametrize("control", [True, False])
def test_a_port_in_use_is_named(control: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, sockets.context() as ctx:
        port = taken.getsockname()[1]
        with pytest.raises(sockets.BindError) as raised:
            sockets.router(ctx, f"127.0.0.1:{port}", control=control)
    assert raised.value.port == port
    assert str(raised.value) == f"cannot listen on 127.0.0.1:{port}: the port is in use"


def test_a_host_that_is_not_ours_is_named() -> None:
    with sockets.context() as ctx, pytest.raises(sockets.BindError, match=r"cannot listen on 192\.0\.2\.1:7470: ") as e:
        sockets.router(ctx, "192.0.2.1:7470", control=True)
    assert e.value.port == 7470


def test_a_relay_and_a_shard_say_the_same_of_their_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, sockets.context() as ctx:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(sockets.BindError, match="the port is in use"):
            Relay(ctx, address)
        with pytest.raises(sockets.BindError, match="the port is in use"):
            run_shard("127.0.0.1:1", address)


def test_an_endpoint_that_cannot_be_dialled_is_an_address_error() -> None:
    with sockets.context() as ctx:
        for endpoint in ("nonsense", "tcp://", "tcp://host", "ftp://host:1", "tcp://*:*"):
            with pytest.raises(sockets.AddressError, match="cannot dial"):
                sockets.dealer(ctx, endpoint, control=False)


def test_no_socket_has_a_routing_id_or_a_limit_on_data_or_waits_when_it_closes() -> None:
    with sockets.context() as ctx:
        router = sockets.router(ctx, "127.0.0.1:0", control=False)
        dealer = sockets.dealer(ctx, str(router.get_string(zmq.LAST_ENDPOINT)), control=False)
        for sock in (router, dealer):
            assert sock.getsockopt(zmq.ROUTING_ID) == b""
            assert (sock.sndhwm, sock.rcvhwm, sock.linger) == (0, 0, 0)
            assert sock.getsockopt(zmq.MAXMSGSIZE) == 16 * 1024 * 1024 + 64 * 1024
            assert (sock.getsockopt(zmq.SNDBUF), sock.getsockopt(zmq.RCVBUF)) == (-1, -1)
            assert sock.getsockopt(zmq.HEARTBEAT_TTL) < 65_500
            sock.close()


# ---- the relay ---------------------------------------------------------------------------------------


def test_the_relay_drops_and_counts_what_it_cannot_forward() -> None:
    with Rig() as rig:
        Stepper(rig).leave()
        with RawPeer(rig.relay_address, rig.ctx) as peer:
            lost = [
                [b""],
                [b"", header(Kind.PULL)],
                [b"", b"short", b""],
                [b"", header(Kind.PULL, shard=2), b"\x80"],
                [b"", header(Kind.PULL, shard=0xFFFF), b"\x80"],
                [b"", header(Kind.PULL, shard=0, magic=b"no"), b"\x80"],
                [b"r"] * 5 + [b"", header(Kind.PULL, shard=0), b"\x80"],
                [b"", header(Kind.PULL, shard=0), *[b"x"] * 66],
            ]
            for frames in lost:
                peer.send(frames)
            assert isinstance(peer.ask(Observe(run=rig.config.run, shard=0, seq=1)), Err | Params)
            assert rig.relay.dropped == {"malformed or for no shard": len(lost)}


def test_the_relay_counts_answers_to_workers_that_have_gone() -> None:
    """What a dealer to no one is told comes back to the relay and goes nowhere."""
    with sockets.context() as ctx, ctx.socket(zmq.ROUTER) as shard:
        shard.linger = 0
        port = shard.bind_to_random_port("tcp://127.0.0.1")
        relay = Relay(ctx, "127.0.0.1:0")
        relay.start()
        relay.dial(0, f"tcp://127.0.0.1:{port}")
        peer = RawPeer(f"127.0.0.1:{relay.port}", ctx)

        def arrived() -> bool:
            peer.send([b"", header(Kind.PULL, shard=0), b"\x80"])
            return bool(shard.poll(100))

        until(arrived)
        back, _, *frames = shard.recv_multipart()
        shard.send_multipart([back, b"\0someone else", b"", *frames])
        until(lambda: relay.dropped["worker departed"] == 1)
        peer.sock.close(0)
        relay.stop()


def test_a_shard_that_moved_is_dialled_anew() -> None:
    with sockets.context() as ctx, ctx.socket(zmq.ROUTER) as old, ctx.socket(zmq.ROUTER) as new:
        old.linger = new.linger = 0
        ports = [sock.bind_to_random_port("tcp://127.0.0.1") for sock in (old, new)]
        relay = Relay(ctx, "127.0.0.1:0")
        relay.start()
        with RawPeer(f"127.0.0.1:{relay.port}") as peer:
            for sock, port in zip((old, new), ports, strict=True):
                relay.dial(0, f"tcp://127.0.0.1:{port}")

                def arrived(sock: Any = sock) -> bool:
                    peer.send([b"", header(Kind.PULL, shard=0), b"\x80"])
                    return bool(sock.poll(100))

                until(arrived)
        relay.stop()


# ---- the loop and a member's links -------------------------------------------------------------------


class Recorder:
    """A core that writes down what it hears and wants nothing but one deadline."""

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.heard: list[tuple[PeerId, Message]] = []
        self.timers = 0

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        self.heard.append((peer, msg))
        return []

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        return []

    def on_timer(self, now: float) -> list[Effect]:
        self.timers += 1
        self.deadline = math.inf
        return [Stop("the time was up", 0)] if self.heard else []

    def next_deadline(self) -> float:
        return self.deadline

    def validate(self) -> None:
        pass


def test_what_waited_in_the_socket_is_heard_before_a_timer_fires() -> None:
    """A loop that stood still must not judge a peer whose renewal is in its own queue."""
    with sockets.context() as ctx, ctx.socket(zmq.ROUTER) as broker:
        broker.linger = 0
        port = broker.bind_to_random_port("tcp://127.0.0.1")
        links = MemberLinks(ctx, f"127.0.0.1:{port}")
        (control,) = links.sockets()
        until(lambda: control.poll(0, zmq.POLLOUT), what="the connection")
        control.send_multipart([b"", b""])
        identity, *_ = broker.recv_multipart()
        broker.send_multipart([identity, b"", *(bytes(f) for f in wire.encode(Done(text="I live")))])
        until(lambda: control.poll(0))
        node = Recorder(deadline=0.0)
        assert Loop(node, links).run() == Stop("the time was up", 0)
        ((peer, msg),) = node.heard
        assert (peer, node.timers) == (BROKER, 1)
        assert isinstance(msg, Done)


def test_a_post_and_a_signal_end_a_poll_that_waits_for_ever() -> None:
    for wake in ("post", "wakeup_fd"):
        with sockets.context() as ctx:
            node = Recorder()
            loop = Loop(node, MemberLinks(ctx, f"127.0.0.1:{unused_port()}"))
            ended: list[Stop] = []
            thread = threading.Thread(target=lambda loop=loop, ended=ended: ended.append(loop.run()))
            thread.start()
            if wake == "post":
                loop.post(lambda now: [Stop("posted", 0)])
            else:  # as signal.set_wakeup_fd does: a byte without an event, then the event
                os.write(loop.wakeup_fd, bytes([signal.SIGTERM]))
                loop.post(lambda now: [Stop("posted", 0)])
            thread.join(10)
            assert ended == [Stop("posted", 0)]


def test_a_post_after_the_end_is_forgotten() -> None:
    with sockets.context() as ctx:
        loop = Loop(Recorder(), MemberLinks(ctx, f"127.0.0.1:{unused_port()}"))
        loop.post(lambda now: [Stop("over", 0)])
        loop.run()
        loop.post(lambda now: [Send(BROKER, Done())])


def test_a_full_pipe_of_wake_ups_is_wake_up_enough() -> None:
    with sockets.context() as ctx:
        loop = Loop(Recorder(), MemberLinks(ctx, f"127.0.0.1:{unused_port()}"))
        while select.select([], [loop.wakeup_fd], [], 0)[1]:
            os.write(loop.wakeup_fd, bytes(4096))
        loop.post(lambda now: [Stop("posted", 0)])
        assert loop.run() == Stop("posted", 0)


def test_what_a_member_cannot_send_or_dial_is_counted() -> None:
    with sockets.context() as ctx:
        links = MemberLinks(ctx, f"127.0.0.1:{unused_port()}")
        frames = wire.encode(Done())
        links.send(shard_peer(0), frames)
        links.dial(shard_peer(0), "nonsense")
        links.send(shard_peer(0), frames)
        links.send(BROKER, frames)
        assert links.dropped == {
            "not dialled": 2,
            "an endpoint that cannot be dialled": 1,
            "not connected or full": 1,
        }
        links.close()


def test_shards_behind_one_relay_share_one_socket_and_the_star_stands_for_the_brokers_host() -> None:
    with sockets.context() as ctx:
        links = MemberLinks(ctx, f"127.0.0.1:{unused_port()}")
        for k in range(3):
            links.dial(shard_peer(k), "tcp://*:7999")
        assert len(links.sockets()) == 2
        assert links.sockets()[1].get_string(zmq.LAST_ENDPOINT) == "tcp://127.0.0.1:7999"
        links.close()


def test_our_own_name_is_one_that_a_shard_can_advertise() -> None:
    assert sockets.split_address(f"{host_name()}:1")[0] == host_name()
