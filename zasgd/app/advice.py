"""Which rule for which optimizer, and up to how many workers: what docs/results.md found, as values.

Decides nothing by itself: `zasgd doctor RECIPE` says it, and the page cites the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Bears:
    """Up to how many workers a rule held in the tables of docs/results.md; 0: no limit was found."""

    workers: int
    instead: str


_MANY = "use dana+ga (SGD with momentum) or gap-aware (without)"
_SGD = {"none": Bears(8, _MANY), "constant": Bears(8, _MANY), "adaptive": Bears(32, _MANY)}
_MOMENTUM = {"none": Bears(8, _MANY), "constant": Bears(8, _MANY), "adaptive": Bears(16, _MANY)}
_SCALED = Bears(32, _MANY)
_SCALED_MOMENTUM = Bears(16, _MANY)
_GAP_AWARE = Bears(64, "that is as far as it was tried")
_DANA = Bears(16, "use dana+ga")
_DANA_GA = Bears(64, "that is as far as it was tried")
_ADAMW = Bears(8, "use mode buffer")
_ADAMW_BUFFER = Bears(32, "use SGD with momentum and dana+ga")
_LOCAL = {
    "difference": Bears(8, "use a gradient rule"),
    "elastic": Bears(8, "use a gradient rule"),
    "outer": Bears(8, "use a gradient rule"),
}


def bears(rule: RuleSpec, group: GroupSpec) -> Bears:
    """What the tables say about a rule with the optimizer of the trained parameters."""
    if rule.mode == "sync":
        return Bears(0, "")
    if group.algorithm == "adamw":
        return _ADAMW_BUFFER if rule.mode == "buffer" else _ADAMW
    if rule.is_local:
        return _LOCAL[rule.exchange or ""]
    with_momentum = bool(group.momentum)
    if rule.look_ahead != "none":
        return _DANA_GA if rule.gap_aware else _DANA
    if rule.gap_aware:
        return _GAP_AWARE
    if rule.scale != "none" or (rule.max_lag and rule.lag_policy == "damp"):
        return _SCALED_MOMENTUM if with_momentum else _SCALED
    kind = rule.compensate or "none"
    return (_MOMENTUM if with_momentum else _SGD)[kind]


def warning(recipe: Recipe, workers: int) -> str | None:
    """One line when a recipe asks for more workers than its rule bears; None when it does not."""
    rule, group = recipe.rule_spec(), recipe.group_specs()[0]
    found = bears(rule, group)
    if not found.workers or workers <= found.workers:
        return None
    momentum = f" with momentum {group.momentum:g}" if group.momentum else ""
    what = f"{rule.name} with {group.algorithm}{momentum}"
    return f"{workers} workers are more than {what} bears (up to {found.workers} in docs/results.md): {found.instead}"
