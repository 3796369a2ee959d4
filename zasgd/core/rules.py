"""The update rules and their constants, as values.

Decides which rules exist, what their constants may be and what they default to; never touches an array. The
arithmetic is in `reference` (to read) and in `kernels` (to run).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

RULES = ("asgd", "dc-asgd-c", "dc-asgd-a")
"""Asynchronous SGD, and delay-compensated SGD with constant and with adaptive strength (arXiv 1609.08326)."""

DEFAULT_LAM = {"asgd": 0.0, "dc-asgd-c": 0.04, "dc-asgd-a": 2.0}
MAX_FLOAT32 = 3.4028234e38


class RuleError(ValueError):
    """A rule or a parameter group that cannot be; the text is one line that says what to change."""


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """Which rule a shard applies.

    name: one of RULES. lam: strength of the compensation, at least 0 (lambda of dc-asgd-c, lambda_0 of
    dc-asgd-a); None takes the rule's default, 0.04 and 2.0; asgd has no use for it. ms_decay: m of the mean
    of squared gradients of dc-asgd-a, in [0, 1). Raises RuleError.
    """

    name: str = "dc-asgd-a"
    lam: float | None = None
    ms_decay: float = 0.95

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise RuleError(f"rule {str(self.name)[:40]!r} is none of {', '.join(RULES)}")
        if self.lam is not None:
            _check_number("rule.lam", self.lam)
        _check_number("rule.ms_decay", self.ms_decay, below=1.0)

    @property
    def strength(self) -> float:
        """`lam`, or the rule's default when it is None."""
        return DEFAULT_LAM[self.name] if self.lam is None else self.lam

    @property
    def needs_snapshot(self) -> bool:
        """Whether the rule reads what the worker computed on."""
        return self.name != "asgd"

    @property
    def needs_mean_square(self) -> bool:
        """Whether the rule keeps a running mean of squared gradients."""
        return self.name == "dc-asgd-a"

    def to_plain(self) -> dict[str, Any]:
        """Texts and numbers only, for the wire and for files."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> RuleSpec:
        """The inverse of to_plain; absent keys take their defaults. Raises RuleError for anything else."""
        return cls(**_checked_keys("rule", plain, [f.name for f in fields(cls)]))


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """How one parameter group of the layout is optimised; the fields mean what they mean in torch.optim.SGD.

    lr_scale: times the push's learning rate, at least 0. momentum: in [0, 1); 0 keeps no buffer. nesterov:
    needs momentum. weight_decay: at least 0; added to the compensated gradient. Raises RuleError.
    """

    lr_scale: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_number("lr_scale", self.lr_scale)
        _check_number("momentum", self.momentum, below=1.0)
        _check_number("weight_decay", self.weight_decay)
        if type(self.nesterov) is not bool:
            raise RuleError(f"nesterov is {str(self.nesterov)[:40]!r}: give true or false")
        if self.nesterov and self.momentum == 0:
            raise RuleError("nesterov needs momentum: set momentum above 0 or nesterov to false")

    def to_plain(self) -> dict[str, Any]:
        """Numbers and booleans only, for the wire and for files."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> GroupSpec:
        """The inverse of to_plain; absent keys take their defaults. Raises RuleError for anything else."""
        return cls(**_checked_keys("a parameter group", plain, [f.name for f in fields(cls)]))


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
