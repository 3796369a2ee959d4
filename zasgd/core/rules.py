"""The update rules, their stages and constants, as values.

Decides which rules exist, of which stages each is made, what their constants may be, and what does not combine and
why. Never touches an array: the arithmetic is in `reference` (to read) and in `kernels` (to run).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

MAX_FLOAT32 = 3.4028234e38
MAX_PUSH_EVERY = 512
"""Batches per push: the grants of two pushes must fit into one answer of the broker."""

COMPENSATIONS = ("none", "constant", "adaptive")
LOOK_AHEADS = ("none", "shard", "worker")
SCALES = ("none", "staleness", "delay")
LAG_POLICIES = ("drop", "damp", "block")
MODES = ("async", "sync", "buffer")
EXCHANGES = ("gradient", "difference", "elastic", "outer")
ALGORITHMS = ("sgd", "adamw")


class RuleError(ValueError):
    """A rule or a parameter group that cannot be; the text is one line that says what to change."""


@dataclass(frozen=True, slots=True)
class Family:
    """One named rule: the stages that its name stands for, its formula, source and use."""

    stages: Mapping[str, Any]
    formula: str
    source: str
    use: str


RULES: dict[str, Family] = {
    "asgd": Family(
        {}, "c = g", "arXiv 1312.6186", "the baseline; up to 8 workers"
    ),
    "dc-asgd-c": Family(
        {"compensate": "constant", "lam": 0.04},
        "c = g + lam g g D", "arXiv 1609.08326", "as asgd: up to 8 workers",
    ),
    "dc-asgd-a": Family(
        {"compensate": "adaptive", "lam": 2.0},
        "MS = m MS + (1-m) g g; c = g + lam / sqrt(MS + 1e-7) g g D", "arXiv 1609.08326",
        "SGD, up to 32 workers without momentum, 16 with",
    ),
    "staleness-aware": Family(
        {"scale": "staleness"}, "d = d / max(1, tau)", "arXiv 1511.05950", "up to 8 workers"
    ),
    "delay-adaptive": Family(
        {"scale": "delay"}, "d = d min(1, delay_limit / tau)", "arXiv 2206.08307",
        "SGD without momentum on shards without memory to spare, up to 64 workers",
    ),
    "gap-aware": Family(
        {"gap_aware": True},
        "d = d / (1 + |D| / C); C = eta_max (sqrt(R) + 1e-8); R = .999 R + .001 v v", "arXiv 1909.10802",
        "SGD with and without momentum, up to 64 workers",
    ),
    "dana": Family(
        {"look_ahead": "shard"},
        "S -= v_i; v_i = gamma v_i + d; S += v_i; w -= eta v_i; send w - eta gamma S", "arXiv 1907.11612",
        "momentum, up to 16 workers",
    ),
    "dana-slim": Family(
        {"look_ahead": "worker"},
        "worker: v = gamma v + d; u = gamma v + d; shard: w -= eta u", "arXiv 1907.11612",
        "as dana, when the shards have no memory for it",
    ),
    "dana-dc": Family(
        {"look_ahead": "shard", "compensate": "constant", "lam": 2.0},
        "dana with c = g + lam g g D", "arXiv 1907.11612", "as dana",
    ),
    "easgd": Family(
        {"exchange": "elastic"},
        "e = a (x_i - x); x_i -= e; x += e; a = elasticity / N", "arXiv 1412.6651", "rare exchanges",
    ),
    "delta": Family(
        {"exchange": "difference", "outer_lr": 1.0},
        "w -= outer_lr / N (w_pulled - w_local)", "arXiv 1312.6186", "rare exchanges",
    ),
    "diloco": Family(
        {"exchange": "outer", "outer_lr": 0.7, "outer_momentum": 0.9},
        "outer (delayed) Nesterov on w_pulled - w_local", "arXiv 2311.08105, 2401.09135",
        "exchanges of tens to hundreds of steps",
    ),
}  # fmt: skip
"""Every name, in the order of the papers' families; names of gradient rules join with `+`."""

SHORT = {"ga": "gap-aware", "sa": "staleness-aware", "da": "delay-adaptive"}

_NEUTRAL: dict[str, Any] = {
    "compensate": "none",
    "lam": 0.0,
    "look_ahead": "none",
    "gap_aware": False,
    "scale": "none",
    "exchange": "gradient",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
}


def stages_of(name: str) -> dict[str, Any]:
    """The stages that a rule's name stands for, `dana+ga` being those of both. Raises RuleError."""
    found: dict[str, Any] = {}
    for part in str(name).split("+"):
        family = RULES.get(SHORT.get(part, part))
        if family is None:
            raise RuleError(f"rule {part[:40]!r} is none of {', '.join(RULES)}, nor several of them joined by +")
        twice = sorted(found.keys() & family.stages.keys())
        if twice or (found.get("exchange") and family.stages) or (found and "exchange" in family.stages):
            raise RuleError(f"rule {name[:40]!r}: {part} does not go together with what stands before it")
        found.update(family.stages)
    return _NEUTRAL | found


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """Which rule a shard applies: a name, and stages that replace what the name stands for (None: keep it).

    name: of RULES, or several joined by `+`.
    compensate: `none`, `constant` or `adaptive`. lam: its strength, at least 0. ms_decay: m of the mean of squared
      gradients, in [0, 1).
    look_ahead: `none`, on the `shard` (one momentum vector per worker there) or on the `worker`.
    gap_aware: divide by 1 + |D| / C. gap_decay: of R, in [0, 1).
    scale: `none`, `staleness` (1 / tau) or `delay` (min(1, delay_limit / tau)).
    max_lag: pushes with a lag below it are applied, 0 for all; lag_policy says what becomes of the others: `drop`;
      `damp` them by max_lag / tau; `block`: others wait so that there are none, those of workers that nobody waits for
      any more, or who are more than max_lag, are damped.
    mode: `async`; `sync`: rounds of `quorum` pushes (0: every worker that has work), their mean; `buffer`: one update
      per `quorum` pushes.
    push_every: batches per push: the mean of their gradients, or as many local steps.
    exchange: `gradient`, or what local steps led to: `difference`, `elastic`, `outer`.
    outer_lr, outer_momentum: of differences. outer_mean: divide a difference by the number of workers.
    elasticity: a times N of easgd. delay_share: c times N of asynchronous diloco, in [0, 1].
    guard: damp the rate while the loss or the gap says that the run diverges.
    Raises RuleError.
    """

    name: str = "dc-asgd-a"
    lam: float | None = None
    ms_decay: float = 0.95
    compensate: str | None = None
    look_ahead: str | None = None
    gap_aware: bool | None = None
    gap_decay: float = 0.999
    scale: str | None = None
    delay_limit: float = 4.0
    max_lag: int = 0
    lag_policy: str = "drop"
    mode: str = "async"
    quorum: int = 0
    push_every: int = 1
    exchange: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer_mean: bool = True
    elasticity: float = 0.9
    delay_share: float = 0.0
    guard: bool = False

    def __post_init__(self) -> None:
        for key, value in stages_of(self.name).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        _check_choices(self)
        _check_numbers(self)
        reason = _conflict(self)
        if reason:
            raise RuleError(reason)

    # What the stages need; `compensate` and the others are never None once constructed.

    @property
    def strength(self) -> float:
        """lambda of the compensation, 0 without one."""
        return self.lam or 0.0 if self.compensate != "none" else 0.0

    @property
    def needs_snapshot(self) -> bool:
        """Whether an update reads what the worker computed on."""
        return self.compensate != "none" or self.look_ahead == "shard" or bool(self.gap_aware)

    @property
    def needs_mean_square(self) -> bool:
        """Whether a shard keeps a running mean of squared gradients."""
        return self.compensate == "adaptive"

    @property
    def needs_own_momentum(self) -> bool:
        """Whether a shard keeps one momentum vector per worker, and their sum."""
        return self.look_ahead == "shard"

    @property
    def needs_accumulator(self) -> bool:
        """Whether an update is made of several pushes."""
        return self.mode != "async"

    @property
    def is_local(self) -> bool:
        """Whether workers take optimizer steps of their own and push what these led to."""
        return self.exchange != "gradient"

    def scale_at(self, lag: int) -> float:
        """s(tau): what the scale stage and a damping gate multiply a push of this lag by."""
        scale = 1.0
        if self.scale == "staleness":
            scale = 1.0 / max(1, lag)
        elif self.scale == "delay":
            scale = min(1.0, self.delay_limit / max(1, lag))
        if self.max_lag and self.lag_policy != "drop" and lag >= self.max_lag:
            scale *= self.max_lag / lag
        return scale

    def to_plain(self) -> dict[str, Any]:
        """Texts and numbers only, for the wire and for files."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> RuleSpec:
        """The inverse of to_plain; absent keys take their defaults. Raises RuleError for anything else."""
        return cls(**_checked_keys("rule", plain, [f.name for f in fields(cls)]))


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """How one parameter group of the layout is optimised; the fields mean what they mean in torch.optim.

    algorithm: `sgd` or `adamw`. lr_scale: times the push's learning rate, at least 0. momentum: of sgd, in [0, 1); 0
    keeps no buffer. nesterov: needs momentum. weight_decay: at least 0; added to the compensated gradient by sgd,
    decoupled by adamw. beta1, beta2, eps: of adamw. Raises RuleError.
    """

    lr_scale: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    algorithm: str = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check_choice("algorithm", self.algorithm, ALGORITHMS)
        for key in ("lr_scale", "weight_decay", "eps"):
            _check_number(key, getattr(self, key))
        for key in ("momentum", "beta1", "beta2"):
            _check_number(key, getattr(self, key), below=1.0)
        if type(self.nesterov) is not bool:
            raise RuleError(f"nesterov is {str(self.nesterov)[:40]!r}: give true or false")
        if self.nesterov and self.momentum == 0:
            raise RuleError("nesterov needs momentum: set momentum above 0 or nesterov to false")
        if self.algorithm == "adamw" and self.momentum:
            raise RuleError("adamw has beta1 for momentum: set momentum to 0")

    def to_plain(self) -> dict[str, Any]:
        """Numbers, texts and booleans only, for the wire and for files."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> GroupSpec:
        """The inverse of to_plain; absent keys take their defaults. Raises RuleError for anything else."""
        return cls(**_checked_keys("a parameter group", plain, [f.name for f in fields(cls)]))


def shard_groups(rule: RuleSpec, groups: Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    """What is left for the shards of `groups` when workers run the optimizer, or keep its momentum, themselves.

    A group of rate 0 keeps it: its parameters stay as they are bit for bit.
    """
    if not rule.is_local and rule.look_ahead != "worker":
        return tuple(groups)
    return tuple(GroupSpec(lr_scale=g.lr_scale if not rule.is_local else float(g.lr_scale > 0)) for g in groups)


# ---- what does not combine ---------------------------------------------------------------------------


def check(rule: RuleSpec, groups: Sequence[GroupSpec], inflight: int = 0) -> None:
    """Raise RuleError, with the reason, unless a run can train `groups` (as a recipe has them) by `rule`."""
    reason = refusal(rule, groups, inflight)
    if reason:
        raise RuleError(reason)


def refusal(rule: RuleSpec, groups: Sequence[GroupSpec], inflight: int = 0) -> str | None:
    """Why `rule` cannot train these groups, or None when it can."""
    trained = [g for g in groups if g.lr_scale] or list(groups)
    adamw = any(g.algorithm == "adamw" for g in trained)
    if len({g.algorithm for g in trained}) > 1:
        return "all parameter groups take the same algorithm"
    if rule.look_ahead != "none":
        if adamw:
            return f"{rule.name} looks ahead by SGD's momentum, which adamw does not have"
        if any(g.nesterov for g in trained):
            return f"{rule.name} implies Nesterov's look-ahead: set optimizer.nesterov to false"
        if not all(g.momentum for g in trained):
            return f"{rule.name} looks ahead by momentum: set optimizer.momentum above 0"
        if len({g.momentum for g in trained}) > 1:
            return f"{rule.name} takes one momentum for all groups"
    if rule.gap_aware and adamw:
        return "gap-aware measures the gap in steps of SGD, which adamw's are not"
    if inflight:
        return _inflight_refusal(rule)
    return None


def _inflight_refusal(rule: RuleSpec) -> str | None:
    if rule.is_local or rule.mode == "sync":
        return f"inflight goes with gradients that are applied as they come, not with {rule.name}, {rule.mode}"
    if rule.max_lag and rule.lag_policy == "block":
        return "inflight does not go with lag_policy block, which holds a worker's one push"
    if rule.look_ahead == "worker":
        return "inflight is refused for dana-slim: its momentum would miss the push that is on its way"
    if rule.look_ahead == "shard" and not rule.gap_aware:
        return "inflight doubles the workers that dana sees and makes it fail: use dana+ga"
    return None


def _conflict(rule: RuleSpec) -> str | None:
    """Why stages of a rule do not go together, whatever is trained."""
    if rule.quorum and rule.mode == "async":
        return "quorum is for modes sync and buffer: set mode, or leave quorum out"
    if rule.lag_policy != "drop" and not rule.max_lag:
        return f"lag_policy {rule.lag_policy} needs max_lag, the lag from which on it applies"
    if rule.is_local:
        return _local_conflict(rule)
    stages = [s for s, on in _stages_on(rule).items() if on]
    if rule.mode == "sync" and (stages or rule.max_lag):
        return f"in mode sync nobody is late: leave out {', '.join(stages) or 'max_lag'}"
    if rule.mode == "buffer":
        if rule.look_ahead != "none" or rule.gap_aware:
            return "mode buffer has no momentum per push, which look_ahead and gap_aware count on"
        if rule.max_lag and rule.lag_policy == "block":
            return "mode buffer does not block: set lag_policy to drop or damp"
        if rule.quorum < 1:
            return "mode buffer needs quorum, the number of pushes per update"
    if rule.look_ahead == "worker":
        if rule.compensate != "none" or rule.gap_aware:
            return "look_ahead on the worker pushes momentum, which compensate and gap_aware would take for a gradient"
        if rule.scale != "none" or (rule.max_lag and rule.lag_policy == "damp"):
            return "look_ahead on the worker has applied its momentum before anything could be scaled"
    if rule.scale != "none" and rule.max_lag and rule.lag_policy == "damp":
        return "scale and lag_policy damp both scale by the lag: keep one"
    return None


def _local_conflict(rule: RuleSpec) -> str | None:
    stages = [s for s, on in _stages_on(rule).items() if on]
    if rule.outer_momentum and rule.exchange != "outer":
        return f"{rule.name} has no outer momentum: only diloco does"
    if stages or (rule.max_lag and rule.lag_policy == "damp"):
        return f"{rule.name} pushes what local steps led to, not a gradient: leave out {', '.join(stages) or 'damp'}"
    if rule.mode == "buffer" or (rule.mode == "sync" and rule.exchange == "elastic"):
        return f"{rule.name} does not go with mode {rule.mode}"
    if rule.mode == "sync" and rule.max_lag:
        return "in mode sync nobody is late: leave out max_lag"
    return None


def _stages_on(rule: RuleSpec) -> dict[str, bool]:
    return {
        "compensate": rule.compensate != "none",
        "look_ahead": rule.look_ahead != "none",
        "gap_aware": bool(rule.gap_aware),
        "scale": rule.scale != "none",
    }


# ---- what it costs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Vectors as long as the slice, float32, besides the parameters: on a shard in all, and there per worker."""

    per_shard: int
    per_worker: int


def cost(rule: RuleSpec, groups: Sequence[GroupSpec], inflight: int = 0) -> Cost:
    """What the state of `rule` and `groups` (as a recipe has them) takes.

    Per worker that is one for what was sent, which also answers a repeated push, and dana's momentum.
    """
    on_shard = shard_groups(rule, groups)
    adamw = any(g.algorithm == "adamw" for g in on_shard)
    shared_momentum = any(g.momentum for g in on_shard) and not rule.needs_own_momentum
    outer = 1 + (rule.mode == "async") if rule.exchange == "outer" else 0
    per_shard = (
        2 * adamw + shared_momentum + rule.needs_mean_square + bool(rule.gap_aware) + rule.needs_own_momentum
        + rule.needs_accumulator + outer
    )  # fmt: skip
    return Cost(per_shard, 1 + inflight + rule.needs_own_momentum)


# ---- checks ------------------------------------------------------------------------------------------


def _check_choices(rule: RuleSpec) -> None:
    for key, known in (
        ("compensate", COMPENSATIONS), ("look_ahead", LOOK_AHEADS), ("scale", SCALES), ("lag_policy", LAG_POLICIES),
        ("mode", MODES), ("exchange", EXCHANGES),
    ):  # fmt: skip
        _check_choice(f"rule.{key}", getattr(rule, key), known)
    for key in ("gap_aware", "outer_mean", "guard"):
        if type(getattr(rule, key)) is not bool:
            raise RuleError(f"rule.{key} is {str(getattr(rule, key))[:40]!r}: give true or false")


def _check_numbers(rule: RuleSpec) -> None:
    for key in ("lam", "delay_limit", "outer_lr", "elasticity"):
        _check_number(f"rule.{key}", getattr(rule, key))
    for key in ("ms_decay", "gap_decay", "outer_momentum"):
        _check_number(f"rule.{key}", getattr(rule, key), below=1.0)
    _check_number("rule.delay_share", rule.delay_share, below=1.0 + 1e-9)
    for key, least in (("max_lag", 0), ("quorum", 0), ("push_every", 1)):
        value = getattr(rule, key)
        most = MAX_PUSH_EVERY if key == "push_every" else 1 << 31
        if type(value) is not int or not least <= value <= most:
            raise RuleError(f"rule.{key} is {str(value)[:40]!r}: give a whole number from {least} to {most}")


def _check_choice(what: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise RuleError(f"{what} is {str(value)[:40]!r}: give one of {', '.join(known)}")


def _check_number(what: str, value: Any, below: float = MAX_FLOAT32) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below:
        return
    limit = "finite in float32" if below == MAX_FLOAT32 else f"below {below:g}"
    raise RuleError(f"{what} is {str(value)[:40]!r}: give a number, at least 0 and {limit}")


def _checked_keys(what: str, plain: Any, known: Sequence[str]) -> dict[str, Any]:
    if type(plain) is not dict:
        raise RuleError(f"{what} is a table with the keys {', '.join(known)}")
    for key in plain:
        if key not in known:
            raise RuleError(f"{what} has no key {str(key)[:40]!r}; its keys are {', '.join(known)}")
    return plain
