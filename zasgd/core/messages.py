"""Every message, as a frozen type with one sentence on what it asks or tells.

The fixed header fields (`run` to `version`) live in frame F0; what a class adds lives in F1. How they become
bytes is `wire.py`; what they mean to a receiver is `broker.py`, `shard.py` and `worker.py`. A field's `check`
turns a decoded value into the field's type or raises WireError, so a message that exists is well-formed.
"""

# ruff: noqa: RUF009 - `body` is dataclasses.field with a check
from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from zasgd.core.codec import MAX_BUFFERS, WireError
from zasgd.core.layout import Layout, LayoutError

Array = np.ndarray[Any, Any]
MAX_GRANTS = 1536
"""Of one worker at a time: those of three pushes of at most 512 batches."""
UNKNOWN_SHARD = 0xFFFF
"""The `shard` field of a message that concerns no particular shard."""


class Kind(enum.IntEnum):
    """The message type byte of F0."""

    DESCRIBE = 1
    DESCRIPTION = 2
    HELLO = 3
    WELCOME = 4
    REJOIN = 5
    INIT = 6
    PULL = 7
    OBSERVE = 8
    PARAMS = 9
    PUSH = 10
    ACK = 11
    PROBE = 12
    RENEW = 13
    GRANT = 14
    LEASE = 15
    ADMIT = 16
    ADMITTED = 17
    FENCE = 18
    FENCED = 19
    BYE = 20
    EXPEL = 21
    EVALUATE = 22
    RESULT = 23
    DRAIN = 24
    STOP = 25
    ERR = 26
    STATUS = 27
    DONE = 28
    LIVE = 29
    ROUND = 30
    ATTACH = 31
    ATTACHED = 32


class Grant(NamedTuple):
    """One batch: positions `start` to `stop` of the permutation of `epoch`, cell `batch` of the grid."""

    epoch: int
    batch: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return self.stop - self.start


class Applied(NamedTuple):
    """One push unit of a worker and the grants it consumed."""

    seq: int
    grants: tuple[Grant, ...]


class Refused(NamedTuple):
    """A grant whose gradient no shard applied, and why (`nonfinite`, ...); `number` counts them over a life, from 1."""

    grant: Grant
    reason: str
    number: int


class PushId(NamedTuple):
    """A push unit of the run, whoever pushed it."""

    incarnation: int
    seq: int


class Decision(NamedTuple):
    """What shard 0 decided about synchronous pushes: the members of one round in their order, and who came too late.

    Without members it is no round.
    """

    members: tuple[PushId, ...]
    late: tuple[PushId, ...]


# ---- checks: a decoded value -> the field's type ------------------------------------------------


def _fail(what: str) -> WireError:
    return WireError(f"a field is not {what}", "BAD_FIELD")


def integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _fail("an integer of at least 0")
    return value


def text(value: Any) -> str:
    if type(value) is not str:
        raise _fail("text")
    return value


def blob(value: Any) -> bytes:
    if type(value) is not bytes:
        raise _fail("bytes")
    return value


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _fail("a boolean")
    return value


def number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _fail("a finite number")
    return float(value)


def optional_number(value: Any) -> float | None:
    return None if value is None else number(value)


def plain_map(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(_is_plain(item) for item in value.values()):
        raise _fail("a map of plain values")
    return value


def _is_plain(value: Any) -> bool:
    """What JSON can hold, since such maps end in reports and files; nesting is bounded by the decoder."""
    if type(value) is dict:
        return all(_is_plain(item) for item in value.values())
    if type(value) is list:
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (str, bool, int, float)


def optional_map(value: Any) -> dict[str, Any] | None:
    return None if value is None else plain_map(value)


def many(check: Callable[[Any], Any], at_most: int = 65536) -> Callable[[Any], tuple[Any, ...]]:
    """A check for a list of what `check` accepts."""

    def checked(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > at_most:
            raise _fail(f"a list of at most {at_most}")
        return tuple([check(item) for item in value])

    return checked


def grant(value: Any) -> Grant:
    if type(value) is not list or len(value) != 4:
        raise _fail("a grant (epoch, batch, start, stop)")
    found = Grant(*[integer(item) for item in value])
    if found.stop <= found.start:
        raise _fail("a grant of at least one sample")
    return found


def applied(value: Any) -> Applied:
    if type(value) is not list or len(value) != 2:
        raise _fail("a push (seq, grants)")
    return Applied(integer(value[0]), many(grant, 1024)(value[1]))


def push_id(value: Any) -> PushId:
    if type(value) is not list or len(value) != 2:
        raise _fail("a push (incarnation, seq)")
    return PushId(integer(value[0]), integer(value[1]))


def decision(value: Any) -> Decision:
    if type(value) is not list or len(value) != 2:
        raise _fail("a decision (members, late)")
    return Decision(*(many(push_id, 65536)(item) for item in value))


def refused(value: Any) -> Refused:
    if type(value) is not list or len(value) != 3:
        raise _fail("a refusal (grant, reason, number)")
    return Refused(grant(value[0]), text(value[1]), integer(value[2]))


def floats(value: Any) -> Array:
    """A one-dimensional float array, as float32."""
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind != "f":
        raise WireError("a piece is not a one-dimensional float array", "BAD_SHAPE")
    if value.dtype == np.float32:
        return value
    with np.errstate(all="ignore"):  # what overflows becomes inf, which a shard refuses
        return value.astype(np.float32)


def counts(value: Any) -> Array:
    """A one-dimensional int64 array."""
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != np.int64:
        raise WireError("counters are not a one-dimensional int64 array", "BAD_SHAPE")
    return value


def optional_layout(value: Any) -> Layout | None:
    if value is None:
        return None
    try:
        return Layout.from_plain(value)
    except LayoutError as e:
        raise WireError(str(e), "BAD_LAYOUT") from None


def body(check: Callable[[Any], Any], default: Any = dataclasses.MISSING, *, factory: Any = dataclasses.MISSING) -> Any:
    """A field that travels in F1; `factory` makes the default of a type that can be changed."""
    return dataclasses.field(default=default, default_factory=factory, metadata={"check": check})


_NO_COUNTERS = np.empty(0, np.int64)
_NO_FLOATS = np.empty(0, np.float32)


def no_counters() -> Array:
    """What a message without counters has."""
    return _NO_COUNTERS


def no_floats() -> Array:
    """What a message without statistics has."""
    return _NO_FLOATS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """What every message carries in F0.

    run: random id of the training job. worker: stable ordinal. incarnation: one life of that worker, 0 while
    it has none. seq: counts what this incarnation asked. version: of a shard; a push's base, a reply's new one.
    part, parts: a long message travels in `parts` messages, numbered from 0. inline: the sender wants every
    array inside F1, as stock msgpack-numpy clients do.
    """

    kind: ClassVar[Kind]

    run: int = 0
    shard: int = UNKNOWN_SHARD
    worker: int = 0
    incarnation: int = 0
    seq: int = 0
    version: int = 0
    part: int = 0
    parts: int = 1
    inline: bool = False


# ---- control: anybody and the broker -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Describe(Message):
    """Asks the broker what this run trains; needs no membership."""

    kind = Kind.DESCRIBE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Description(Message):
    """Tells a newcomer the recipe (JSON text) and the run's phase."""

    kind = Kind.DESCRIPTION
    recipe: str = body(text)
    num_shards: int = body(integer)
    phase: str = body(text)
    lease_s: float = body(number)
    layout_hash: str = body(text, "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hello(Message):
    """Asks to join as `worker`, `server` or `eval`; repeated with the same `token` until answered."""

    kind = Kind.HELLO
    role: str = body(text)
    token: bytes = body(blob)
    name: str = body(text, "")
    host: str = body(text, "")
    pid: int = body(integer, 0)
    endpoint: str = body(text, "")
    layout: Layout | None = body(optional_layout, None)
    num_samples: int = body(integer, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Welcome(Message):
    """Tells a newcomer who it is: ids in F0 (for a server `shard`), and what it needs to begin.

    `endpoints` and `hosts` are where each shard listens and runs.
    """

    kind = Kind.WELCOME
    token: bytes = body(blob)
    num_shards: int = body(integer, 0)
    lease_s: float = body(number, 10.0)
    window_bytes: int = body(integer, 0)
    endpoints: tuple[str, ...] = body(many(text), ())
    hosts: tuple[str, ...] = body(many(text), ())
    data_port: int = body(integer, 0)
    config: str = body(text, "")
    layout: Layout | None = body(optional_layout, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rejoin(Message):
    """Asks to go on under the incarnation in F0 after the broker was out of reach."""

    kind = Kind.REJOIN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Renew(Message):
    """Renews a lease and reports: progress, final pushes (acknowledged by ALL shards), what is wanted.

    `seq` counts renewals of this incarnation. `got` is how many grants have arrived so far and `upto` how many
    the worker wants to have been issued in all, so a lost answer is repaired by the next renewal. `seeded` is
    the incarnation that seeded this shard, 0 while none has; `decisions` how many about rounds it has, of those that
    shard 0 made. `facts` holds numbers for `zasgd status`.
    """

    kind = Kind.RENEW
    role: str = body(text, "worker")
    steps: int = body(integer, 0)
    phase: str = body(text, "")
    got: int = body(integer, 0)
    upto: int = body(integer, 0)
    final: tuple[Applied, ...] = body(many(applied, 64), ())
    torn: tuple[Applied, ...] = body(many(applied, 64), ())
    refused: tuple[Refused, ...] = body(many(refused, MAX_GRANTS), ())
    fenced: tuple[int, ...] = body(many(integer), ())
    seeded: int = body(integer, 0)
    decisions: int = body(integer, 0)
    facts: dict[str, Any] = body(plain_map, factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GrantMsg(Message):
    """Answers a worker's Renew `seq`: its report is on record, its lease renewed, and here are batches.

    `grants` are numbers `base`, `base + 1`, ... of all that were issued to this incarnation; those it already
    has it skips. `seed` asks it to seed the shards, `open` says that they are seeded, `drain` that it shall
    finish its batch and leave.
    """

    kind = Kind.GRANT
    base: int = body(integer, 0)
    grants: tuple[Grant, ...] = body(many(grant, MAX_GRANTS), ())
    seed: bool = body(boolean, False)
    open: bool = body(boolean, False)
    drain: bool = body(boolean, False)
    num_workers: int = body(integer, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease(Message):
    """Answers the Renew `seq` of a shard or evaluator; `settled` are fenced incarnations it may forget.

    `live` and `num_workers` are those of the latest Live.
    """

    kind = Kind.LEASE
    settled: tuple[int, ...] = body(many(integer), ())
    live: int = body(integer, 0)
    num_workers: int = body(integer, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bye(Message):
    """Tells the broker that this member leaves for good; what it did not push goes to others."""

    kind = Kind.BYE
    reason: str = body(text, "")
    final: tuple[Applied, ...] = body(many(applied, 64), ())
    torn: tuple[Applied, ...] = body(many(applied, 64), ())
    refused: tuple[Refused, ...] = body(many(refused, MAX_GRANTS), ())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expel(Message):
    """A supervisor tells the broker that the process `pid` on `host` is dead."""

    kind = Kind.EXPEL
    host: str = body(text)
    pid: int = body(integer)
    reason: str = body(text, "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluate(Message):
    """Asks the evaluator to score the parameters as they are now; `final` says the run is complete."""

    kind = Kind.EVALUATE
    epoch: int = body(integer)
    final: bool = body(boolean, False)
    interrupted: bool = body(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result(Message):
    """Tells the broker what an evaluation found; `seq` is that of the Evaluate it answers."""

    kind = Kind.RESULT
    epoch: int = body(integer)
    final: bool = body(boolean, False)
    scores: dict[str, Any] = body(plain_map, factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drain(Message):
    """Asks the broker to let the worker with this id or name finish its batch and leave."""

    kind = Kind.DRAIN
    target: str = body(text)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StopMsg(Message):
    """Ends a run: to the broker a request, to a member an order."""

    kind = Kind.STOP
    reason: str = body(text, "")
    code: int = body(integer, 0)
    interrupted: bool = body(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Status(Message):
    """Asks the broker for the state of the run (`report` absent) or answers it."""

    kind = Kind.STATUS
    report: dict[str, Any] | None = body(optional_map, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Done(Message):
    """Answers a request that has nothing to say but that it was carried out."""

    kind = Kind.DONE
    text: str = body(text, "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Err(Message):
    """Refuses the message `seq`, with a code word, one line, and whether trying again can help."""

    kind = Kind.ERR
    code: str = body(text)
    text: str = body(text, "")
    retryable: bool = body(boolean, False)
    retry_after_ms: int = body(integer, 0)


# ---- control: the broker and a shard -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admit(Message):
    """Orders a shard to serve an incarnation; carries the layout until the shard has shown that it has it."""

    kind = Kind.ADMIT
    layout: Layout | None = body(optional_layout, None)
    num_samples: int = body(integer, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admitted(Message):
    """A shard serves this incarnation from now on."""

    kind = Kind.ADMITTED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fence(Message):
    """Orders a shard never to apply anything of an incarnation again; `discard` also unseeds the shard."""

    kind = Kind.FENCE
    discard: bool = body(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fenced(Message):
    """Answers a Fence with what this shard applied of the incarnation: its last pushes and their grants."""

    kind = Kind.FENCED
    high: int = body(integer, 0)
    bitmap: int = body(lambda value: integer_u64(value), 0)
    pushes: tuple[Applied, ...] = body(many(applied, 64), ())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Live(Message):
    """Tells a shard N, the number of workers that have work; `live` numbers these messages, an older one is void."""

    kind = Kind.LIVE
    live: int = body(integer)
    num_workers: int = body(integer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round(Message):
    """Tells the broker, and through it the other shards, what shard 0 decided about synchronous pushes.

    `decisions` are numbers `base`, `base + 1`, ... of all that it made, the first being 1. The broker answers with
    DONE whose `seq` is the number up to which it has them all.
    """

    kind = Kind.ROUND
    base: int = body(integer)
    decisions: tuple[Decision, ...] = body(many(decision, 1024), ())


def integer_u64(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise _fail("a 64-bit bitmap")
    return value


# ---- data: a worker or the evaluator and a shard ---------------------------------------------------

pieces = many(floats, MAX_BUFFERS)
packed = many(lambda value: vector(value), 4)


def vector(value: Any) -> Array:
    """A one-dimensional array of any type that may travel."""
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise WireError("a packed array is not one-dimensional", "BAD_SHAPE")
    return value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attach(Message):
    """Offers a shard the region of shared memory `name` with `slots` slots: parameters and gradients lie there."""

    kind = Kind.ATTACH
    name: str = body(text)
    slots: int = body(integer, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attached(Message):
    """A shard has opened the region; `token` is what it read there, which proves that both have the same memory."""

    kind = Kind.ATTACHED
    token: bytes = body(blob)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Init(Message):
    """Seeds a shard: `params` are consecutive pieces of its slice from element `offset` on."""

    kind = Kind.INIT
    layout_hash: str = body(text)
    offset: int = body(integer, 0)
    params: tuple[Array, ...] = body(pieces, ())
    stats: Array = body(floats, factory=no_floats)
    counters: Array = body(counts, factory=no_counters)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pull(Message):
    """Asks a shard for its parameters; the shard keeps what it sends as this worker's snapshot in `slot`.

    `shared`: it shall write them into the worker's region.
    """

    kind = Kind.PULL
    slot: int = body(integer, 0)
    shared: bool = body(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observe(Message):
    """Asks a shard for its parameters without becoming a reason to keep a snapshot.

    `whole` asks it to apply first what it has gathered for an update: an epoch or the run is over.
    """

    kind = Kind.OBSERVE
    whole: bool = body(boolean, False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Params(Message):
    """A shard's slice at `version`, from element `offset` on; answers Pull and Observe `seq`.

    `samples` is the shard's sample clock. `shared`: the slice was written into the worker's region.
    """

    kind = Kind.PARAMS
    samples: int = body(integer, 0)
    shared: bool = body(boolean, False)
    offset: int = body(integer, 0)
    params: tuple[Array, ...] = body(pieces, ())
    stats: Array = body(floats, factory=no_floats)
    counters: Array = body(counts, factory=no_counters)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Push(Message):
    """One part of a gradient computed on snapshot `version`; applied once when the part with `commit` is in.

    `grads` are consecutive pieces of the shard's slice from element `offset` on. The committing part names the
    grants that the gradient consumed, how many samples it averages, the mean `loss` over them, and in `presence` which
    tensors of the layout's parameters got a gradient (bit i, lowest first; empty: all). `abort` discards what was
    staged. `slot` is the one whose snapshot it was computed on, and whose parameters the answer replaces. `shared`: the
    gradient lies in the worker's region, in that slot, and the answer is to be written there. With `codec` the part is
    `count` elements from `offset` on, compressed into `packed`.
    """

    kind = Kind.PUSH
    commit: bool = False
    abort: bool = False
    layout_hash: str = body(text)
    slot: int = body(integer, 0)
    shared: bool = body(boolean, False)
    offset: int = body(integer, 0)
    grads: tuple[Array, ...] = body(pieces, ())
    codec: str = body(text, "")
    packed: tuple[Array, ...] = body(packed, ())
    count: int = body(integer, 0)
    stats: Array = body(floats, factory=no_floats)
    counters: Array = body(counts, factory=no_counters)
    grants: tuple[Grant, ...] = body(many(grant, 1024), ())
    num_samples: int = body(integer, 0)
    presence: bytes = body(blob, b"")
    loss: float | None = body(optional_number, None)
    hyper: dict[str, Any] | None = body(optional_map, None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ack(Message):
    """A push or seeding is done: the shard's new `version`, the push's lag there, and the new parameters.

    `samples` is the shard's sample clock. `shared`: the parameters were written into the worker's region. With `codec`
    this part holds `count` differences from `offset` on to what was sent before, compressed into `packed`.
    """

    kind = Kind.ACK
    samples: int = body(integer, 0)
    lag: int = body(integer, 0)
    shared: bool = body(boolean, False)
    offset: int = body(integer, 0)
    params: tuple[Array, ...] = body(pieces, ())
    codec: str = body(text, "")
    packed: tuple[Array, ...] = body(packed, ())
    count: int = body(integer, 0)
    stats: Array = body(floats, factory=no_floats)
    counters: Array = body(counts, factory=no_counters)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe(Message):
    """Asks a shard whether it has applied push `seq`; answered like that push, or ERR UNKNOWN_SEQ."""

    kind = Kind.PROBE


MESSAGES: dict[Kind, type[Message]] = {
    cls.kind: cls
    for cls in (
        Describe, Description, Hello, Welcome, Rejoin, Init, Pull, Observe, Params, Push, Ack, Probe, Renew,
        GrantMsg, Lease, Admit, Admitted, Fence, Fenced, Bye, Expel, Evaluate, Result, Drain, StopMsg, Err,
        Status, Done, Live, Round, Attach, Attached,
    )
}  # fmt: skip
