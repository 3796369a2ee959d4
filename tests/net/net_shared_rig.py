"""A run over real sockets in this process whose shards and workers also have memory to share, each in a folder.

What every gradient is computed on is compared, to the bit, with what the shards keep as sent to that worker.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from net_rig import Checked, Rig, Running, RunningShard, bound_port, until

from zasgd.core.compression import Compression
from zasgd.core.messages import Ack, Message, Pull, Push
from zasgd.core.node import Computed, Effect, Note, PeerId, Send
from zasgd.core.parameters import ShardConfig
from zasgd.core.shard import Shard
from zasgd.core.worker import Gradient, GradientTask, Worker, WorkerConfig
from zasgd.net import sockets
from zasgd.net.arena import Arena
from zasgd.net.client import Client
from zasgd.net.links import MemberLinks, ShardLinks
from zasgd.net.loop import Loop
from zasgd.net.processes import new_token

Array = np.ndarray[Any, Any]
NONE = Compression()
Values = Callable[[GradientTask], Any]
"""The gradient of a task, as numpy broadcasts it."""


def regions_in(*folders: Path) -> list[str]:
    """The files of shared memory that lie there."""
    return sorted(path.name for folder in folders for path in folder.glob("zasgd-*"))


class SharedRig(Rig):
    """One shard for each of `folders`, in which it looks for shared memory.

    Workers that join before `begin` keep their first gradient until then: so none is late, however short the run.
    """

    def __init__(self, folders: Sequence[Path], *, inflight: int = 0, pull: Compression = NONE, **how: Any) -> None:
        super().__init__(num_shards=len(folders), num_servers=0, **how)
        self.folders, self.inflight = tuple(folders), inflight
        self.sharing: list[SharingWorker] = []
        told = replace(ShardConfig.from_json(self.config.shard_config), inflight=inflight, pull=pull)
        self.config = replace(self.config, shard_config=told.to_json())
        self.running.look(lambda: setattr(self.broker.run, "config", self.config))
        self.shards.extend(SharingShard(self.ctx, self.address, folder) for folder in folders)
        self.go = threading.Event()

    def sharing_worker(self, folder: Path | None = None, address: str = "", **how: Any) -> SharingWorker:
        """One more worker, with shared memory in the first shard's folder unless another is given."""
        config = {"inflight": self.inflight, **how}
        found = SharingWorker(self, folder or self.folders[0], address or self.address, **config)
        self.workers.append(found)  # type: ignore[arg-type]
        self.sharing.append(found)
        return found

    def lead_shards_to(self, proxy: Callable[[int], Any]) -> list[Any]:
        """Newcomers hear of other addresses of the shards: those of a proxy in front of each."""
        shards = [self.shard(k) for k in range(self.num_shards)]
        proxies = [proxy(sockets.split_address(shard.address)[1]) for shard in shards]

        def lead() -> None:
            for server in self.broker.run.servers():
                server.facts["endpoint"] = f"tcp://{proxies[server.number].address}"

        self.running.look(lead)
        return proxies

    def paths(self) -> dict[str, str]:
        """How each worker is served, by name, as anybody may ask."""
        with Client(self.address) as client:
            return {w["name"]: w["data_path"] for w in client.status(10)["workers"]}

    def begin(self) -> None:
        """Everybody has joined: let the gradients go."""
        until(lambda: self._raise_what_broke() or all(w.noted("joined") for w in self.sharing), 60, "all have joined")
        self.go.set()

    def ended(self, within_s: float = 60.0) -> dict[str, Any]:
        """Wait for the end of the run and of all who take part; returns the broker's summary."""
        self.begin()
        until(lambda: self._raise_what_broke() or not self.running.alive, within_s, "the end of the run")
        summary = self.completed(within_s)
        for worker in self.sharing:
            worker.running.result(within_s)
        return summary

    def exactly_once(self, num_batches: int) -> dict[str, Any]:
        """The run ends; every batch was applied once on each shard, each adds -1 to every parameter."""
        summary = self.ended()
        assert (summary["samples"], summary["torn"], summary["skipped"]) == (self.epochs * self.num_samples, 0, 0)
        assert summary["updates"] == [num_batches] * self.num_shards
        assert np.array_equal(self.flat(), np.full(self.layout.sizes["params"], -num_batches, np.float32))
        return summary

    def count(self, kind: type[Message], codec: str = "", *, shared: bool = False) -> int:
        """How many messages of a kind that went like this the shards took or, answers to pushes, sent."""
        watched: list[Any] = [shard.watched for shard in self.shards]  # type: ignore[attr-defined]
        return sum(found.seen[kind, codec, shared] for found in watched)

    def _raise_what_broke(self) -> None:
        for member in (*self.sharing, *self.shards):
            if not member.running.alive:
                member.running.result()

    def __exit__(self, *exc: object) -> None:
        self.go.set()
        super().__exit__(*exc)
        for member in (*self.sharing, *self.shards):
            member.close()  # type: ignore[attr-defined]


class Watched(Checked):
    """A checked shard that counts how pushes and pulls come, and how pushes are answered."""

    def __init__(self, node: Any) -> None:
        super().__init__(node)
        self.seen: Counter[tuple[type[Message], str, bool]] = Counter()

    def on_message(self, now: float, peer: PeerId, msg: Message) -> list[Effect]:
        effects = super().on_message(now, peer, msg)
        answers = [effect.message for effect in effects if isinstance(effect, Send)]
        for each in (msg, *answers):
            if isinstance(each, Push | Ack | Pull):
                codec = "" if isinstance(each, Pull) else each.codec
                self.seen[type(each), codec, each.shared] += 1
        return effects


class SharingShard(RunningShard):
    """One server in a thread, as `run_shard` sets it up."""

    def __init__(self, ctx: Any, broker: str, folder: Path) -> None:
        data = sockets.router(ctx, "127.0.0.1:0", control=False)
        self.address = f"127.0.0.1:{bound_port(data)}"
        self.node = Shard(time.monotonic(), new_token(), f"tcp://{self.address}", "here", broker_timeout_s=20)
        self.links = ShardLinks(ctx, broker, data)
        self.arena = Arena(folder)
        self.watched = Watched(self.node)
        self.loop = Loop(self.watched, self.links, share=self.arena.share, unshare=self.arena.unshare)
        self.running = Running(self.loop, "shard")

    def close(self) -> None:
        self.arena.close_all()


class SharingWorker:
    """A worker core whose loop has a thread of its own, as `run_member` sets it up; another computes.

    values: what the gradient of a task is; it is written into the task's memory, part by part.
    """

    def __init__(
        self, rig: SharedRig, folder: Path, address: str, *, values: Values | None = None, **config: Any
    ) -> None:
        self.rig, self.values = rig, values or (lambda task: 1.0)
        self.notes: list[Note] = []
        self.computed_at: list[float] = []
        self.num_early = 0
        size = rig.layout.sizes["params"]
        seed = {"params": np.zeros(size, np.float32), "stats": _no_stats(), "counters": _no_counters()}
        told = {"connect_timeout_s": 20.0, "broker_timeout_s": 20.0, "host": "here", **config}
        which = (WorkerConfig(**told), rig.layout, rig.num_samples, lambda: seed)
        self.node = Worker(time.monotonic(), new_token(), *which)
        self.arena = Arena(folder)
        self.links = MemberLinks(rig.ctx, address)
        self._tasks: queue.SimpleQueue[GradientTask | None] = queue.SimpleQueue()
        self.loop = Loop(
            Checked(self.node), self.links, compute=lambda effect: self._tasks.put(effect.task),
            note=self.notes.append, share=self.arena.share, unshare=self.arena.unshare,
        )  # fmt: skip
        self.running = Running(self.loop, "worker")
        self._computing = threading.Thread(target=self._compute_all, name="compute", daemon=True)
        self._computing.start()

    def noted(self, event: str) -> list[dict[str, Any]]:
        """The fields of its notes of one kind."""
        return [dict(note.fields) for note in list(self.notes) if note.event == event]

    def leave(self) -> None:
        """As after SIGTERM."""
        self.loop.post(lambda now: self.node.leave(now, "SIGTERM"))

    def close(self) -> None:
        """After the end of its loop."""
        self._tasks.put(None)
        self._computing.join(10)
        self.arena.close_all()

    def _compute_all(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                done = self._compute(task)
            except BaseException as error:  # for the test, which raises it
                self.loop.post(lambda now, error=error: _raise(error))  # type: ignore[misc]
                return
            self.loop.post(lambda now, task=task, done=done: self._done(now, task, done))  # type: ignore[misc]

    def _done(self, now: float, task: GradientTask, done: Gradient) -> list[Effect]:
        return self.loop.node.on_done(now, Computed(task, done))

    def _compute(self, task: GradientTask) -> Gradient:
        """As backward does: from the end of the model to its beginning, each part told of when it is final."""
        self._compare(task)
        self.rig.go.wait(60)
        values = np.broadcast_to(np.asarray(self.values(task), np.float32), task.memory.grads.shape)
        end = task.memory.grads.size
        for start, stop in reversed(task.parts):
            task.memory.grads[start:end] = values[start:end]
            self.num_early += 1
            self.loop.post(lambda now, start=start: self.node.on_part(now, task, start))  # type: ignore[misc]
            end = start
            assert stop >= end
        task.memory.grads[:end] = values[:end]
        self.computed_at.append(time.monotonic())
        num_samples = sum(grant.num_samples for grant in task.grants)
        return Gradient(task.memory.grads, _no_stats(), _no_counters(), num_samples, 1.0, True)

    def _compare(self, task: GradientTask) -> None:
        """Nothing of this slot is under way: what a shard keeps for it is what is computed on here."""
        slot = next((slot for slot in self.node.slots if slot.memory is task.memory), None)
        if slot is None:
            return  # of a life that is over
        for number, part in enumerate(self.rig.layout.slices("params", self.rig.num_shards)):
            client = self.rig.shard(number).node.clients.get(self.node.incarnation)
            if client is None:
                continue  # it was fenced a moment ago: what it computes will be refused
            kept, here = client.snapshots[slot.number], task.memory.params[part.start : part.stop]
            assert kept.version == slot.versions[number], f"shard {number} keeps another version"
            assert kept.params.tobytes() == here.tobytes(), f"shard {number} keeps other parameters"


def _raise(error: BaseException) -> list[Effect]:
    raise error


def _no_stats() -> Array:
    return np.empty(0, np.float32)


def _no_counters() -> Array:
    return np.empty(0, np.int64)
