"""Who may join a run and with what: HELLO, the layout that all must share, ADMIT to the shards, and the seeder.

Decides whether a newcomer fits and who seeds the shards; a worker is welcomed only when every shard has shown that it
will serve it. Never ends a life: the broker does.
"""

from __future__ import annotations

from zasgd.core import codec
from zasgd.core.layout import SECTIONS, Layout, TensorSpec
from zasgd.core.membership import Event, Member, State
from zasgd.core.messages import Admit, Admitted, Hello, Renew, Welcome
from zasgd.core.node import Dial, Effect, Note, PeerId, Refusal, Send, require, shard_peer
from zasgd.core.run import Run, RunPhase, who

SERVER_START_S = 120.0
"""A server may take this long between WELCOME and its first renewal: it compiles its kernel."""
RETRY_MS = 500
MAX_SAMPLES = 1 << 40
MAX_TOKEN_BYTES = 64
MAX_TEXT = 200
"""Characters of a name, host or endpoint: they come back in answers, which have a size."""


class Admission:
    """The door of a run. seeded: shard -> the incarnation by which it says it was seeded."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seeded: dict[int, int] = {}

    # ---- newcomers --------------------------------------------------------------------------------

    def known(self, peer: PeerId, msg: Hello) -> list[Effect] | None:
        """The answer to a HELLO that was heard before, None for a new one; raises Refusal for one out of bounds."""
        if not 0 < len(msg.token) <= MAX_TOKEN_BYTES:
            raise Refusal("BAD_FIELD", f"a token has 1 to {MAX_TOKEN_BYTES} bytes, not {len(msg.token)}")
        if max(len(msg.name), len(msg.host), len(msg.endpoint)) > MAX_TEXT:
            raise Refusal("BAD_FIELD", f"name, host and endpoint have at most {MAX_TEXT} characters")
        member = self.run.members.by_token(msg.token)
        if member is None or member.state is State.FENCING:
            return None
        member.peer = peer
        waiting = member.role == "worker" and member.state is State.ADMITTING
        return [] if waiting else [Send(peer, self.welcome(member))]

    def server(self, now: float, peer: PeerId, msg: Hello) -> list[Effect]:
        """A server gets the lowest free shard; raises Refusal when there is none."""
        run = self.run
        taken = {m.number for m in run.servers()}
        free = [k for k in range(run.config.num_shards) if k not in taken]
        if not free or run.open:
            raise Refusal("FULL", f"all {run.config.num_shards} servers of this run have joined")
        member = run.members.join(now, "server", free[0], msg.token, peer, msg.name, msg.host, msg.pid)
        member.lease_until = now + SERVER_START_S
        member.facts["endpoint"] = msg.endpoint
        return [Send(peer, self.welcome(member)), Dial(shard_peer(member.number), msg.endpoint)]

    def server_ready(self, member: Member) -> list[Effect]:
        """Its first renewal: the kernel is compiled. With the last server the run waits for parameters."""
        run = self.run
        run.members.step(member, Event.ADMITTED)
        if len(run.members.of("server")) == run.config.num_shards and run.phase is RunPhase.WAITING:
            run.phase = RunPhase.SEEDING
        return [Note("server_joined", {"shard": member.number, "host": member.host, "pid": member.pid})]

    def evaluator(self, now: float, peer: PeerId, msg: Hello) -> list[Effect]:
        """One at a time, once the layout is known."""
        run = self.run
        if run.layout is None:
            raise Refusal("NOT_READY", "no worker has shown its layout yet", retry_after_ms=RETRY_MS)
        if msg.layout is not None:
            _same_layout(run.layout, msg.layout)
        if run.members.of("eval"):
            # One that was killed is a member until its lease runs out: its successor waits.
            raise Refusal("FULL", "this run has an evaluator", retry_after_ms=RETRY_MS)
        member = run.members.join(now, "eval", 0, msg.token, peer, msg.name, msg.host, msg.pid)
        run.members.step(member, Event.ADMITTED)
        return [Send(peer, self.welcome(member)), Note("evaluator_joined", {"host": msg.host, "pid": msg.pid})]

    def check_worker(self, msg: Hello) -> None:
        """Raise Refusal unless a worker with this layout and data set fits; the first one sets both."""
        run = self.run
        if run.phase is RunPhase.WAITING:
            joined = len(run.members.of("server"))
            text = f"{joined} of {run.config.num_shards} servers have joined"
            raise Refusal("NOT_READY", text, retry_after_ms=RETRY_MS)
        if run.layout is not None:
            self._check_same(run.layout, msg)
        elif msg.layout is None:
            raise Refusal("NO_LAYOUT", "the first worker must bring the layout of the model")
        else:
            self._check_first(msg.layout, msg.num_samples)
            run.begin(msg.layout, msg.num_samples)

    def worker(self, now: float, peer: PeerId, msg: Hello, *, rejoined: bool) -> list[Effect]:
        """Ask every shard to serve the newcomer; the first one seeds."""
        run = self.run
        number = run.members.worker_id(msg.name)
        member = run.members.join(now, "worker", number, msg.token, peer, msg.name[:80], msg.host[:80], msg.pid)
        member.facts["rejoined"] = rejoined
        member.waiting_for = set(range(run.config.num_shards))
        if not run.open and not run.seeder:
            run.seeder = member.incarnation
        return self.admit(member)

    def admit(self, member: Member) -> list[Effect]:
        """ADMIT to the shards that have not answered; with the layout, which a shard takes once."""
        run = self.run
        effects: list[Effect] = []
        for shard in run.members.of("server"):
            if shard.number in member.waiting_for:
                order = Admit(
                    run=run.id, shard=shard.number, worker=member.number, incarnation=member.incarnation,
                    layout=None if shard.facts.get("has_layout") else run.layout, num_samples=run.num_samples,
                )  # fmt: skip
                effects.append(Send(shard.peer, order))
        return effects

    def admitted(self, now: float, msg: Admitted) -> list[Effect]:
        """A shard serves the newcomer; when all do, it is welcome."""
        run = self.run
        run.speaker(msg).facts["has_layout"] = True
        member = run.members.get(msg.incarnation)
        if member is None or member.state is not State.ADMITTING:
            return []
        member.waiting_for.discard(msg.shard)
        if member.waiting_for:
            return []
        run.members.step(member, Event.ADMITTED)
        member.lease_until = now + run.config.lease_s
        member.progress_at = now
        note = Note("worker_joined", {**who(member), "rejoined": bool(member.facts.get("rejoined"))})
        return [Send(member.peer, self.welcome(member)), note]

    def welcome(self, member: Member) -> Welcome:
        """Who the member is and what it needs."""
        run, config = self.run, self.run.config
        is_server = member.role == "server"
        endpoints = {m.number: str(m.facts.get("endpoint", "")) for m in run.servers()}
        hosts = {m.number: m.host for m in run.servers()}
        return Welcome(
            run=run.id, shard=member.number if is_server else 0, worker=0 if is_server else member.number,
            incarnation=member.incarnation, token=member.token, num_shards=config.num_shards, lease_s=config.lease_s,
            window_bytes=config.window_bytes, data_port=config.data_port,
            endpoints=() if is_server else tuple(endpoints.get(k, "") for k in range(config.num_shards)),
            hosts=() if is_server else tuple(hosts.get(k, "") for k in range(config.num_shards)),
            config=config.shard_config if is_server else "", layout=None if is_server else run.layout,
        )  # fmt: skip

    # ---- layouts ----------------------------------------------------------------------------------

    def _check_same(self, own: Layout, msg: Hello) -> None:
        if msg.layout is None:
            return  # it takes the run's
        _same_layout(own, msg.layout)
        if msg.num_samples and msg.num_samples != self.run.num_samples:
            text = f"this run trains on {self.run.num_samples} samples, the worker has {msg.num_samples}"
            raise Refusal("LAYOUT_MISMATCH", text)

    def _check_first(self, layout: Layout, num_samples: int) -> None:
        config = self.run.config
        if not num_samples or not layout.num_parameters:
            raise Refusal("NO_LAYOUT", "a run needs at least one sample and one parameter")
        if num_samples > MAX_SAMPLES:
            raise Refusal("BAD_FIELD", f"a run has at most {MAX_SAMPLES} samples, not {num_samples}")
        num_bytes = len(codec.pack(layout.to_plain())[0])
        if num_bytes > codec.MAX_LONG_BODY_BYTES - codec.MAX_BODY_BYTES:  # WELCOME carries more than the layout
            raise Refusal("BAD_LAYOUT", f"the layout takes {num_bytes} bytes: use shorter names or fewer tensors")
        if max(t.group for t in layout.tensors) >= config.num_groups:
            raise Refusal("BAD_LAYOUT", f"this run has hyper-parameters for {config.num_groups} parameter groups")
        for section in ("stats", "counters"):
            num_bytes = max(s.size for s in layout.slices(section, config.num_shards)) * SECTIONS[section]
            if num_bytes > codec.MAX_FRAME_BYTES:
                at_most = codec.MAX_FRAME_BYTES
                text = f"the buffers ({section}) take {num_bytes} bytes per shard, one frame holds {at_most}"
                raise Refusal("BAD_LAYOUT", f"{text}: use more servers")

    # ---- seeding ----------------------------------------------------------------------------------

    def seeding_reported(self, msg: Renew) -> list[Effect]:
        """A shard says by whom it was seeded. All by one and the same live seeder: the run is open."""
        run = self.run
        if msg.seeded:
            self.seeded[msg.shard] = msg.seeded
        by_seeder = [k for k, incarnation in self.seeded.items() if incarnation == run.seeder]
        seeder = run.members.get(run.seeder)
        # Of a seeder that is being fenced the shards may have forgotten everything already.
        if run.open or seeder is None or seeder.state is State.FENCING or len(by_seeder) < run.config.num_shards:
            return []
        run.open = True
        run.phase = RunPhase.TRAINING
        return [Note("run_opened", {"workers": len(run.members.of("worker")), "seeder": run.seeder})]

    def elect(self) -> None:
        """The oldest live worker seeds; it hears so with its next renewal."""
        self.seeded.clear()
        others = self.run.members.of("worker", State.LIVE, State.ADMITTING)
        self.run.seeder = others[0].incarnation if others else 0

    def validate(self) -> None:
        """Raise InvariantError unless what is said of seeding can be."""
        require(not self.run.open or self.run.books is not None, "open without a ledger")
        require(len(self.seeded) <= self.run.config.num_shards, "more shards seeded than there are")


def _same_layout(own: Layout, other: Layout) -> None:
    if own.hash == other.hash:
        return
    pairs = zip(own.tensors, other.tensors, strict=False)
    differing = next(((a, b) for a, b in pairs if a != b), None)
    if differing is None:
        text = f"this run's model has {len(own.tensors)} tensors, the newcomer's {len(other.tensors)}"
    else:
        text = f"this run's model has {_named(differing[0])} where the newcomer's has {_named(differing[1])}"
    raise Refusal("LAYOUT_MISMATCH", text)


def _named(tensor: TensorSpec) -> str:
    return f"{tensor.name[:60]} {list(tensor.shape)} {tensor.dtype}"
