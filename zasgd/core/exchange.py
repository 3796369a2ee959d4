"""One request to every shard, until every shard has answered it.

Decides when to probe and when to send again, and which parts of replies are new. The caller decides what to ask and
what the answers mean. Used by workers (ATTACH, INIT, PULL, PUSH), the evaluator and the broker (OBSERVE).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from zasgd.core.layout import SECTIONS, Layout
from zasgd.core.messages import Ack, Array, Attached, Err, Init, Message, Params, Probe, Push
from zasgd.core.node import Effect, PeerId, Send

MIN_TIMEOUT_S = 1.0
MAX_TIMEOUT_S = 30.0
SLOWEST_BYTES_PER_S = 16 * 1024 * 1024
SLOWEST_AT_FIRST_BYTES_PER_S, MAX_FIRST_S = 512 * 1024, 10.0
"""What an answer is allowed while nothing is known of the line."""
Piece = tuple[str, int, Array]
"""(section, first element in the section's flat vector, values)."""
Reply = Ack | Params | Attached


def backoff_s(base_s: float, salt: int, attempt: int) -> float:
    """Exponential back-off from `base_s` to 30 s with a jitter of +-25 % that is a hash of (salt, attempt)."""
    digest = hashlib.blake2b(f"{salt}:{attempt}".encode(), digest_size=2).digest()
    jitter = 0.75 + 0.5 * int.from_bytes(digest, "little") / 65535
    return min(MAX_TIMEOUT_S, base_s * 2.0 ** min(attempt, 10)) * jitter


class RoundTrip:
    """Smoothed round-trip time and its deviation (Jacobson 1988; RFC 6298's gains)."""

    def __init__(self) -> None:
        self.srtt_s = 0.0
        self.rttvar_s = 0.0
        self.num_doubts = 0

    def add(self, sample_s: float) -> None:
        """Take one measured round trip that was not retried."""
        self.num_doubts = 0
        if not self.srtt_s:
            self.srtt_s, self.rttvar_s = sample_s, sample_s / 2
        else:
            self.rttvar_s += 0.25 * (abs(sample_s - self.srtt_s) - self.rttvar_s)
            self.srtt_s += 0.125 * (sample_s - self.srtt_s)

    def timeout_s(self, num_bytes: int, answer_bytes: int = 0) -> float:
        """How long a request of this many bytes may take before it is doubted.

        Until one has been answered the line may be slow: asked twice, it would carry a long answer twice.
        """
        first_s = 0.0 if self.srtt_s else min(MAX_FIRST_S, answer_bytes / SLOWEST_AT_FIRST_BYTES_PER_S)
        expected_s = max(MIN_TIMEOUT_S, self.srtt_s + 4 * self.rttvar_s + num_bytes / SLOWEST_BYTES_PER_S + first_s)
        return max(expected_s, min(MAX_TIMEOUT_S, expected_s * 2.0 ** min(self.num_doubts, 10)))

    def doubt(self) -> None:
        """A request was overdue. Until one is answered without that, longer is waited (RFC 6298, 5.5 to 5.7).

        A retried request gives no sample, so on a line with a queue of seconds everything would be doubted for ever.
        """
        self.num_doubts += 1


@dataclass(slots=True)
class _Leg:
    """The request to one shard.

    refused: the code of a final refusal, empty while there is none. parts: of the answer, by number; None if the caller
    has taken it.
    """

    peer: PeerId
    messages: Sequence[Message]
    sent_at: float
    deadline: float
    attempts: int = 0
    done: bool = False
    refused: str = ""
    version: int = 0
    lag: int = 0
    samples: int = 0
    parts: dict[int, Reply | None] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        return self.done or bool(self.refused)


class Exchange:
    """A request under one `seq`: `requests` holds for every shard its peer and the messages that make it up."""

    def __init__(
        self,
        now: float,
        seq: int,
        requests: dict[int, tuple[PeerId, Sequence[Message]]],
        round_trip: RoundTrip,
        *,
        answer_bytes: int = 0,
        keeps_parts: bool = True,
    ) -> None:
        """answer_bytes: about how many a shard sends back. keeps_parts: for `pieces`, else the caller takes each."""
        self.seq = seq
        self._keeps_parts = keeps_parts
        self._round_trip = round_trip
        sent_bytes = max((_num_bytes(m) for _, m in requests.values()), default=0)
        self._timeout_s = round_trip.timeout_s(sent_bytes, answer_bytes)
        self.legs = {
            shard: _Leg(peer, messages, now, now + self._timeout_s) for shard, (peer, messages) in requests.items()
        }

    # ---- events -----------------------------------------------------------------------------------

    def start(self, sent: Collection[Message] = ()) -> list[Effect]:
        """Send everything a first time, but for what has been `sent` already."""
        before = {id(m) for m in sent}
        return [Send(leg.peer, m) for leg in self.legs.values() for m in leg.messages if id(m) not in before]

    def on_reply(self, now: float, msg: Reply) -> bool:
        """Take one part of an answer, and tell whether it is new; what is not awaited changes nothing."""
        leg = self.legs.get(msg.shard)
        if leg is None or leg.settled or msg.seq != self.seq:
            return False
        if leg.parts and leg.version != msg.version:
            leg.parts.clear()  # a repeated OBSERVE found a newer version: parts of two never mix
        is_new = msg.part not in leg.parts
        leg.version = msg.version
        if not isinstance(msg, Attached):
            leg.samples = msg.samples
        leg.lag = msg.lag if isinstance(msg, Ack) else 0
        leg.parts[msg.part] = msg if self._keeps_parts else None
        if len(leg.parts) == msg.parts:
            leg.done = True
            if not leg.attempts:
                self._round_trip.add(now - leg.sent_at)
        return is_new

    def on_error(self, now: float, err: Err) -> list[Effect]:
        """A refusal: send again where the shard lacks the data, wait where it asks for it, else it is final."""
        leg = self.legs.get(err.shard)
        if leg is None or leg.settled or err.seq != self.seq:
            return []
        if not err.retryable:
            leg.refused = err.code
            return []
        leg.attempts += 1
        if err.retry_after_ms:
            leg.deadline = now + err.retry_after_ms / 1000
            self._round_trip.num_doubts = 0  # it answers: the line is not slow
            return []
        leg.deadline = now + backoff_s(self._timeout_s, self.seq * 31 + err.shard, leg.attempts - 1)
        return [Send(leg.peer, m) for m in leg.messages]

    def on_timer(self, now: float) -> list[Effect]:
        """Doubt what is overdue: probe a push or seeding, repeat anything else."""
        effects: list[Effect] = []
        overdue = [(shard, leg) for shard, leg in self.legs.items() if not leg.settled and leg.deadline <= now]
        if overdue:
            self._round_trip.doubt()
        for shard, leg in overdue:
            leg.attempts += 1
            leg.deadline = now + backoff_s(self._timeout_s, self.seq * 31 + shard, leg.attempts)
            first = leg.messages[0]
            if isinstance(first, Push | Init):
                effects.append(Send(leg.peer, _probe(first)))
            else:
                effects += [Send(leg.peer, m) for m in leg.messages]
        return effects

    def next_deadline(self) -> float:
        """The earliest doubt, infinity when every shard has answered."""
        return min((leg.deadline for leg in self.legs.values() if not leg.settled), default=float("inf"))

    # ---- results ----------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Every shard has answered or refused."""
        return all(leg.settled for leg in self.legs.values())

    @property
    def refusals(self) -> dict[int, str]:
        """Shard -> code of its final refusal."""
        return {shard: leg.refused for shard, leg in self.legs.items() if leg.refused}

    @property
    def versions(self) -> dict[int, int]:
        """Shard -> version of its answer."""
        return {shard: leg.version for shard, leg in self.legs.items() if leg.done}

    @property
    def lags(self) -> dict[int, int]:
        """Shard -> lag of the push there."""
        return {shard: leg.lag for shard, leg in self.legs.items() if leg.done}

    @property
    def samples(self) -> int:
        """The sample clock of the shard that is furthest."""
        return max((leg.samples for leg in self.legs.values()), default=0)

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """The values in the answers, placed in the flat vectors of `layout`."""
        found: list[Piece] = []
        starts = {s: [part.start for part in layout.slices(s, len(self.legs))] for s in SECTIONS}
        for shard, leg in self.legs.items():
            for part in leg.parts.values():
                if part is None or isinstance(part, Attached):
                    continue
                at = starts["params"][shard] + part.offset
                for values in part.params:
                    found.append(("params", at, values))
                    at += values.size
                if part.stats.size:
                    found.append(("stats", starts["stats"][shard], part.stats))
                if part.counters.size:
                    found.append(("counters", starts["counters"][shard], part.counters))
        return tuple(found)


def _num_bytes(messages: Iterable[Message]) -> int:
    total = 0
    for m in messages:
        arrays = (*m.grads, *m.packed) if isinstance(m, Push) else m.params if isinstance(m, Init) else ()
        total += sum(a.nbytes for a in arrays)
    return total


def _probe(msg: Message) -> Probe:
    return Probe(run=msg.run, shard=msg.shard, worker=msg.worker, incarnation=msg.incarnation, seq=msg.seq)


def covers(pieces: Iterable[Piece], layout: Layout) -> bool:
    """The pieces hold every parameter."""
    return sum(values.size for section, _, values in pieces if section == "params") == layout.sizes["params"]


def over_shards(
    num_shards: int, peer_of: Callable[[int], PeerId], make: Callable[[int], Sequence[Message]]
) -> dict[int, tuple[PeerId, Sequence[Message]]]:
    """The `requests` of an Exchange with every shard."""
    return {k: (peer_of(k), make(k)) for k in range(num_shards)}
