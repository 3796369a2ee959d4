"""The update rules as tables: what each does and costs, and what combines with what.

Decides how the tables look; every entry comes from `zasgd.core.rules`, so they say what the code does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zasgd.app.serve import as_json
from zasgd.core.rules import RULES, SHORT, GroupSpec, RuleError, RuleSpec, cost, refusal, stages_of

JOINED = ("dana+ga",)
"""Joined rules that have a row of their own."""

BASES: dict[str, GroupSpec] = {
    "sgd": GroupSpec(),
    "momentum": GroupSpec(momentum=0.9),
    "nesterov": GroupSpec(momentum=0.9, nesterov=True),
    "adamw": GroupSpec(algorithm="adamw"),
}
"""Base optimisers of the matrix."""

COLUMNS: dict[str, tuple[dict[str, Any], int]] = {
    "async": ({}, 0),
    "sync": ({"mode": "sync"}, 0),
    "buffer": ({"mode": "buffer", "quorum": 4}, 0),
    "push_every > 1": ({"push_every": 4}, 0),
    "inflight = 1": ({}, 1),
    "max_lag drop": ({"max_lag": 8, "lag_policy": "drop"}, 0),
    "max_lag damp": ({"max_lag": 8, "lag_policy": "damp"}, 0),
    "max_lag block": ({"max_lag": 8, "lag_policy": "block"}, 0),
}
"""Columns of the matrix: what of the rule is set, and how many pushes are in flight beyond one."""

_READ_BY: dict[str, Any] = {
    "lam": lambda rule: rule.compensate != "none",
    "ms_decay": lambda rule: rule.needs_mean_square,
    "gap_decay": lambda rule: rule.gap_aware,
    "delay_limit": lambda rule: rule.scale == "delay",
    "outer_lr": lambda rule: rule.exchange in ("difference", "outer"),
    "outer_mean": lambda rule: rule.exchange in ("difference", "outer"),
    "outer_momentum": lambda rule: rule.exchange == "outer",
    "delay_share": lambda rule: rule.exchange == "outer",
    "elasticity": lambda rule: rule.exchange == "elastic",
}
"""Constant -> which rules read it."""


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule. costs: base optimiser -> (vectors per shard, there per worker), None where it is refused."""

    name: str
    stages: dict[str, Any]
    formula: str
    defaults: dict[str, Any]
    costs: dict[str, tuple[int, int] | None]
    source: str
    use: str

    def to_plain(self) -> dict[str, Any]:
        """What `--json` prints."""
        costs = {base: c and {"per_shard": c[0], "per_worker": c[1]} for base, c in self.costs.items()}
        return {
            "name": self.name, "stages": self.stages, "formula": self.formula, "defaults": self.defaults,
            "vectors": costs, "source": self.source, "use": self.use,
        }  # fmt: skip


def show(*, matrix: bool, markdown: Path | None, json_output: bool) -> None:
    """Print the table of rules, or the matrix; with `markdown` write both between the markers of that file.

    Raises RuleError when the file has no markers.
    """
    if markdown is not None:
        markdown.write_text(filled(markdown.read_text(encoding="utf-8")), encoding="utf-8")
    elif json_output:
        print(as_json(matrix_rows() if matrix else [row.to_plain() for row in rule_rows()]))
    else:
        console = _console()
        rules = _rule_table if console.width >= NARROW else _rule_paragraphs
        _print(_matrix_table() if matrix else rules(), console)


# ---- what the tables say -------------------------------------------------------------------------------


def rule_rows() -> list[RuleRow]:
    """One row per rule of core.rules, and those joined rules that have a name of their own."""
    return [_row(name) for name in (*RULES, *JOINED)]


def _row(name: str) -> RuleRow:
    families = [RULES[SHORT.get(part, part)] for part in name.split("+")]
    rule, neutral = RuleSpec(name), RuleSpec("asgd")
    return RuleRow(
        name=name,
        stages={k: v for k, v in stages_of(name).items() if v != getattr(neutral, k) and k not in _READ_BY},
        formula=families[0].formula if len(families) == 1 else " with the penalty of ".join(name.split("+")),
        defaults={key: getattr(rule, key) for key, read_by in _READ_BY.items() if read_by(rule)},
        costs={base: _cost(rule, BASES[base]) for base in ("sgd", "momentum", "adamw")},
        source=", ".join(dict.fromkeys(f.source for f in families)),
        use=families[0].use if len(families) == 1 else "momentum, up to 32 workers; the lowest train loss of all",
    )


def _cost(rule: RuleSpec, group: GroupSpec) -> tuple[int, int] | None:
    if refusal(rule, [group]):
        return None
    found = cost(rule, [group])
    return found.per_shard, found.per_worker


def matrix_rows() -> list[dict[str, Any]]:
    """One entry per rule and base optimiser: for each column `yes`, or the reason against it."""
    return [
        {"rule": name, "base": base} | {column: verdict(name, base, column) or "yes" for column in COLUMNS}
        for name in (*RULES, *JOINED)
        for base in BASES
    ]


def verdict(name: str, base: str, column: str) -> str | None:
    """Why rule `name` with a base optimiser does not go with a column of the matrix; None when it does."""
    changes, inflight = COLUMNS[column]
    try:
        rule = RuleSpec(name, **changes)
    except RuleError as e:
        return _about_any(str(e), name)
    reason = refusal(rule, [BASES[base]], inflight)
    return reason and _about_any(reason, name)


def _about_any(reason: str, name: str) -> str:
    """The reason without the rule's name, so that rules refused for the same reason share a footnote."""
    if reason.startswith(f"{name} "):
        return f"this rule{reason.removeprefix(name)}"
    return reason.replace(f" {name}, ", " this rule, ")


# ---- on a terminal -------------------------------------------------------------------------------------


NARROW = 150
"""Columns below which nine of a table cannot be read: each rule then has a paragraph."""


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe is not narrow
    return console


def _print(what: Iterable[Any], console: Console) -> None:
    for part in what:
        console.print(part)


def _rule_paragraphs() -> Iterator[Any]:
    for row in rule_rows():
        name, *others = _rule_cells(row)
        told = [f"  {head}: {cell}" for head, cell in zip(_RULE_HEADS[1:], others, strict=True) if cell]
        yield Text(name, style="bold")
        yield Text("\n".join(told))
    yield Text(_COST_NOTE)


def _rule_table() -> Iterator[Any]:
    table = Table(*_RULE_HEADS, padding=(0, 1), show_lines=True)
    for row in rule_rows():
        table.add_row(*map(Text, _rule_cells(row)))  # a str would be read as markup
    yield table
    yield Text(_COST_NOTE)


def _matrix_table() -> Iterator[Any]:
    cells, notes = _footnoted()
    table = Table(*_MATRIX_HEADS, padding=(0, 1))
    for row in cells:
        table.add_row(*map(Text, row))
    yield table
    yield Text("\n".join(f"{number} {reason}" for reason, number in notes.items()))


# ---- as Markdown ---------------------------------------------------------------------------------------

_RULE_HEADS = ("rule", "stages", "formula", "defaults", "SGD", "momentum", "AdamW", "source", "use")
_MATRIX_HEADS = ("rule", "base", *COLUMNS)
_COST_NOTE = (
    "SGD, momentum, AdamW: vectors as long as a shard's slice (float32) that the shard keeps besides the parameters, "
    "for N workers; refused: see the matrix."
)
_MARKERS = {"rules": "<!-- generated: rules -->", "matrix": "<!-- generated: matrix -->"}
_END = "<!-- end -->"


def filled(text: str) -> str:
    """A Markdown text with what stands between its markers generated anew. Raises RuleError without markers."""
    for name, marker in _MARKERS.items():
        before, found, rest = text.partition(marker)
        _, end, after = rest.partition(_END)
        if not found or not end:
            raise RuleError(f"the file has no lines {marker!r} and {_END!r} to write the tables between")
        text = f"{before}{marker}\n{_markdown(name)}\n{_END}{after}"
    return text


def _markdown(name: str) -> str:
    if name == "rules":
        return f"{_markdown_table(_RULE_HEADS, map(_rule_cells, rule_rows()))}\n\n{_COST_NOTE}"
    cells, notes = _footnoted()
    told = "\n".join(f"{number}. {reason}" for reason, number in notes.items())
    return f"{_markdown_table(_MATRIX_HEADS, cells)}\n\n{told}"


def _markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _rule_cells(row: RuleRow) -> list[str]:
    return [
        row.name, _pairs(row.stages) or "none", row.formula, _pairs(row.defaults),
        *map(_cost_text, row.costs.values()), row.source, row.use,
    ]  # fmt: skip


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {str(value).lower()}" for key, value in values.items())


def _cost_text(vectors: tuple[int, int] | None) -> str:
    if vectors is None:
        return "refused"
    per_shard, per_worker = vectors
    shared = f"{per_shard} + " if per_shard else ""
    return f"{shared}{per_worker if per_worker > 1 else ''}N"


def _footnoted() -> tuple[list[list[str]], dict[str, int]]:
    """The matrix with numbers for its reasons, and the reasons by number."""
    notes: dict[str, int] = {}
    cells = []
    for row in matrix_rows():
        told = [row[column] for column in COLUMNS]
        marks = ["yes" if cell == "yes" else str(notes.setdefault(cell, len(notes) + 1)) for cell in told]
        cells.append([row["rule"], row["base"], *marks])
    return cells, notes
