"""What a shard does per push on one core: every rule's update beside a plain copy of as many bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from zasgd.app.serve import as_json
from zasgd.core.layout import Segment
from zasgd.core.optimizer import ShardOptimizer
from zasgd.core.rules import RULES, GroupSpec, RuleSpec, refusal, shard_groups

BASES = {
    "sgd": GroupSpec(weight_decay=1e-4),
    "momentum": GroupSpec(momentum=0.9, weight_decay=1e-4),
    "adamw": GroupSpec(algorithm="adamw", weight_decay=1e-4),
}
"""Base optimizers whose passes are measured; their constants change no speed."""
LOCAL = "local"
"""Stands for the base of rules whose shards see no gradient."""


@dataclass(frozen=True, slots=True)
class KernelRate:
    """How fast one rule applies pushes: medians, beside copying as many bytes.

    vectors: as long as the slice, float32, that a push reads or writes; one that it changes counts twice.
    """

    rule: str
    base: str
    params: int
    vectors: int
    apply_s: float
    copy_s: float

    def to_plain(self) -> dict[str, Any]:
        """What is printed of it."""
        num_bytes = 4 * self.params * self.vectors
        return {
            "rule": self.rule,
            "base": self.base,
            "vectors": self.vectors,
            "million_params_per_s": round(self.params / self.apply_s / 1e6, 1),
            "gb_per_s": round(num_bytes / self.apply_s / 1e9, 2),
            "copy_gb_per_s": round(num_bytes / self.copy_s / 1e9, 2),
            "ratio": round(self.copy_s / self.apply_s, 4),
        }


def kernels(params: int, repeats: int, rules: str, *, json_output: bool) -> None:
    """What a shard of `params` parameters does per push on one core, beside np.copyto of as many bytes.

    rules: names joined by commas, empty for all. Raises RuleError for a name that is none.
    """
    names = [name.strip() for name in rules.split(",")] if rules else [*RULES, "dana+ga"]
    cases = [case for name in names for case in _kernel_cases(name)]
    console = Console(stderr=True)
    measuring = track(cases, "measuring", console=console, disable=not console.is_terminal)
    rows = [_kernel_rate(*case, params, repeats).to_plain() for case in measuring]
    if json_output:
        print(as_json({"params": params, "repeats": repeats, "kernels": rows}))
        return
    title = f"one push on one core, {params} parameters, and a copy of as many bytes; median of {repeats}"
    table = Table("rule", "base", "vectors", "M param/s", "GB/s", "copy GB/s", "of copy", title=title)
    table.columns[0].no_wrap = True
    for row in rows:
        *cells, ratio = row.values()
        table.add_row(*map(str, cells), f"{100 * ratio:.0f} %")
    Console(highlight=False).print(table)


def _kernel_cases(name: str) -> list[tuple[RuleSpec, str, GroupSpec]]:
    """A rule with each base optimizer that it can train."""
    rule = RuleSpec(name)
    if rule.is_local:
        return [(rule, LOCAL, *shard_groups(rule, (GroupSpec(),)))]
    able = {base: group for base, group in BASES.items() if not refusal(rule, (group,))}
    return [(rule, base, *shard_groups(rule, (group,))) for base, group in able.items()]


def _kernel_rate(rule: RuleSpec, base: str, group: GroupSpec, params: int, repeats: int) -> KernelRate:
    optimizer = ShardOptimizer(rule, (group,), (Segment(0, params, 0),), params)
    own = optimizer.new_own()
    w, pushed, known, out = (np.full(params, value, np.float32) for value in (1.0, 1e-3, 0.999, 1.0))
    kept = len(optimizer.state) + (own is not None)
    vectors = 4 + rule.needs_snapshot + 2 * kept  # w read and written, what was pushed, what is sent

    def push() -> None:
        optimizer.apply(w, ((0, pushed),), out, 1e-6, out, own=own)

    def copy() -> None:
        for _ in range(vectors // 2):
            np.copyto(out, known)
        np.copyto(out[: params // 2 * (vectors % 2)], known[: params // 2 * (vectors % 2)])

    times: dict[Callable[[], None], list[float]] = {push: [], copy: []}
    for measure in times:
        measure()  # the compiler and the first touch of memory are not what is measured
    for _ in range(repeats):
        for measure, taken in times.items():
            began_at = time.perf_counter()
            measure()
            taken.append(time.perf_counter() - began_at)
    return KernelRate(rule.name, base, params, vectors, *(statistics.median(taken) for taken in times.values()))
