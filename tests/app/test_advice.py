"""`zasgd doctor RECIPE`: whether its rule bears its workers, by the tables of docs/results.md."""

from __future__ import annotations

from typing import Any

import pytest

from zasgd.app.advice import bears, warning
from zasgd.core.rules import RULES, GroupSpec, RuleError, RuleSpec, refusal
from zasgd.train.recipe import load_recipe


@pytest.mark.parametrize(
    ("recipe", "sets", "workers", "says"),
    [
        ("digits", (), 32, None),
        ("digits", (), 33, "33 workers are more than dc-asgd-a with sgd bore in docs/results.md, which is 32"),
        ("digits", ("rule.name=asgd",), 16, "use gap-aware"),
        ("digits_nag", (), 8, None),
        ("digits_nag", (), 16, "asgd with sgd and momentum 0.9 bore in docs/results.md, which is 8"),
        ("digits_dana", (), 32, None),
        ("digits_dana", (), 64, "which is 32: use gap-aware"),
        ("digits_dana", ("rule.name=dana",), 32, "use gap-aware or dana+ga"),
        ("digits", ("optimizer.algorithm=adamw", "rule.name=asgd"), 32, "use mode buffer"),
        ("digits", ("rule.name=asgd", "rule.mode=sync"), 64, "in mode sync"),
    ],
)
def test_more_workers_than_a_rule_bears_get_one_line(recipe: str, sets: Any, workers: int, says: str | None) -> None:
    told = warning(load_recipe(recipe, sets), workers)
    assert (told is None) if says is None else (told is not None and says in told and "\n" not in told)


@pytest.mark.parametrize("name", [*RULES, "dana+ga", "dc-asgd-a+ga"])
@pytest.mark.parametrize("group", [GroupSpec(), GroupSpec(momentum=0.9), GroupSpec(algorithm="adamw")])
@pytest.mark.parametrize(
    "mode", [{}, {"mode": "sync"}, {"mode": "buffer", "quorum": 4}], ids=["async", "sync", "buffer"]
)
def test_every_rule_that_can_run_has_an_entry(name: str, group: GroupSpec, mode: dict[str, Any]) -> None:
    try:
        rule = RuleSpec(name, **mode)
    except RuleError:
        return
    if refusal(rule, [group]) is None:
        assert bears(rule, group).workers >= 4 and bears(rule, group).instead
