"""Which rule for which optimizer, and up to how many workers: what docs/results.md found, as values.

Decides nothing by itself: `zasgd doctor RECIPE` says it, and the page cites the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Bears:
    """The most workers of the tables of docs/results.md with which the error was at most twice that of one worker.

    0: no limit was found. instead: what to do about more.
    """

    workers: int
    instead: str


_SGD = "use gap-aware, or delay-adaptive where a vector per shard is too much"
_MOMENTUM = "use gap-aware or dana+ga"
_FARTHEST = "more were not tried"
_SGD_BEARS = {"none": Bears(8, _SGD), "constant": Bears(8, _SGD), "adaptive": Bears(32, _SGD)}
_MOMENTUM_BEARS = {"none": Bears(8, _MOMENTUM), "constant": Bears(8, _MOMENTUM), "adaptive": Bears(16, _MOMENTUM)}
_ADAMW_BEARS = {"none": Bears(16, "use mode buffer"), "adaptive": Bears(64, _FARTHEST)}
_LOCAL_BEARS = {
    "difference": Bears(8, "push gradients instead"),
    "elastic": Bears(8, "push gradients instead"),
    "outer": Bears(4, "push gradients instead"),
}


def bears(rule: RuleSpec, group: GroupSpec) -> Bears:
    """What the tables say about a rule with the optimizer of the trained parameters."""
    if rule.mode == "sync":
        return Bears(8, "the mean of so many batches is too few updates at this rate: use mode async")
    if rule.is_local:
        return _LOCAL_BEARS[rule.exchange or ""]
    if group.algorithm == "adamw":
        return _adamw(rule)
    if rule.look_ahead != "none":
        return Bears(32, "use gap-aware") if rule.gap_aware else Bears(16, _MOMENTUM)
    if rule.gap_aware:
        return Bears(64, _FARTHEST)
    kind = rule.compensate or "none"
    if kind == "none" and rule.scale == "delay" and not group.momentum:
        return Bears(64, _FARTHEST)
    return (_MOMENTUM_BEARS if group.momentum else _SGD_BEARS)[kind]


def _adamw(rule: RuleSpec) -> Bears:
    if rule.mode == "buffer":
        return Bears(64, _FARTHEST)
    return _ADAMW_BEARS.get(rule.compensate or "none", _ADAMW_BEARS["none"])


def warning(recipe: Recipe, workers: int) -> str | None:
    """One line when a recipe asks for more workers than its rule bears; None when it does not."""
    rule, group = recipe.rule_spec(), recipe.group_specs()[0]
    found = bears(rule, group)
    if not found.workers or workers <= found.workers:
        return None
    momentum = f" and momentum {group.momentum:g}" if group.momentum else ""
    mode = f" in mode {rule.mode}" if rule.mode != "async" else ""
    what = f"{rule.name}{mode} with {group.algorithm}{momentum}"
    return f"{workers} workers are more than {what} bore in docs/results.md, which is {found.workers}: {found.instead}"
