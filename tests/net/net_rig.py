"""A run over real sockets in this process: broker, relay and shards in threads, each core checked after every event.

And raw peers that say what no client of ours would say. Nobody here sleeps: everything waits for a condition with a
deadline.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from zasgd.core import report, wire
from zasgd.core.broker import Broker
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import Ack, Bye, Done, Err, Hello, Init, Message, Params, Pull, Push, Renew, Welcome
from zasgd.core.node import Compute, Computed, Effect, Note, PeerId, Save, Stop
from zasgd.core.parameters import ShardConfig
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.run import BrokerConfig
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard
from zasgd.core.worker import Gradient, GradientTask, Worker, WorkerConfig
from zasgd.net import sockets
from zasgd.net.links import BrokerLinks, MemberLinks, ShardLinks
from zasgd.net.loop import Loop
from zasgd.net.processes import new_run_id, new_token
from zasgd.net.relay import Relay

DEADLINE_S = 10.0
SMALL = Layout((TensorSpec("w", (60,)), TensorSpec("b", (4,))))
"""80 elements with padding: 48 on the first of two shards, 32 on the second."""
F0 = struct.Struct("<2sBBHHIIQQIHHII")


def until(condition: Callable[[], Any], within_s: float = DEADLINE_S, what: str = "the condition") -> Any:
    """Look again and again until `condition` holds, and return what it found."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {within_s:g} s"
        threading.Event().wait(0.002)
    return found


class Checked:
    """A core whose invariants are checked after every event."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        return self._checked(self.node.on_message(now, peer, msg))

    def on_done(self, now: float, done: Computed) -> list[Effect]:
        return self._checked(self.node.on_done(now, done))

    def on_timer(self, now: float) -> list[Effect]:
        return self._checked(self.node.on_timer(now))

    def next_deadline(self) -> float:
        return float(self.node.next_deadline())

    def validate(self) -> None:
        self.node.validate()

    def _checked(self, effects: list[Effect]) -> list[Effect]:
        self.node.validate()
        return effects


class Running:
    """A loop in a thread of its own; what the thread raises comes out of `result`."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.loop = loop
        self._ended: queue.SimpleQueue[Stop | BaseException] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._ended.put(self.loop.run())
        except BaseException as e:  # for the test, which raises it
            self._ended.put(e)

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def result(self, within_s: float = DEADLINE_S) -> Stop:
        """How the loop ended."""
        ended = self._ended.get(timeout=within_s)
        self._ended.put(ended)
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def look(self, question: Callable[[], Any], within_s: float = DEADLINE_S) -> Any:
        """Have the loop's thread answer `question` between two events."""
        answers: list[Any] = []

        def ask(now: float) -> list[Effect]:
            answers.append(question())
            return []

        self.loop.post(ask)
        until(lambda: answers or not self.alive, within_s, "an answer of the loop")
        if not answers:
            raise AssertionError(f"the loop is over: {self.result()}")
        return answers[0]


class Rig:
    """A broker, its relay and its shards on loopback ports of the kernel's choice."""

    def __init__(
        self,
        *,
        num_shards: int = 2,
        num_servers: int | None = None,
        layout: Layout = SMALL,
        num_samples: int = 64,
        batch_size: int = 8,
        epochs: int = 1,
        lease_s: float = 10.0,
        rule: RuleSpec | None = None,
        lr: float = 1.0,
        window_bytes: int = 1 << 30,
        control: str = "127.0.0.1:0",
        loop: type[Loop] = Loop,
        **more: Any,
    ) -> None:
        self.num_shards, self.layout, self.num_samples, self.epochs = num_shards, layout, num_samples, epochs
        self.notes: list[Note] = []
        self.saved: list[Save] = []
        self._stack = ExitStack()
        self.ctx = sockets.context(num_shards)
        self._stack.callback(self.ctx.destroy, 0)
        self.relay = Relay(self.ctx, "127.0.0.1:0")
        self._stack.callback(self.relay.stop)
        self.links = BrokerLinks(self.ctx, control, self.relay)
        self.port = bound_port(self.links.sockets()[0])
        rule, schedule = rule or RuleSpec("asgd"), Schedule(lr=lr, epochs=epochs)
        shard = ShardConfig(num_shards, rule, (GroupSpec(),), schedule, window_bytes)
        self.config = BrokerConfig(
            run=new_run_id(), recipe="{}", num_shards=num_shards, epochs=epochs, batch_size=batch_size,
            shard_config=shard.to_json(), lease_s=lease_s, window_bytes=window_bytes,
            **{"data_port": self.relay.port, **more},
        )  # fmt: skip
        self.broker = Broker(time.monotonic(), self.config)
        self.relay.start()
        self.loop = loop(Checked(self.broker), self.links, note=self.notes.append, save=self.saved.append)
        self.running = Running(self.loop, "broker")
        self.shards = [
            RunningShard(self.ctx, self.address) for _ in range(num_shards if num_servers is None else num_servers)
        ]
        self.workers: list[RunningWorker] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def relay_address(self) -> str:
        return f"127.0.0.1:{self.relay.port}"

    def lead_data_to(self, port: int) -> None:
        """Newcomers hear of another data port: that of a proxy in front of the relay."""
        self.running.look(lambda: setattr(self.broker.run, "config", replace(self.config, data_port=port)))

    def shard(self, number: int) -> RunningShard:
        """The process that the broker made shard `number`."""
        return until(lambda: next((s for s in self.shards if s.node.number == number), None), what="a shard's welcome")

    def worker(self, address: str = "", **how: Any) -> RunningWorker:
        """One more worker core in a thread; its links are its own, and lead through the relay unless told otherwise."""
        relayed = {"data_path": "relay", **how}
        found = RunningWorker(self.ctx, address or self.address, self.layout, self.num_samples, **relayed)
        self.workers.append(found)
        return found

    def events(self, event: str) -> list[dict[str, Any]]:
        """The fields of the broker's notes of one kind."""
        return [dict(note.fields) for note in list(self.notes) if note.event == event]

    def report(self) -> dict[str, Any]:
        """What STATUS says."""
        found: dict[str, Any] = self.running.look(lambda: report.status(self.broker.run, time.monotonic()))
        return found

    def completed(self, within_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for the end of the run: everybody has ended in order; returns the broker's summary."""
        assert self.running.result(within_s) == Stop("the run is completed", 0)
        for shard in self.shards:
            assert shard.running.result().code == 0
        return self.events("run_completed")[0]

    def flat(self) -> np.ndarray[Any, Any]:
        """The parameters that the broker's side wrote at the end."""
        flat = np.zeros(self.layout.sizes["params"], np.float32)
        for section, start, values in self.saved[-1].content["pieces"]:
            if section == "params":
                flat[start : start + values.size] = values
        return flat

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        for running in (self.running, *(s.running for s in self.shards), *(w.running for w in self.workers)):
            if running.alive:
                running.loop.post(lambda now: [Stop("the test is over", 0)])
        for running in (self.running, *(s.running for s in self.shards), *(w.running for w in self.workers)):
            running.thread.join(DEADLINE_S)
        self._stack.close()


class RunningShard:
    """One server in a thread, as `run_shard` sets it up."""

    def __init__(self, ctx: Any, broker: str) -> None:
        data = sockets.router(ctx, "127.0.0.1:0", control=False)
        self.address = f"127.0.0.1:{bound_port(data)}"
        self.node = Shard(time.monotonic(), new_token(), f"tcp://{self.address}", "here", broker_timeout_s=20)
        self.links = ShardLinks(ctx, broker, data)
        self.loop = Loop(Checked(self.node), self.links)
        self.running = Running(self.loop, "shard")


Gradients = Callable[[GradientTask], Any]


class RunningWorker:
    """A worker core in one thread that computes inline: a test's gradient takes no time."""

    def __init__(
        self,
        ctx: Any,
        broker: str,
        layout: Layout,
        num_samples: int,
        *,
        gradient: Gradients | None = None,
        initial: np.ndarray[Any, Any] | None = None,
        pid: int = 0,
        **config: Any,
    ) -> None:
        self.notes: list[Note] = []
        self.size = layout.sizes["params"]
        values = np.zeros(self.size, np.float32) if initial is None else initial
        seed = {"params": values, "stats": np.empty(0, np.float32), "counters": np.empty(0, np.int64)}
        config = {"connect_timeout_s": 20.0, "broker_timeout_s": 20.0, "host": "here", "pid": pid, **config}
        self.node = Worker(time.monotonic(), new_token(), WorkerConfig(**config), layout, num_samples, lambda: seed)
        self.gradient: Gradients = gradient or (lambda task: ones(self.size, task))
        self.links = MemberLinks(ctx, broker)
        self.loop = Loop(Checked(self.node), self.links, compute=self._compute, note=self.notes.append)
        self.running = Running(self.loop, "worker")

    def _compute(self, effect: Compute) -> None:
        result = self.gradient(effect.task)
        self.loop.post(lambda now: self.loop.node.on_done(now, Computed(effect.task, result)))


def ones(size: int, task: GradientTask, value: float = 1.0) -> Gradient:
    """The gradient whose every element is `value`."""
    no_stats, no_counters = np.empty(0, np.float32), np.empty(0, np.int64)
    return Gradient(np.full(size, value, np.float32), no_stats, no_counters, task.grants[0].num_samples, 1.0, True)


def bound_port(sock: Any) -> int:
    return sockets.split_address(str(sock.get_string(zmq.LAST_ENDPOINT)))[1]


# ---- raw peers ---------------------------------------------------------------------------------------


class RawPeer:
    """A DEALER that sends whatever frames it is given and reads answers with our strict decoder."""

    def __init__(self, address: str, ctx: Any = None) -> None:
        self._ctx = ctx or zmq.Context()
        self._own = ctx is None
        self.sock = self._ctx.socket(zmq.DEALER)
        self.sock.linger = 0
        self.sock.sndhwm = self.sock.rcvhwm = 0
        self.sock.connect(f"tcp://{address}")

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close(0)
        if self._own:
            self._ctx.term()

    def send(self, frames: Sequence[Any]) -> None:
        """Frames as they are, delimiter included."""
        self.sock.send_multipart(list(frames))

    def say(self, msg: Message) -> None:
        """A well-formed message."""
        self.send([b"", *wire.encode(msg)])

    def hear(self, within_s: float = DEADLINE_S) -> Message:
        """The next answer."""
        assert self.sock.poll(int(within_s * 1000)), f"no answer within {within_s:g} s"
        empty, *frames = self.sock.recv_multipart()
        assert empty == b""
        return wire.decode(frames)

    def ask(self, msg: Message, within_s: float = DEADLINE_S) -> Message:
        """One question and its answer."""
        self.say(msg)
        return self.hear(within_s)

    def refused(self, frames: Sequence[Any]) -> str:
        """The code of the ERR that answers these frames; sent again while garbage is over its rate and not answered."""

        def answered() -> bool:
            self.send(frames)
            return bool(self.sock.poll(500))

        until(answered, what="an answer")
        answer = self.hear()
        assert isinstance(answer, Err), answer
        return answer.code


def header(kind: int, **changed: Any) -> bytes:
    """F0 of a message without buffers."""
    fields = {
        "magic": b"ZA", "protocol": 1, "kind": kind, "flags": 0, "shard": 0xFFFF, "worker": 0, "incarnation": 0,
        "seq": 0, "version": 0, "run": 0, "part": 0, "parts": 1, "num_buffers": 0, "num_bytes": 0, **changed,
    }  # fmt: skip
    return F0.pack(*fields.values())


# ---- one client, spelled out -------------------------------------------------------------------------


class Stepper:
    """A worker that does one thing at a time, through the relay or at the shards' own sockets."""

    def __init__(
        self, rig: Rig, *, direct: bool = False, name: str = "", initial: np.ndarray[Any, Any] | None = None
    ) -> None:
        self.rig = rig
        self.initial = np.zeros(rig.layout.sizes["params"], np.float32) if initial is None else initial
        self.control = RawPeer(rig.address, rig.ctx)
        hello = Hello(role="worker", token=new_token(), name=name, layout=rig.layout, num_samples=rig.num_samples)
        welcome = self._joined(hello)
        assert isinstance(welcome, Welcome), welcome
        self.ids = {"run": welcome.run, "worker": welcome.worker, "incarnation": welcome.incarnation}
        self.seq = self.renewals = self.got = 0
        shards = range(rig.num_shards)
        self._relay = RawPeer(rig.relay_address, rig.ctx)
        self.data = {k: RawPeer(rig.shard(k).address, rig.ctx) if direct else self._relay for k in shards}
        self.slices = rig.layout.slices("params", rig.num_shards)

    def _joined(self, hello: Message) -> Message:
        def answer() -> Message | None:
            found = self.control.ask(hello)
            return None if isinstance(found, Err) and found.retryable else found

        found: Message = until(answer, what="a welcome")
        return found

    def renew(self, **report: Any) -> Any:
        """Renew the lease; returns the GRANT."""
        self.renewals += 1
        answer: Any = self.control.ask(
            Renew(**self.ids, seq=self.renewals, got=self.got, steps=self.renewals, **report)
        )
        return answer

    def open(self) -> Any:
        """Seed if asked to, and wait until the run is open; returns the GRANT."""

        def grant() -> Any:
            found = self.renew()
            assert not isinstance(found, Err), found
            if found.seed:
                self.seed()
            return found if found.open else None

        return until(grant, what="the opening of the run")

    def open_with(self, values: Callable[[Any], list[np.ndarray[Any, Any]]]) -> Any:
        """As `open`, seeding each slice with `values` of it in pieces of at most one frame."""
        self._values = values
        return self.open()

    def seed(self) -> None:
        """INIT to every shard, in parts where a slice is long."""
        self.seq += 1
        for k, part in enumerate(self.slices):
            cuts = list(wire.split(self.initial[part.start : part.stop]))
            parts = [
                Init(
                    **self.ids, shard=k, seq=self.seq, part=i, parts=len(cuts), layout_hash=self.rig.layout.hash,
                    offset=offset, params=pieces,
                )
                for i, (offset, pieces) in enumerate(cuts)
            ]  # fmt: skip
            self.exchange(k, *parts)

    def exchange(self, shard: int, *messages: Message) -> Any:
        """Send messages to a shard; its next answer."""
        for msg in messages:
            self.data[shard].say(msg)
        return self.data[shard].hear()

    def pull(self, shard: int, **changed: Any) -> Any:
        return self.exchange(shard, Pull(**{**self.ids, "shard": shard, "seq": self.next_seq(), **changed}))

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def push(self, to: int, /, **changed: Any) -> Any:
        """The committing push of a gradient of ones that is well-formed but for what is changed."""
        fields = {
            **self.ids, "shard": to, "seq": self.next_seq(), "layout_hash": self.rig.layout.hash, "commit": True,
            "grads": (np.ones(self.slices[to].size, np.float32),), "num_samples": 1, **changed,
        }  # fmt: skip
        return Push(**fields)

    def steps(self, shard: int) -> None:
        """Pull and push once: the shard applies it and says so."""
        pulled = self.pull(shard)
        assert isinstance(pulled, Params), pulled
        acked = self.exchange(shard, self.push(shard, version=pulled.version))
        assert isinstance(acked, Ack), acked
        assert acked.version == pulled.version + 1
        assert np.array_equal(acked.params[0], pulled.params[0] - 1), "the gradient was not applied once"

    def leave(self) -> None:
        """BYE, answered, unless this life is over already."""
        assert isinstance(self.control.ask(Bye(**self.ids)), Done)
        self.close()

    def close(self) -> None:
        for peer in (self.control, self._relay, *self.data.values()):
            peer.sock.close(0)
