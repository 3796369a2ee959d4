"""One process of each role around its core: sockets, signals, threads, and the way out.

Decides nothing about training. Each function blocks until its node stops and returns the Stop. A first SIGINT or
SIGTERM asks the node to leave in order, a second one ends the process at once.
"""

from __future__ import annotations

import gc
import os
import queue
import resource
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import zmq

from zasgd.core.broker import Broker
from zasgd.core.node import Computed, Effect, Node, Note, Save, Stop
from zasgd.core.run import BrokerConfig
from zasgd.core.shard import Shard
from zasgd.core.worker import Failed
from zasgd.net import sockets
from zasgd.net.arena import Arena, default_folder
from zasgd.net.heap import give_back_heap, keep_heap
from zasgd.net.links import BrokerLinks, MemberLinks, ShardLinks
from zasgd.net.loop import Loop
from zasgd.net.record import RecordWriter
from zasgd.net.relay import Relay

Post = Callable[[Callable[[float], list[Effect]]], None]
"""`Loop.post`."""

MEMBER_SHARDS = 4
"""A member opens its sockets before it hears how many shards there are. So many make two I/O threads: pushes leave by
one while answers come by the other."""


SWITCH_INTERVAL_S = 1e-4
"""How long a thread that computes may keep the interpreter from the loop: by Python's default, 5 ms, an answer waits
longer than a small gradient takes."""


class Leaver(Node, Protocol):
    """A core that can be asked to leave."""

    def leave(self, now: float, reason: str) -> list[Effect]:
        """Go in order; called once, by the shell."""
        ...


def new_token() -> bytes:
    """Random bytes that name this process to a broker."""
    return secrets.token_bytes(12)


def new_run_id() -> int:
    """A random 32-bit run id, never 0."""
    return secrets.randbits(32) or 1


def host_name() -> str:
    """This host, as members are listed."""
    return socket.gethostname()


def raise_file_limit() -> None:
    """As many descriptors as allowed: at the limit ZeroMQ's accept loop would spin (pyzmq#1642)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_broker(
    config: BrokerConfig,
    control: str,
    data: str,
    *,
    note: Callable[[Note], None] | None = None,
    save: Callable[[Save, Broker], None] | None = None,
    ready: Callable[[], None] | None = None,
) -> Stop:
    """Serve a run on two addresses HOST:PORT. `ready` is called once both are bound. Raises sockets.BindError."""
    raise_file_limit()
    keep_heap()
    with _context(config.num_shards) as ctx:
        relay = Relay(ctx, data)
        try:
            links = BrokerLinks(ctx, control, relay)
            node = Broker(time.monotonic(), config)
            loop = Loop(node, links, note=note, save=(lambda effect: save(effect, node)) if save else None)
            relay.start()
            if ready:
                ready()
            with _leaving_on_signals(node, loop):
                return loop.run()
        finally:
            relay.stop()


def run_shard(
    broker: str,
    bind: str,
    advertise: str = "",
    *,
    broker_timeout_s: float = 60.0,
    record_to: Path | None = None,
    record_pushes: bool = False,
) -> Stop:
    """Serve one shard of the broker's run. `bind`: HOST:PORT for data, port 0 picks one. Raises sockets.BindError.

    record_to: folder for the record that `zasgd replay` reads; record_pushes: gradients included.
    """
    raise_file_limit()
    keep_heap()
    with ExitStack() as stack:
        ctx = stack.enter_context(_context())
        record = stack.enter_context(RecordWriter(record_to)) if record_to else None
        arena = stack.enter_context(Arena(default_folder()))
        data = sockets.router(ctx, bind, control=False)
        bound_port = sockets.split_address(str(data.get_string(zmq.LAST_ENDPOINT)))[1]
        host = sockets.split_address(advertise)[0] if advertise else _reachable(sockets.split_address(bind)[0])
        port = sockets.split_address(advertise)[1] if ":" in advertise else bound_port
        node = Shard(
            time.monotonic(),
            new_token(),
            f"tcp://{host}:{port}",
            host_name(),
            os.getpid(),
            broker_timeout_s=broker_timeout_s,
            records=record is not None,
            records_pushes=record_pushes,
        )
        loop = Loop(
            node, ShardLinks(ctx, broker, data), note=_tidy_memory, record=record,
            share=arena.share, unshare=arena.unshare,
        )  # fmt: skip
        with _leaving_on_signals(node, loop):
            return loop.run()


def run_member(
    node: Leaver, broker: str, compute: Callable[[Any, Post], Any], *, note: Callable[[Note], None] | None = None
) -> Stop:
    """Run a worker or evaluator: the loop in a thread of its own, `compute(task, post)` in this one.

    So a lease is renewed while a gradient is computed; by `post` it can be told of parts that are ready. What `compute`
    raises goes to stderr with its traceback and to the node as Failed.
    """
    keep_heap()
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with Arena(default_folder()) as arena, _context(MEMBER_SHARDS) as ctx:
        loop = Loop(
            node, MemberLinks(ctx, broker), compute=lambda effect: tasks.put(effect.task), note=note,
            share=arena.share, unshare=arena.unshare,
        )  # fmt: skip
        thread = LoopThread(loop, when_over=lambda: tasks.put(None))
        with _leaving_on_signals(node, loop):
            thread.start()
            while (task := tasks.get()) is not None:
                done = Computed(task, _computed(compute, task, loop.post))
                loop.post(lambda now, done=done: node.on_done(now, done))  # type: ignore[misc]
            return thread.result()


def _tidy_memory(note: Note) -> None:
    """At the beginnings of a shard's life, before pushes wait."""
    if note.event == "welcomed":  # what importing and compiling left behind is for ever: no collector need walk it
        gc.collect()
        gc.freeze()
    elif note.event == "seeded":  # a whole model came in frames, which will not come again
        give_back_heap()


class LoopThread:
    """The thread that owns a loop; its exception, if any, comes out of `result`."""

    def __init__(self, loop: Loop, when_over: Callable[[], None]) -> None:
        self._loop = loop
        self._when_over = when_over
        self._stop: Stop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    def start(self) -> None:
        """Begin; signals stay with the main thread."""
        self._thread.start()

    def result(self) -> Stop:
        """How the loop ended."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._stop is None:
            raise RuntimeError("the loop ended without a reason")
        return self._stop

    def _run(self) -> None:
        try:
            self._stop = self._loop.run()
        except BaseException as e:  # handed to the main thread, which raises it
            self._error = e
        finally:
            self._when_over()


def _computed(compute: Callable[[Any, Post], Any], task: Any, post: Post) -> Any:
    try:
        return compute(task, post)
    except Exception as e:  # the user's model or data: its traceback belongs in this process's log
        traceback.print_exc()
        sys.stderr.flush()
        return Failed(one_line(e))


def one_line(error: BaseException) -> str:
    """Type and first line of an exception's text."""
    head = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {head[:200]}" if head else type(error).__name__


@contextmanager
def _context(num_shards: int = 1) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    ctx = sockets.context(num_shards)
    try:
        yield ctx
    finally:
        ctx.destroy(linger=2000)


@contextmanager
def _leaving_on_signals(node: Leaver, loop: Loop) -> Iterator[None]:
    """SIGINT and SIGTERM make the node leave; a second one kills."""

    def on_signal(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)
        loop.post(lambda now: node.leave(now, name))

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can take signals
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup_before = signal.set_wakeup_fd(loop.wakeup_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)


def _reachable(host: str) -> str:
    """What others can dial when we listen on `host`."""
    return host_name() if host in ("*", "0.0.0.0") else host
