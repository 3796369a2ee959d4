"""An independent record of what the shards applied, and what must hold of it whatever goes wrong.

Decides whether a simulated run was right: it looks at messages and at each shard's version and sample clock, never at
the tables by which the cores decide, and compares its own count with the ledger's at the end. Every check raises
InvariantError. Nothing here knows of faults.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zasgd.core.ledger import Ledger
from zasgd.core.messages import Ack, Admit, Applied, Bye, Fence, Grant, GrantMsg, Init, Message, Push, Renew
from zasgd.core.node import Effect, Node, Send, require
from zasgd.core.shard import Shard


class Unit(NamedTuple):
    """One push unit."""

    worker: int
    incarnation: int
    seq: int


class Claim(NamedTuple):
    """What a push that came says of itself."""

    grants: tuple[Grant, ...]
    num_samples: int


@dataclass(slots=True)
class Application:
    """How one unit was taken by one shard: the version it was answered with, its grants, what was acknowledged."""

    version: int
    grants: tuple[Grant, ...]
    acknowledged: int | None = None


@dataclass(slots=True)
class ShardRecord:
    """What one shard has been seen to do.

    gathered: pushes taken since the version last moved, in mode buffer. came: pushes that were not taken yet.
    """

    version: int = 0
    samples: int = 0
    gathered: int = 0
    admitted: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)
    seedings: set[Unit] = field(default_factory=set)
    came: dict[Unit, Claim] = field(default_factory=dict)
    applied: dict[Unit, Application] = field(default_factory=dict)


class Tallies(NamedTuple):
    """Samples by the state in which they ended."""

    once: int
    torn: int
    none: int


class Observer:
    """Watches every event of a run over `num_shards` shards.

    A push is taken in the event that acknowledges it first, and then version and sample clock must say so: in mode
    async each push makes a version, in sync each round of them, and in buffer an update makes one of those gathered.
    Nothing is taken twice, unadmitted, ungranted or once fenced; no batch by two pushes; an acknowledgement says the
    same each time; what a worker calls final was taken by every shard; a batch goes to another worker only when every
    shard has fenced the last one, or when that one refused it.
    """

    def __init__(self, num_shards: int) -> None:
        self.shards = {number: ShardRecord() for number in range(num_shards)}
        self._appliers: dict[tuple[int, int], Unit] = {}
        self._holders: dict[tuple[int, int], int] = {}
        self._granted: dict[int, set[Grant]] = defaultdict(set)
        self._refused: set[tuple[int, Grant]] = set()

    # ---- what the world calls ----------------------------------------------------------------------

    def handled(self, at_s: float, name: str, node: Node, message: Message | None, effects: list[Effect]) -> None:
        """Look at a shard after its event: did its version move, and may it?"""
        if not isinstance(node, Shard) or node.number not in self.shards:
            return
        record = self.shards[node.number]
        match message:
            case Push(commit=True) if _unit(message) not in record.applied:
                record.came[_unit(message)] = Claim(message.grants, message.num_samples)
            case Init():
                record.seedings.add(_unit(message))
            case Admit():
                record.admitted.add(message.incarnation)
            case Fence():
                record.fenced.add(message.incarnation)
        acks = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Ack) and not e.message.part]
        self._moved(record, node, message, [ack for ack in acks if _unit(ack) not in record.seedings])

    def sent(self, at_s: float, name: str, node: Node, message: Message) -> None:
        """Hold what a core says against what was seen."""
        if isinstance(message, Ack):
            self._acknowledged(message)
        elif isinstance(message, Renew | Bye):
            self._reported(message)
        elif isinstance(message, GrantMsg):
            for grant in message.grants:
                self._issued(message.incarnation, grant)

    # ---- checks ------------------------------------------------------------------------------------

    def _moved(self, record: ShardRecord, shard: Shard, message: Message | None, acks: list[Ack]) -> None:
        """Hold version and sample clock against the pushes that this event acknowledged for the first time."""
        before = record.version, record.samples
        record.version, record.samples = shard.version, shard.samples
        what = f"shard {shard.number} on {type(message).__name__ if message is not None else 'a timer'}"
        made = [a for a in acks if _unit(a) not in record.applied or a.version > before[0]]
        if made and before == (record.version, record.samples):
            require(False, f"{what} acknowledged {_unit(made[0])} before it applied it")
        samples = sum([self._taken(shard.number, record, ack) for ack in made])
        mode = shard.config.rule.mode if shard.config else "async"
        _COUNTS[mode](record, what, before[0], [ack.version for ack in made])
        moved = record.samples - before[1]
        require(moved == samples, f"{what} moved its sample clock by {moved}, the pushes that it took hold {samples}")

    def _taken(self, number: int, record: ShardRecord, ack: Ack) -> int:
        """One push was taken; its samples."""
        unit = _unit(ack)
        require(unit not in record.applied, f"shard {number} applied {unit} twice")
        require(unit in record.came, f"shard {number} acknowledged {unit}, which never came")
        require(unit.incarnation in record.admitted, f"shard {number} applied {unit}, never admitted there")
        require(unit.incarnation not in record.fenced, f"shard {number} applied {unit} after it was fenced")
        grants, num_samples = record.came.pop(unit)
        record.applied[unit] = Application(ack.version, grants)
        for grant in grants:
            require(grant in self._granted[unit.incarnation], f"{unit} consumed {grant}, never granted to it")
            first = self._appliers.setdefault((grant.epoch, grant.batch), unit)
            require(first == unit, f"{grant} was applied by {first} and again by {unit}")
        return num_samples

    def _acknowledged(self, ack: Ack) -> None:
        unit = _unit(ack)
        if unit in self.shards[ack.shard].seedings:
            return
        application = self.shards[ack.shard].applied.get(unit)
        require(application is not None, f"shard {ack.shard} acknowledged {unit} before it applied it")
        if application is None or ack.part > 0 or not ack.params:
            return
        require(ack.version == application.version, f"{unit} acknowledged as another version than it made")
        content = zlib.crc32(b"".join(piece.tobytes() for piece in ack.params))
        if application.acknowledged is None:
            application.acknowledged = content
        require(application.acknowledged == content, f"{unit} acknowledged again with other parameters")

    def _reported(self, message: Renew | Bye) -> None:
        for push in message.final:
            missing = [n for n in self.shards if not self._has(n, message, push)]
            require(
                not missing,
                f"incarnation {message.incarnation} calls push {push.seq} final without {missing}",
            )
        for refusal in message.refused:
            self._refused.add((message.incarnation, refusal.grant))

    def _has(self, number: int, message: Message, push: Applied) -> bool:
        found = self.shards[number].applied.get(Unit(message.worker, message.incarnation, push.seq))
        return found is not None and found.grants == push.grants

    def _issued(self, incarnation: int, grant: Grant) -> None:
        cell = (grant.epoch, grant.batch)
        if grant in self._granted[incarnation] and self._holders.get(cell) == incarnation:
            return  # the same issue, told again
        applier = self._appliers.get(cell)
        require(applier is None, f"{grant} is issued to incarnation {incarnation}, applied by {applier}")
        holder = self._holders.get(cell)
        if holder is not None and (holder, grant) not in self._refused:
            open_at = [n for n, record in self.shards.items() if holder not in record.fenced]
            require(not open_at, f"{grant} goes from {holder} to {incarnation}, not fenced at shards {open_at}")
        self._holders[cell] = incarnation
        self._granted[incarnation].add(grant)

    # ---- the end -----------------------------------------------------------------------------------

    def tallies(self, grid: Iterable[Grant]) -> Tallies:
        """Samples of `grid` applied by every shard, by some, by none."""
        counts = [0, 0, 0]
        for grant in grid:
            unit = self._appliers.get((grant.epoch, grant.batch))
            shards = sum(unit in record.applied for record in self.shards.values())
            counts[0 if shards == len(self.shards) else 1 if shards else 2] += grant.num_samples
        return Tallies(*counts)

    def settle(self, ledger: Ledger, grid: list[Grant]) -> Tallies:
        """Every sample ended in one state, and the ledger says the same as what was seen."""
        require(ledger.complete, "the run ended with an incomplete ledger")
        whole = ledger.epochs * ledger.num_samples
        require(sum(grant.num_samples for grant in grid) == whole, "the grid does not cover the epochs")
        stray = self._appliers.keys() - {(grant.epoch, grant.batch) for grant in grid}
        require(not stray, f"batches outside the grid were applied: {sorted(stray)[:3]}")
        seen = self.tallies(grid)
        told = Tallies(ledger.once, ledger.torn, ledger.skipped)
        require(seen == told, f"the ledger says {told}, the shards did {seen}")
        return seen


def _unit(message: Message) -> Unit:
    return Unit(message.worker, message.incarnation, message.seq)


# ---- how pushes and versions go together: before: the version; versions: of the pushes taken, in order ----


def _each_makes_one(record: ShardRecord, what: str, before: int, versions: list[int]) -> None:
    """Mode async: held pushes may be applied in one event, but each is an update of its own."""
    made = list(range(before + 1, record.version + 1))
    require(versions == made, f"{what} made the versions {made}, its pushes {versions}")


def _a_round_makes_one(record: ShardRecord, what: str, before: int, versions: list[int]) -> None:
    """Mode sync: no round without a member, none out of order."""
    made = list(range(before + 1, record.version + 1))
    require(sorted(versions) == versions, f"{what} answered rounds out of order: {versions}")
    require(sorted(set(versions)) == made, f"{what} made the versions {made}, its rounds {sorted(set(versions))}")


def _an_update_makes_one(record: ShardRecord, what: str, before: int, versions: list[int]) -> None:
    """Mode buffer: a push is answered with the version after it, and an update is one of something."""
    moved = record.version - before
    record.gathered += len(versions)
    require(0 <= moved <= 1, f"{what} moved its version by {moved}")
    require(len(versions) <= 1, f"{what} gathered {len(versions)} pushes")
    require(all(v == record.version for v in versions), f"{what} answered {versions} at version {record.version}")
    if moved:
        require(record.gathered > 0, f"{what} made an update of nothing")
        record.gathered = 0


_COUNTS: dict[str, Callable[[ShardRecord, str, int, list[int]], None]] = {
    "async": _each_makes_one,
    "sync": _a_round_makes_one,
    "buffer": _an_update_makes_one,
}


class TableSizes:
    """Samples how many entries the tables of all cores hold, so that one that only grows is found.

    Looks at a core once in `every_s` virtual seconds, at each dict, list, set and deque reachable from it; the
    entries of all tables under one attribute path count together. A deque with a `maxlen` cannot only grow.
    """

    def __init__(self, every_s: float = 20.0) -> None:
        self._every_s = every_s
        self._next_at: dict[str, float] = defaultdict(float)
        self.samples: list[tuple[float, str, dict[str, int]]] = []

    def handled(self, at_s: float, name: str, node: Node, message: Message | None, effects: list[Effect]) -> None:
        """Sample, when it is time."""
        if at_s >= self._next_at[name]:
            self._next_at[name] = at_s + self._every_s
            self.samples.append((at_s, name, table_sizes(node)))

    def sent(self, at_s: float, name: str, node: Node, message: Message) -> None:
        """Nothing to see."""

    def peaks(self, from_s: float, until_s: float) -> dict[tuple[str, str], int]:
        """(process, attribute path) -> largest size seen in that time."""
        found: dict[tuple[str, str], int] = defaultdict(int)
        for at_s, name, sizes in self.samples:
            if from_s <= at_s < until_s:
                for path, size in sizes.items():
                    found[name, path] = max(found[name, path], size)
        return found

    def check(self, middle_s: float, *, at_most: int, slack: int) -> None:
        """No table holds over `at_most`, nor after `middle_s` over 1.5 times its earlier peak + `slack`."""
        before = self.peaks(0.0, middle_s)
        for key, size in self.peaks(middle_s, float("inf")).items():
            require(size <= at_most, f"{key} holds {size} entries")
            limit = 1.5 * before.get(key, 0) + slack
            require(size <= limit, f"{key} keeps growing: {before.get(key, 0)} entries, then {size}")


def table_sizes(core: object) -> dict[str, int]:
    """Attribute path -> entries, for every container reachable from `core` that can grow."""
    sizes: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", core)]
    while todo:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            if not (isinstance(value, deque) and value.maxlen is not None):
                sizes[path] += len(value)
            items = value.values() if isinstance(value, dict) else value
            todo.extend((path + "[]", item) for item in items if _may_hold_tables(type(item)))
        else:
            todo.extend((f"{path}.{n}", v) for n, v in _attributes(value) if _may_hold_tables(type(v)))
    return dict(sizes)


_CONTAINERS = (dict, list, set, deque)


_may_hold: dict[type, bool] = {}


def _may_hold_tables(kind: type) -> bool:
    """Containers and objects of ours; not tuples and messages, which never change."""
    if kind not in _may_hold:
        ours = kind.__module__.startswith("zasgd.") and not issubclass(kind, (Message, tuple))
        _may_hold[kind] = ours or issubclass(kind, _CONTAINERS)
    return _may_hold[kind]


def _attributes(value: object) -> list[tuple[str, Any]]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    plain: Mapping[str, Any] = getattr(value, "__dict__", {})
    return [(n, getattr(value, n)) for n in slots if hasattr(value, n)] + list(plain.items())
