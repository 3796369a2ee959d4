"""What `zasgd simulate` is told about machines, network and who comes and goes: texts to values, and back.

Decides what the texts mean and refuses the rest with one line. Reads no file: a caller hands over what is in it.

Speeds are `homogeneous`, `heterogeneous` (see problems.GammaTimes) or a table with a header:

    worker,seconds      one line per task: the worker's task times in order, used again from the beginning when over
    worker,mean_s       one line per worker: its mean; each task is Gamma(shape 100) around it

A churn table has the columns time,worker,action; time is in virtual seconds, the action join, leave (as on SIGTERM: it
finishes its batch) or kill. The workers a run begins with have joined. In all tables a worker is a number, `3` for the
process `worker-3`, or a name; empty lines and lines that begin with # do not count.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from zasgd.core.node import Effect
from zasgd.core.worker import Worker
from zasgd.sim.cluster import Cluster
from zasgd.sim.faults import Link
from zasgd.sim.problems import GammaTimes, MachineTimes, RecordedTimes, TaskTimes

SPEEDS = ("homogeneous", "heterogeneous")
ACTIONS = ("join", "leave", "kill")
CHURN_COLUMNS = ("time", "worker", "action")
BITS_PER_GBIT = 1e9
RETRY_S = 0.5
"""A worker that is to come back while its last life still says goodbye tries again this much later."""

_TIMES, _MEANS = ("worker", "seconds"), ("worker", "mean_s")
_NUMBER = re.compile(r"[0-9]{1,6}")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_TAKEN = re.compile(r"broker|evaluator|shard-\d+")


MAX_LATENCY_MS, MIN_GBIT, MAX_TASK_S = 60_000.0, 1e-6, 1e6
"""Beyond these a lease runs out before anything is heard, or a run would take years of virtual time."""


class ScenarioError(ValueError):
    """A text that describes no scenario; one line that says what is wrong, where, and what is possible."""


class Arrival(NamedTuple):
    """At `at_s` virtual seconds process `worker` joins, leaves or is killed (`what`: join, leave, kill)."""

    at_s: float
    worker: str
    what: str


class _Line(NamedTuple):
    """One line of a table; `where` names it."""

    where: str
    cells: tuple[str, ...]


# ---- machines and network ----------------------------------------------------------------------------


def parse_speeds(text: str, mean_s: float, seed: int) -> TaskTimes:
    """Task times from a name or a table (see the module).

    mean_s: seconds of a task, for a name only; a table brings its own. seed: of every draw. Raises ScenarioError.
    """
    if not 0.0 < mean_s <= MAX_TASK_S:
        raise ScenarioError(f"a batch of {mean_s:g} s: give more than 0 and at most {MAX_TASK_S:g} s")
    if text.strip() in SPEEDS:
        return GammaTimes(mean_s, heterogeneous=text.strip() == "heterogeneous", seed=seed)
    header, *lines = _lines(text, "speeds") or [_Line("speeds", ())]
    if header.cells not in (_TIMES, _MEANS):
        raise ScenarioError(
            f"{header.where}: {','.join(header.cells)[:60]!r} is neither {' nor '.join(SPEEDS)} nor the header "
            "worker,seconds or worker,mean_s of a table"
        )
    rows = _rows(lines, header.cells)
    if not rows:
        raise ScenarioError(f"{header.where}: no worker follows")
    if header.cells == _TIMES:
        return RecordedTimes(rows)
    return MachineTimes({worker: row[0] for worker, row in rows.items()}, seed)


def _rows(lines: Iterable[_Line], columns: tuple[str, ...]) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}
    for line in lines:
        cell, seconds = _cells(line, columns)
        worker = _worker(cell, line.where)
        if columns == _MEANS and worker in rows:
            raise ScenarioError(f"{line.where}: {worker} has a mean already")
        rows.setdefault(worker, []).append(_positive(seconds, line.where))
    return rows


def parse_network(text: str) -> Link:
    """A link from `LATENCY_MS,GBIT`: one way, and of each server's line per direction; 0 or inf Gbit/s: no limit.

    No jitter: messages take exactly that long. Raises ScenarioError.
    """
    cells = [cell.strip() for cell in text.split(",")]
    numbers = [_number(cell) for cell in cells]
    if len(numbers) == 2 and None not in numbers:
        latency_ms, gbit = (n for n in numbers if n is not None)
        if 0.0 <= latency_ms <= MAX_LATENCY_MS and (gbit == 0.0 or gbit >= MIN_GBIT):
            return Link(latency_ms / 1e3, 0.0, gbit * BITS_PER_GBIT / 8 if gbit else math.inf)
    raise ScenarioError(
        f"network: {text[:60]!r} is not LATENCY_MS,GBIT, such as 0.2,10 (at most {MAX_LATENCY_MS:g} ms, at least "
        f"{MIN_GBIT:g} Gbit/s or 0: no limit)"
    )


# ---- who comes and goes --------------------------------------------------------------------------------


def parse_churn(text: str, num_workers: int) -> tuple[Arrival, ...]:
    """What a churn table says, in order of time; `worker-0` to `worker-<num_workers - 1>` are there from the start.

    Raises ScenarioError for a line that is malformed, repeats another, or cannot be: nobody leaves who is not there.
    """
    lines = _lines(text, "churn")
    if lines and lines[0].cells == CHURN_COLUMNS:
        lines = lines[1:]
    found = sorted(((_arrival(line), line.where) for line in lines), key=lambda item: item[0].at_s)
    present = {f"worker-{i}" for i in range(num_workers)}
    seen: dict[tuple[float, str], str] = {}
    for arrival, where in found:
        other = seen.setdefault(arrival[:2], where)
        if other != where:
            raise ScenarioError(f"{where}: {arrival.worker} has another action at that time, see {other}")
        _check_presence(arrival, where, present)
    return tuple(arrival for arrival, _ in found)


def _arrival(line: _Line) -> Arrival:
    time, worker, what = _cells(line, CHURN_COLUMNS)
    at_s = _number(time)
    if at_s is None or not 0.0 <= at_s < math.inf:
        raise ScenarioError(f"{line.where}: time {time[:40]!r} is not a number of seconds")
    if what not in ACTIONS:
        raise ScenarioError(f"{line.where}: action {what[:40]!r} is none of {', '.join(ACTIONS)}")
    return Arrival(at_s, _worker(worker, line.where), what)


def _check_presence(arrival: Arrival, where: str, present: set[str]) -> None:
    if arrival.what == "join":
        if arrival.worker in present:
            raise ScenarioError(f"{where}: {arrival.worker} joins, but it is there already")
        present.add(arrival.worker)
        return
    if arrival.worker not in present:
        raise ScenarioError(f"{where}: {arrival.worker} cannot {arrival.what}, it has not joined")
    present.remove(arrival.worker)


def churn_csv(arrivals: Iterable[Arrival]) -> str:
    """The table that parse_churn reads back as the same arrivals."""
    lines = [",".join(CHURN_COLUMNS)]
    lines += [f"{a.at_s!r},{a.worker.removeprefix('worker-')},{a.what}" for a in arrivals]
    return "\n".join(lines) + "\n"


def spot_trace(
    num_workers: int,
    duration_s: float,
    *,
    mean_life_s: float,
    mean_gap_s: float,
    warned: float = 0.5,
    seed: int = 0,
) -> tuple[Arrival, ...]:
    """Spot machines: each of `num_workers` places loses its machine at random and gets a new one after a gap.

    Lives and gaps are exponential with these means, at least a second, all in virtual seconds; nothing happens after
    `duration_s`. warned: the share of machines that are told before and leave; the others are killed. A replacement
    is a worker with a number of its own, from `num_workers` on. A run is never left without any machine.
    """
    draw = random.Random(seed)
    life_s, gap_s = (partial(_at_least_a_second, draw, mean_s) for mean_s in (mean_life_s, mean_gap_s))
    due = [(life_s(), number, "end") for number in range(num_workers)]
    heapify(due)
    present = next_number = num_workers
    found: list[Arrival] = []
    while due and due[0][0] <= duration_s:
        at_s, number, what = heappop(due)
        if what == "join":
            present += 1
            heappush(due, (at_s + life_s(), number, "end"))
        elif present == 1:
            heappush(due, (at_s + life_s(), number, "end"))
            continue
        else:
            what = "leave" if draw.random() < warned else "kill"
            heappush(due, (at_s + gap_s(), next_number, "join"))
            present, next_number = present - 1, next_number + 1
        found.append(Arrival(round(at_s, 3), f"worker-{number}", what))
    return tuple(found)


def _at_least_a_second(draw: random.Random, mean_s: float) -> float:
    return max(1.0, draw.expovariate(1.0 / mean_s))


def apply_churn(arrivals: Iterable[Arrival], cluster: Cluster) -> None:
    """Let the workers of `cluster` come and go; called before it runs."""
    for arrival in arrivals:
        cluster.world.at(arrival.at_s, partial(_DO[arrival.what], cluster, arrival.worker))


def _join(cluster: Cluster, worker: str) -> None:
    world = cluster.world
    if worker not in world.processes:
        cluster.add_worker(worker, at_s=world.now)
    elif world.processes[worker].alive:
        world.at(world.now + RETRY_S, partial(_join, cluster, worker))
    else:
        world.restart(worker)


def _leave(cluster: Cluster, worker: str) -> None:
    def told(core: Worker, now: float) -> list[Effect]:
        return core.leave(now, "told to leave")

    cluster.world.signal(worker, told)


def _kill(cluster: Cluster, worker: str) -> None:
    cluster.world.kill(worker, cuts_line=True)


_DO = {"join": _join, "leave": _leave, "kill": _kill}


# ---- tables ------------------------------------------------------------------------------------------


def _lines(text: str, what: str) -> list[_Line]:
    """The lines that count, cells stripped."""
    split = (tuple(cell.strip() for cell in line.split(",")) for line in text.splitlines())
    numbered = (_Line(f"{what} line {number}", cells) for number, cells in enumerate(split, 1))
    return [line for line in numbered if any(line.cells) and not line.cells[0].startswith("#")]


def _cells(line: _Line, columns: Sequence[str]) -> tuple[str, ...]:
    if len(line.cells) != len(columns):
        raise ScenarioError(f"{line.where}: {len(line.cells)} columns, not {len(columns)} ({','.join(columns)})")
    return line.cells


def _worker(cell: str, where: str) -> str:
    name = f"worker-{int(cell)}" if _NUMBER.fullmatch(cell) else cell
    if not _NAME.fullmatch(name) or _TAKEN.fullmatch(name):
        raise ScenarioError(f"{where}: {cell[:40]!r} is no worker; give a number such as 3, or a name")
    return name


def _positive(cell: str, where: str) -> float:
    found = _number(cell)
    if found is None or not 0.0 < found <= MAX_TASK_S:
        raise ScenarioError(f"{where}: {cell[:40]!r} is not a number of seconds over 0 and at most {MAX_TASK_S:g}")
    return found


def _number(cell: str) -> float | None:
    """A number as a person writes it; None for anything else, nan included."""
    try:
        found = float(cell)
    except ValueError:
        return None
    return None if math.isnan(found) else found
