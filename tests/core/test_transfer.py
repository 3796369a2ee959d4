"""A gradient as messages and an answer in its place: cuts, parts that leave early, compression, and a shard's side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zasgd.core import wire
from zasgd.core.compress import decode
from zasgd.core.compression import Compression
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.messages import (
    Ack,
    Admit,
    Array,
    Err,
    Grant,
    Init,
    Message,
    Params,
    Probe,
    Pull,
    Push,
    Welcome,
)  # fmt: skip
from zasgd.core.node import BROKER, Send
from zasgd.core.parameters import ShardConfig
from zasgd.core.region import Memory, RegionPlan, memories, private_region
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard
from zasgd.core.transfer import Gradient, Pusher, take

RUN, ANN = 9, 11
NONE, FP16, TOP = Compression(), Compression("fp16"), Compression("topk", 0.01)
GRANTS = (Grant(0, 0, 0, 10),)


def layout_of(*sizes: int) -> Layout:
    tensors = [TensorSpec(f"w{i}", (size,)) for i, size in enumerate(sizes)]
    return Layout((*tensors, TensorSpec("mean", (16,), section="stats"), TensorSpec("count", (), "int64", "counters")))


LAYOUTS = [layout_of(1), layout_of(100), layout_of(7, 50, 3), layout_of(16, 16), layout_of(1, 1, 1, 130, 9)]
"""Tensors that straddle shards, and fewer cache lines than shards."""


def gradient_of(layout: Layout, grads: Array | None = None) -> Gradient:
    sizes = layout.sizes
    grads = np.arange(1, sizes["params"] + 1, dtype=np.float32) if grads is None else grads
    stats, counters = np.ones(sizes["stats"], np.float32), np.ones(sizes["counters"], np.int64)
    return Gradient(grads, stats, counters, num_samples=10, loss=0.5, finite=True)


def ids(k: int) -> dict[str, Any]:
    return {"run": RUN, "shard": k, "worker": 0, "incarnation": ANN, "seq": 7}


def put_together(layout: Layout, num_shards: int, pushes: dict[int, list[Push]]) -> Array:
    """What the shards make of these messages, whole."""
    whole = np.full(layout.sizes["params"], np.nan, np.float32)
    for k, messages in pushes.items():
        own = layout.slices("params", num_shards)[k]
        for m in messages:
            place = whole[own.start + m.offset : own.stop]
            if m.codec:
                decode(m.codec, m.packed, place[: m.count])
            else:
                values = np.concatenate(m.grads)
                place[: values.size] = values
    return whole


# ---- a gradient as messages ----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [NONE, FP16], ids=lambda c: c.codec)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_a_gradient_is_put_together_again_however_it_is_cut(
    codec: Compression, num_shards: int, small_parts: None
) -> None:
    for layout in LAYOUTS:
        done = gradient_of(layout)
        push = Pusher(layout, num_shards, codec, frozenset()).push(ids, 1, lambda k: 40 + k, done, GRANTS)
        pushes = {k: push(k) for k in range(num_shards)}
        assert np.array_equal(put_together(layout, num_shards, pushes), done.grads)
        for k, messages in pushes.items():
            assert sorted(m.part for m in messages) == list(range(messages[0].parts)) and messages[-1].part == 0
            assert [m.commit for m in messages] == [False] * (len(messages) - 1) + [True]
            assert {(m.slot, m.version, m.shard) for m in messages} == {(1, 40 + k, k)}
            assert messages[-1].grants == GRANTS and all(not m.grants for m in messages[:-1])


@pytest.mark.parametrize("codec", [NONE, FP16], ids=lambda c: c.codec)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_parts_that_left_early_are_those_that_the_push_would_have_sent(
    codec: Compression, num_shards: int, small_parts: None
) -> None:
    for layout in LAYOUTS:
        done = gradient_of(layout)
        pusher = Pusher(layout, num_shards, codec, frozenset())
        firsts = {s.start for s in layout.slices("params", num_shards) if s.size}
        assert not firsts & {start for start, _ in pusher.parts}, "the part that commits cannot leave early"
        early = [pusher.part(ids, 0, lambda k: 0, done.grads, start) for start, _ in reversed(pusher.parts)]
        push = pusher.push(ids, 0, lambda k: 0, done, GRANTS, early)
        pushes = {k: push(k) for k in range(num_shards)}
        assert np.array_equal(put_together(layout, num_shards, pushes), done.grads)
        left = [m for messages in pushes.values() for m in messages if not any(m is e for e in early)]
        assert [m.part for m in left] == [0] * num_shards, "the rest is what commits"


def test_what_stats_and_counters_a_push_brings_is_the_shards_own() -> None:
    layout = layout_of(100)
    push = Pusher(layout, 3, NONE, frozenset({1})).push(ids, 0, lambda k: 0, gradient_of(layout), GRANTS)
    lasts = [push(k)[-1] for k in range(3)]
    assert [m.stats.size for m in lasts] == [s.size for s in layout.slices("stats", 3)]
    assert [m.counters.size for m in lasts] == [s.size for s in layout.slices("counters", 3)]
    assert [m.shared for m in lasts] == [False, True, False] and lasts[1].grads == ()


def test_what_is_held_back_is_sent_dense_with_the_next_or_alone() -> None:
    layout = layout_of(64)
    pusher = Pusher(layout, 2, TOP, frozenset())
    done = gradient_of(layout, np.ones(64, np.float32))
    first = pusher.push(ids, 0, lambda k: 0, done, GRANTS)
    slices = layout.slices("params", 2)
    halves = [put_together(layout, 2, {k: first(k)})[own.start : own.stop] for k, own in enumerate(slices)]
    sent = sum(half.sum() for half in halves)
    assert sent == 2.0 and pusher.owes
    nothing = gradient_of(layout, np.zeros(64, np.float32))
    rest = pusher.push(ids, 0, lambda k: 0, nothing, (), dense=True)
    assert put_together(layout, 2, {k: rest(k) for k in range(2)}).sum() == 62.0
    assert not pusher.owes and not nothing.grads.any(), "the worker's own memory is left alone"


def test_whom_memory_is_shared_with_is_owed_nothing() -> None:
    layout = layout_of(64)
    pusher = Pusher(layout, 2, TOP, frozenset({0, 1}))
    push = pusher.push(ids, 0, lambda k: 0, gradient_of(layout), GRANTS)
    assert [len(push(k)) for k in range(2)] == [1, 1] and not pusher.owes and pusher.parts == ()


# ---- an answer in its place ----------------------------------------------------------------------------


def memory_of(layout: Layout) -> Memory:
    return memories(private_region(RegionPlan(layout.sizes["params"])), layout)[0]


SPLIT = layout_of(100)
OWN = {section: SPLIT.slices(section, 2)[1] for section in ("params", "stats", "counters")}


def test_parts_of_an_answer_go_where_they_belong_in_any_order() -> None:
    memory, size = memory_of(SPLIT), OWN["params"].size
    values = np.arange(size, dtype=np.float32)
    brought = [
        take(Params(offset=at, params=(values[at : at + 10],)), memory, OWN) for at in reversed(range(0, size, 10))
    ]
    assert sum(brought) == size
    assert (
        np.array_equal(memory.params[OWN["params"].start :], values) and not memory.params[: OWN["params"].start].any()
    )


@pytest.mark.parametrize(
    "wrong",
    [
        Params(offset=0, params=(np.ones(65, np.float32),)),
        Params(offset=60, params=(np.ones(10, np.float32),)),
        Params(offset=1000, params=(np.ones(1, np.float32),)),
        Ack(codec="fp16", packed=(np.ones(65, np.float16),), count=65),
        Ack(codec="fp16", packed=(np.ones(3, np.float16),), count=4),
        Ack(codec="topk", packed=(np.array([9, 3], np.uint32), np.ones(2, np.float32)), count=12),
        Ack(codec="gzip", packed=(np.ones(3, np.uint8),), count=3),
    ],
    ids=["too long", "too far", "outside", "too many", "too few", "not ascending", "unknown"],
)
def test_an_answer_that_does_not_fit_brings_nothing(wrong: Ack | Params) -> None:
    memory = memory_of(SPLIT)
    assert take(wrong, memory, OWN) == 0
    assert not memory.params.any()


def test_differences_are_added_and_parameters_replace() -> None:
    memory = memory_of(SPLIT)
    memory.params[:] = 2.0
    assert take(Ack(offset=4, codec="fp16", packed=(np.full(3, 0.5, np.float16),), count=3), memory, OWN) == 3
    assert take(Ack(offset=7, params=(np.full(3, 9.0, np.float32),)), memory, OWN) == 3
    start = OWN["params"].start
    assert memory.params[start + 3 : start + 11].tolist() == [2.0, 2.5, 2.5, 2.5, 9.0, 9.0, 9.0, 2.0]


# ---- the shard's side ----------------------------------------------------------------------------------

LAYOUT = layout_of(16, 16)
SIZE = LAYOUT.sizes["params"]
ONE, INFINITE = np.ones(1, np.float32), np.full(1, np.inf, np.float32)


def travelled(msg: Message) -> Message:
    """As it comes out of the wire at the other end."""
    return wire.decode([bytes(frame) for frame in wire.encode(msg)])


class Bench:
    """A seeded shard of SIZE zeros at lr 1, and what comes out of it. Every message passes through the wire."""

    def __init__(self, **config: Any) -> None:
        self.config = ShardConfig(1, RuleSpec("asgd"), (GroupSpec(),), Schedule(lr=1.0, epochs=9), **config)
        self.shard = Shard(0.0, b"t", "tcp://x:1")
        told = {"run": RUN, "shard": 0, "incarnation": 1, "token": b"t", "num_shards": 1, "lease_s": 10.0}
        self.shard.on_message(0.0, BROKER, Welcome(**told, config=self.config.to_json()))
        admit = Admit(run=RUN, shard=0, worker=0, incarnation=ANN, layout=LAYOUT, num_samples=100)
        self.shard.on_message(0.0, BROKER, admit)
        buffers = {"stats": np.zeros(16, np.float32), "counters": np.zeros(8, np.int64)}
        for i, (offset, params) in enumerate(wire.split(np.zeros(SIZE, np.float32))):
            more: dict[str, Any] = {"offset": offset, "params": params, "part": i, "parts": 99}
            self.ask(Init, 1, layout_hash=LAYOUT.hash, **more, **({} if i else buffers))
        assert self.shard.seeded_by == ANN

    def ask(self, kind: type[Message], seq: int, **fields: Any) -> list[Any]:
        msg = kind(**{"run": RUN, "shard": 0, "worker": 0, "incarnation": ANN, "seq": seq, **fields})
        return self.put(msg)

    def put(self, msg: Message) -> list[Any]:
        effects = self.shard.on_message(0.0, "ann", travelled(msg))
        self.shard.validate()
        return [travelled(e.message) for e in effects if isinstance(e, Send) and e.peer == "ann"]

    def part(
        self, seq: int, part: int, value: float, version: int, codec: Compression = NONE, **fields: Any
    ) -> list[Any]:
        """Part 0 to 2 of a push, twelve elements of `value` each; 0 commits."""
        offset = 12 * part
        values = np.full(min(12, SIZE - offset), value, np.float32)
        content: dict[str, Any] = {"grads": (values,)}
        if codec.codec != "none":
            content = {"codec": codec.codec, "packed": (values.astype(np.float16),), "count": values.size}
        if not part:
            content |= {"commit": True, "grants": GRANTS, "num_samples": 10}
        head = {"layout_hash": LAYOUT.hash, "version": version, "part": part, "parts": 3, "offset": offset}
        return self.ask(Push, seq, **{**head, **content, **fields})

    def push(self, seq: int, value: float, version: int, **fields: Any) -> list[Any]:
        for part in (2, 1):
            assert self.part(seq, part, value, version, **fields) == []
        return self.part(seq, 0, value, version, **fields)

    @property
    def params(self) -> list[float]:
        assert self.shard.values is not None
        return self.shard.values.params.tolist()

    @property
    def client(self) -> Any:
        return self.shard.clients[ANN]


@pytest.mark.parametrize("codec", [NONE, FP16], ids=lambda c: c.codec)
def test_parts_change_nothing_until_the_last_commits_them(codec: Compression, small_parts: None) -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    for part in (2, 1):
        assert bench.part(3, part, 1.0, 0, codec) == []
        assert bench.params == [0.0] * SIZE and bench.shard.version == 0
    answers = bench.part(3, 0, 1.0, 0, codec)
    assert bench.params == [-1.0] * SIZE and bench.shard.version == 1
    assert [type(a) for a in answers] == [Ack] * 3 and not bench.client.staged


@pytest.mark.parametrize("codec", [NONE, FP16], ids=lambda c: c.codec)
def test_a_part_with_nan_spoils_the_whole_push_and_stays_nowhere(codec: Compression, small_parts: None) -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    bench.part(3, 2, 1.0, 0, codec)
    bench.part(3, 1, np.nan, 0, codec)
    [err] = bench.part(3, 0, 1.0, 0, codec)
    assert (err.code, err.retryable) == ("NONFINITE", False)
    assert bench.params == [0.0] * SIZE and not bench.client.staged
    assert bench.push(4, 1.0, 0, codec=codec) and bench.params == [-1.0] * SIZE


def test_what_is_called_off_is_staged_nowhere(small_parts: None) -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    for part in (2, 1):
        bench.part(3, part, 1.0, 0)
    assert bench.ask(Push, 3, layout_hash=LAYOUT.hash, abort=True) == []
    assert not bench.client.staged and bench.params == [0.0] * SIZE


def test_a_missing_part_is_asked_for_and_a_probe_tells_that_nothing_is_here(small_parts: None) -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    bench.part(3, 2, 1.0, 0)
    [err] = bench.part(3, 0, 1.0, 0)
    assert (err.code, err.retryable) == ("INCOMPLETE", True)
    [err] = bench.ask(Probe, 3)
    assert (err.code, err.retryable) == ("UNKNOWN_SEQ", True)
    assert len(bench.push(3, 1.0, 0)) == 3 and bench.params == [-1.0] * SIZE


@pytest.mark.parametrize("codec", [NONE, FP16], ids=lambda c: c.codec)
def test_a_late_copy_of_a_part_that_was_called_off_does_not_get_into_the_next_push(
    codec: Compression, small_parts: None
) -> None:
    """The gradient was not finite, so the next one is computed on the same parameters in the same slot."""
    bench = Bench()
    bench.ask(Pull, 2)
    bench.part(3, 1, 100.0, 0, codec)
    bench.ask(Push, 3, layout_hash=LAYOUT.hash, abort=True)
    for part in (2, 1):
        bench.part(4, part, 1.0, 0, codec)
    bench.part(3, 1, 100.0, 0, codec)
    bench.part(4, 0, 1.0, 0, codec)
    assert bench.params == [-1.0] * SIZE


def test_what_was_called_off_in_one_slot_does_not_drive_out_the_push_of_the_other(small_parts: None) -> None:
    """The order to call it off was lost; meanwhile a part of the other slot's push is waited for."""
    bench = Bench(inflight=1)
    bench.ask(Pull, 2, slot=0)
    bench.ask(Pull, 3, slot=1)
    bench.part(4, 1, 1.0, 0, slot=0)  # its other parts are lost
    bench.part(5, 1, 9.0, 0, slot=1)  # not finite after all
    bench.part(6, 1, 1.0, 0, slot=1)
    answers = bench.push(4, 1.0, 0, slot=0)
    assert [type(a) for a in answers] == [Ack] * 3, answers
    bench.push(6, 1.0, 0, slot=1)
    assert bench.params == [-2.0] * SIZE


def test_a_repeated_answer_is_dense_and_fits_between_compressed_parts(small_parts: None) -> None:
    bench = Bench(pull=Compression("int8"))
    memory = memory_of(LAYOUT)
    own = {section: LAYOUT.slices(section, 1)[0] for section in ("params", "stats", "counters")}
    for answer in bench.ask(Pull, 2):
        take(answer, memory, own)
    first, again = bench.push(3, 0.3, 0), bench.ask(Probe, 3)
    assert [a.codec for a in first] == ["int8"] * 3 and [a.codec for a in again] == [""] * 3
    assert [a.offset for a in first] == [a.offset for a in again]
    for answer in (first[0], again[1], first[2]):
        take(answer, memory, own)
    assert memory.params.tobytes() == bench.client.snapshots[0].params.tobytes() != np.asarray(bench.params).tobytes()


def test_what_a_difference_left_out_is_in_the_next(small_parts: None) -> None:
    bench = Bench(pull=TOP)
    memory = memory_of(LAYOUT)
    own = {section: LAYOUT.slices(section, 1)[0] for section in ("params", "stats", "counters")}
    for answer in bench.ask(Pull, 2):
        take(answer, memory, own)
    for answer in bench.push(3, 1.0, 0):
        take(answer, memory, own)
    assert sorted(memory.params.tolist()).count(-1.0) == 3, "one of each part"
    for seq in range(4, 40):
        for answer in bench.push(seq, 0.0, bench.shard.version):
            take(answer, memory, own)
    assert memory.params.tolist() == bench.params


def test_an_answer_is_the_same_again_although_its_slot_was_pulled_since(small_parts: None) -> None:
    """Nobody else pushed, so both have one version; but what was pulled is exact, and the answer was not."""
    bench = Bench(pull=TOP)
    bench.ask(Pull, 2)
    bench.push(3, 0.3, 0)
    before = [np.concatenate(a.params) for a in bench.ask(Probe, 3)]
    bench.ask(Pull, 4)
    after = [np.concatenate(a.params) for a in bench.ask(Probe, 3) if a.params]
    assert not after or all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_inline_client_that_knows_no_codecs_is_sent_parameters() -> None:
    """Stock msgpack-numpy reads arrays; adding up differences is nothing that it was told of."""
    bench = Bench(pull=Compression("int8"))
    bench.ask(Pull, 2, inline=True)
    grads = (np.full(SIZE, 0.3, np.float32),)
    more = {"commit": True, "grants": GRANTS, "num_samples": 10}
    [ack] = bench.ask(Push, 3, layout_hash=LAYOUT.hash, version=0, grads=grads, inline=True, **more)
    assert ack.inline and ack.codec == "" and np.concatenate(ack.params).tolist() == bench.params


def test_a_gradient_in_memory_that_is_not_shared_is_refused() -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    [err] = bench.ask(Push, 3, layout_hash=LAYOUT.hash, version=0, shared=True, commit=True)
    assert isinstance(err, Err) and (err.code, err.retryable) == ("NO_ARENA", False)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"slot": 1}, "BAD_FIELD"),
        ({"codec": "gzip", "packed": (np.zeros(SIZE, np.uint8),), "count": SIZE}, "BAD_SHAPE"),
        ({"codec": "fp16", "packed": (np.zeros(SIZE, np.float16),), "count": SIZE + 1}, "BAD_SHAPE"),
        ({"codec": "fp16", "packed": (np.zeros(9, np.float16),), "count": 9, "offset": SIZE - 8}, "BAD_SHAPE"),
        ({"codec": "fp16", "packed": (np.zeros(8, np.uint16),), "count": 8}, "BAD_SHAPE"),
        ({"codec": "int8", "packed": (np.zeros(SIZE, np.int8), INFINITE), "count": SIZE}, "BAD_SHAPE"),
        ({"codec": "topk", "packed": (np.array([SIZE], np.uint32), ONE), "count": SIZE}, "BAD_SHAPE"),
    ],
)  # fmt: skip
def test_a_compressed_push_that_is_none_is_refused_and_changes_nothing(fields: dict[str, Any], code: str) -> None:
    bench = Bench()
    bench.ask(Pull, 2)
    [err] = bench.ask(Push, 3, layout_hash=LAYOUT.hash, version=0, commit=True, num_samples=10, grants=GRANTS, **fields)
    assert (err.code, err.retryable) == (code, False)
    assert bench.params == [0.0] * SIZE and not bench.client.staged
