"""`zasgd rules`: the tables say what the code does, and docs/rules.md holds the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zasgd.app import rules
from zasgd.core.rules import RULES, GroupSpec, RuleError, RuleSpec, check, cost

DOCS = Path(__file__).parents[2] / "docs" / "rules.md"


Command = Callable[..., Any]


def test_every_rule_has_a_row_and_dana_ga_too() -> None:
    assert [row.name for row in rules.rule_rows()] == [*RULES, "dana+ga"]


def test_a_row_tells_the_constants_that_the_rule_reads_and_no_others() -> None:
    told = {row.name: row.defaults for row in rules.rule_rows()}
    assert told["asgd"] == {}
    assert told["dc-asgd-c"] == {"lam": 0.04}
    assert told["dc-asgd-a"] == {"lam": 2.0, "ms_decay": 0.95}
    assert told["dana+ga"] == {"gap_decay": 0.999}
    assert told["easgd"] == {"elasticity": 0.9}


def test_costs_are_those_of_the_core() -> None:
    momentum = GroupSpec(momentum=0.9)
    for row in rules.rule_rows():
        found = cost(RuleSpec(row.name), [momentum])
        assert row.costs["momentum"] == (found.per_shard, found.per_worker)
    by_name = {row.name: row.costs for row in rules.rule_rows()}
    assert by_name["dana"]["sgd"] is None, "dana has no momentum to look ahead by"
    assert by_name["dc-asgd-a"] == {"sgd": (1, 1), "momentum": (2, 1), "adamw": (3, 1)}


@pytest.mark.parametrize(
    ("name", "base", "column", "says"),
    [
        ("asgd", "adamw", "sync", None),
        ("dana+ga", "momentum", "async", None),
        ("dana+ga", "momentum", "inflight = 1", None),
        ("dana", "momentum", "inflight = 1", "dana+ga"),
        ("dana", "nesterov", "async", "set optimizer.nesterov to false"),
        ("dana", "sgd", "async", "momentum above 0"),
        ("dc-asgd-a", "sgd", "sync", "leave out compensate"),
        ("delay-adaptive", "sgd", "max_lag damp", "keep one"),
        ("diloco", "adamw", "buffer", "does not go with mode buffer"),
    ],
)
def test_the_matrix_gives_the_reason_against_what_does_not_combine(
    name: str, base: str, column: str, says: str | None
) -> None:
    told = rules.verdict(name, base, column)
    assert told is None if says is None else says in str(told)


def test_what_the_matrix_calls_possible_passes_the_check_of_a_run_and_the_rest_does_not() -> None:
    for row in rules.matrix_rows():
        for column, (changes, inflight) in rules.COLUMNS.items():
            try:
                check(RuleSpec(row["rule"], **changes), [rules.BASES[row["base"]]], inflight)
                accepted = True
            except RuleError:
                accepted = False
            assert (row[column] == "yes") == accepted, (row["rule"], row["base"], column)


def test_rules_that_are_refused_for_the_same_reason_share_a_footnote(capsys: pytest.CaptureFixture[str]) -> None:
    rules.show(matrix=True, markdown=None, json_output=False)
    notes = [line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    reasons = [line.partition(" ")[2] for line in notes]
    assert len(set(reasons)) == len(reasons) > 10
    assert not any(reason.startswith(name) for reason in reasons for name in ("dana ", "easgd", "diloco", "delta"))


def test_json_holds_both_tables(zasgd: Command) -> None:
    code, out, _ = zasgd("rules", "--json")
    table: list[dict[str, Any]] = json.loads(out)
    assert code == 0 and {row["name"] for row in table} >= set(RULES)
    assert next(row for row in table if row["name"] == "dana")["vectors"]["momentum"] == {
        "per_shard": 1,
        "per_worker": 2,
    }
    code, out, _ = zasgd("rules", "--matrix", "--json")
    assert code == 0 and len(json.loads(out)) == len(rules.BASES) * (len(RULES) + 1)


def test_the_documentation_holds_what_the_code_says(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden"):
        rules.show(matrix=False, markdown=DOCS, json_output=False)
    text = DOCS.read_text(encoding="utf-8")
    assert text == rules.filled(text), "run `zasgd rules --markdown docs/rules.md`"


def test_a_file_without_markers_is_one_line_and_stays_as_it_is(tmp_path: Path, zasgd: Command) -> None:
    path = tmp_path / "notes.md"
    path.write_text("nothing to fill", encoding="utf-8")
    code, _, err = zasgd("rules", "--markdown", str(path))
    assert code == 2 and err.count("\n") == 1 and "generated: rules" in err
    assert path.read_text(encoding="utf-8") == "nothing to fill"
