"""A whole training run in virtual time: one broker, its shards, workers and perhaps an evaluator, all real cores.

Decides names, tokens and what each process is started with; faults and problems come from outside. Any core class
may be replaced by a subclass, which is how a test plants a bug.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zasgd.core.broker import Broker
from zasgd.core.evaluator import Evaluator
from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.ledger import num_batches
from zasgd.core.messages import Array, Grant
from zasgd.core.parameters import ShardConfig
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.core.run import BrokerConfig
from zasgd.core.schedule import Schedule
from zasgd.core.shard import Shard
from zasgd.core.worker import Worker, WorkerConfig
from zasgd.sim.faults import Faults, Link
from zasgd.sim.invariants import Observer, TableSizes, Tallies
from zasgd.sim.problems import Gradients, Quadratic, SimulatedWork, TaskTimes, UniformTimes, zero_vectors
from zasgd.sim.world import SCHEME, Problem, State, Watch, World

RUN = 0x5EED


def small_layout(num_params: int = 128) -> Layout:
    """A model in miniature: two groups of parameters, float buffers and a counter."""
    half = num_params // 2
    return Layout(
        (
            TensorSpec("weight", (half,)),
            TensorSpec("bias", (num_params - half,), group=1),
            TensorSpec("mean", (16,), section="stats"),
            TensorSpec("steps", (), dtype="int64", section="counters"),
        )
    )


@dataclass(frozen=True)
class Plan:
    """What a simulated run trains and on how many processes.

    step_s: mean of a task, give or take half. config: what the broker is told, in place of what the other fields say of
    the run. member: of each worker, but for its name, host and pid.
    """

    num_workers: int = 4
    num_shards: int = 2
    num_samples: int = 256
    batch_size: int = 8
    epochs: int = 2
    step_s: float = 2.0
    lease_s: float = 10.0
    evaluator: bool = False
    layout: Layout = field(default_factory=small_layout)
    rule: RuleSpec = field(default_factory=lambda: RuleSpec("dc-asgd-a"))
    groups: tuple[GroupSpec, ...] = (GroupSpec(momentum=0.9, nesterov=True), GroupSpec(weight_decay=1e-4))
    lr: float = 0.01
    config: BrokerConfig | None = None
    member: WorkerConfig = field(default_factory=WorkerConfig)
    broker: type[Broker] = Broker
    shard: type[Shard] = Shard
    worker: type[Worker] = Worker

    @property
    def grid(self) -> list[Grant]:
        """Every batch of every epoch."""
        cells = num_batches(self.num_samples, self.batch_size)
        stops = [*((b + 1) * self.batch_size for b in range(cells - 1)), self.num_samples]
        return [Grant(e, b, b * self.batch_size, stop) for e in range(self.epochs) for b, stop in enumerate(stops)]


class Cluster:
    """The processes of one run and those who watch them.

    Processes are called `broker`, `shard-0`, ..., `worker-0`, ..., `evaluator`; `world` drives them. problem: what
    workers compute, in place of `gradients` in `times`. initial: what the first worker seeds the run with. watches: in
    place of `observer` and `tables`, without which `settle` has nothing to say. traced, validate_every: see World.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        *,
        faults: Faults | None = None,
        gradients: Gradients | None = None,
        times: TaskTimes | None = None,
        bad: frozenset[tuple[int, int]] = frozenset(),
        link: Link | None = None,
        problem: Problem | None = None,
        initial: Mapping[str, Array] | None = None,
        watches: Sequence[Watch] | None = None,
        traced: bool = True,
        validate_every: int = 1,
    ) -> None:
        self.plan = plan
        self.observer = Observer(plan.num_shards)
        self.tables = TableSizes()
        self.initial = zero_vectors(plan.layout) if initial is None else initial
        self.work = SimulatedWork(
            plan.layout,
            gradients or Quadratic(plan.layout.sizes["params"]),
            times or UniformTimes(plan.step_s, 0.5, seed + 1),
            bad=bad,
        )
        watching = (self.observer, self.tables) if watches is None else watches
        self.world = World(
            seed, link=link, faults=faults, problem=problem or self.work, watches=watching, traced=traced,
            validate_every=validate_every,
        )  # fmt: skip
        self.world.add("broker", self._new_broker)
        for k in range(plan.num_shards):
            self.add_shard(k)
        for i in range(plan.num_workers):
            self.add_worker(f"worker-{i}")
        if plan.evaluator:
            self.add_evaluator()

    # ---- processes ---------------------------------------------------------------------------------

    def add_shard(self, number: int) -> None:
        """A server process; the broker tells it which shard it is."""
        name = f"shard-{number}"

        def new(now: float, life: int) -> Shard:
            return self.plan.shard(now, _token(name, life), SCHEME + name, host=name, pid=life + 1)

        self.world.add(name, new, serves=True)

    def add_worker(self, process: str, *, name: str = "", at_s: float = 0.0, data_path: str = "relay") -> None:
        """A worker process, each life with a new token; `name` keeps its worker id."""

        def new(now: float, life: int) -> Worker:
            config = replace(
                self.plan.member, name=name, host=process, pid=life + 1, data_path=data_path,
                push_every=self.plan.rule.push_every,
            )  # fmt: skip
            token = _token(process, life)
            return self.plan.worker(now, token, config, self.plan.layout, self.plan.num_samples, self._seed_values)

        self.world.add(process, new, at_s=at_s)

    def add_evaluator(self, *, at_s: float = 0.0) -> None:
        """The process `evaluator`."""

        def new(now: float, life: int) -> Evaluator:
            config = WorkerConfig(host="evaluator", pid=life + 1)
            return Evaluator(now, _token("evaluator", life), config, self.plan.layout)

        self.world.add("evaluator", new, at_s=at_s)

    def _seed_values(self) -> dict[str, Array]:
        return {section: values.copy() for section, values in self.initial.items()}

    def _new_broker(self, now: float, life: int) -> Broker:
        plan = self.plan
        return plan.broker(now, plan.config or self._config())

    def _config(self) -> BrokerConfig:
        plan = self.plan
        schedule = Schedule(lr=plan.lr, epochs=plan.epochs)
        shard_config = ShardConfig(plan.num_shards, plan.rule, plan.groups, schedule)
        return BrokerConfig(
            run=RUN,
            recipe="{}",
            num_shards=plan.num_shards,
            epochs=plan.epochs,
            batch_size=plan.batch_size,
            num_groups=len(plan.groups),
            shard_config=shard_config.to_json(),
            lease_s=plan.lease_s,
            wants_evaluator=plan.evaluator,
            push_every=plan.rule.push_every,
        )

    # ---- reading -----------------------------------------------------------------------------------

    @property
    def broker(self) -> Broker:
        """The broker's core."""
        core: Broker = self.world.node("broker")
        return core

    def shard(self, number: int) -> Shard:
        """The core that serves shard `number`."""
        cores = [p.node for p in self.world.processes.values() if isinstance(p.node, Shard)]
        return next(core for core in cores if core.number == number)

    @property
    def over(self) -> bool:
        """Whether every process that has not been killed for good has ended by itself."""
        return all(p.state in (State.STOPPED, State.DEAD) for p in self.world.processes.values())

    def run(self, until_s: float) -> None:
        """Let virtual time pass up to `until_s` or until every process has ended."""
        self.world.run(until_s, stop_when=self._ended)

    def _ended(self) -> bool:
        return self.world.processes["broker"].state is State.STOPPED and self.over

    def settle(self) -> Tallies:
        """Check the whole run's books; raises InvariantError."""
        ledger = self.broker.run.books
        if ledger is None:
            return Tallies(0, 0, 0)
        return self.observer.settle(ledger, self.plan.grid)


def _token(name: str, life: int) -> bytes:
    return f"{name}/{life}".encode()
