"""A rule as written on a command line: `dana+ga`, `asgd[momentum=0.9 nesterov=true]`, `sync[quorum=3]`, `sequential`.

Decides which recipe keys such a text sets. What it names is complete: what the recipe says of the stages of another
rule (a lambda, say) is not carried over to it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from zasgd.core.rules import RuleError, stages_of
from zasgd.train.recipe import OptimizerTable, Recipe, RuleTable, load_recipe

_SHORTHANDS: dict[str, tuple[str, ...]] = {
    "sync": ("rule.name=asgd", "rule.mode=sync", "rule.quorum=0"),
    "sequential": ("rule.name=asgd",),
}
_TEXT = re.compile(r"([^\[\],]+)(?:\[(.*)\])?", re.DOTALL)
_TABLES = {"optimizer": OptimizerTable, "rule": RuleTable}


@dataclass(frozen=True, slots=True)
class Variant:
    """One rule with its changes to a recipe. `text` is as written; overrides are like those of `--set`.

    num_workers: 1 for `sequential`, else None: as many as are asked for.
    """

    text: str
    rule: str
    overrides: tuple[str, ...]
    num_workers: int | None = None

    def load(self, source: str, sets: Sequence[str] = (), seed: int | None = None) -> Recipe:
        """The recipe `source` under `sets` and then this rule; `seed` is train.seed unless `sets` give that.

        A rule that looks ahead takes the place of Nesterov's momentum. Raises RecipeError.
        """
        seeded = [*([] if seed is None else [f"train.seed={seed}"]), *sets]
        stale = self._stale(load_recipe(source), sets)
        return load_recipe(source, [*seeded, *stale, *self._of_name(), *self.overrides])

    def _of_name(self) -> list[str]:
        looks_ahead = stages_of(self.rule)["look_ahead"] != "none"
        return [*_SHORTHANDS.get(self.name, (f"rule.name={self.rule}",)), *["optimizer.nesterov=false"][:looks_ahead]]

    def _stale(self, base: Recipe, sets: Sequence[str]) -> list[str]:
        """What sets the stages that the recipe gives another rule back to what this rule's name says."""
        if base.rule.name == self.rule:
            return []
        given = {text.partition("=")[0].strip() for text in sets}
        stages = stages_of(self.rule)
        stale = [k for k in stages if k in base.rule.model_fields_set and f"rule.{k}" not in given]
        return [f"rule.{key}={str(stages[key]).lower()}" for key in stale]

    @property
    def name(self) -> str:
        """The text without its brackets."""
        return self.text.partition("[")[0]


def parse_variant(text: str) -> Variant:
    """Read `RULE` or `RULE[key=value ...]`; a key is dotted, or a short name of [optimizer] or [rule].

    Raises RuleError.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None or (found[2] or "").count("[") != (found[2] or "").count("]"):
        raise RuleError(f"rule {text.strip()[:80]!r} should look like dana+ga or asgd[momentum=0.9 lr=0.02]")
    name, inside = found[1].strip(), (found[2] or "").split()
    rule = "asgd" if name in _SHORTHANDS else name
    stages_of(rule)
    written = f"{name}[{' '.join(inside)}]" if inside else name
    return Variant(written, rule, tuple(_override(pair, written) for pair in inside), _workers(name))


def parse_variants(text: str) -> list[Variant]:
    """Read several, parted by commas that stand outside brackets. Raises RuleError, also for a repeated one."""
    found = [parse_variant(part) for part in _parted(text) if part.strip()]
    if not found:
        raise RuleError("no rule is given: name at least one, such as dana+ga")
    twice = [v.text for i, v in enumerate(found) if v in found[:i]]
    if twice:
        raise RuleError(f"rule {twice[0]!r} is named twice")
    return found


def _parted(text: str) -> list[str]:
    """The text cut at the commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _workers(name: str) -> int | None:
    return 1 if name == "sequential" else None


def _override(pair: str, written: str) -> str:
    key, equals, value = pair.partition("=")
    if not equals or not key or not value:
        raise RuleError(f"rule {written[:80]!r}: {pair[:40]!r} should look like key=value")
    return f"{_dotted(key, written)}={value}"


def _dotted(key: str, written: str) -> str:
    if "." in key:
        return key
    for table, schema in _TABLES.items():
        if key in schema.model_fields:
            return f"{table}.{key}"
    known = [k for schema in _TABLES.values() for k in schema.model_fields]
    near = difflib.get_close_matches(key, known, 1, cutoff=0.0)
    raise RuleError(f"rule {written[:80]!r}: {key[:40]!r} is no key of [optimizer] or [rule]; the nearest is {near[0]}")
