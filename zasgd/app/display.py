"""What a person sees while a run on this machine goes on, and at its end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zasgd.train.recipe import Recipe


class Display:
    """A live view on a terminal, plain lines elsewhere; always on stderr, so that stdout stays for results."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self._recipe = recipe
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[facts]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=1, epoch=0, epochs=recipe.train.epochs, facts="starting")
        self._live = Live(self._bar, console=self._console, refresh_per_second=5, transient=True)
        self._last_line: tuple[Any, ...] = ()
        self._told: set[str] = set()
        self.say(
            f"{recipe.name}: {recipe.rule.name}, {recipe.run.workers} workers, {recipe.run.servers} servers, "
            f"{recipe.train.epochs} epochs; folder {os.fspath(run_dir)}"
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """One line that stays."""
        self._console.print(line, markup=False)

    def tick(self, report: Mapping[str, Any]) -> None:
        """Show the state of the run; see Broker.report for the keys."""
        self._tell_news(report)
        if not self._console.is_terminal:
            return
        ledger = report.get("ledger") or {"epoch": 0, "samples": 0, "samples_total": 1}
        self._bar.update(
            self._task,
            completed=ledger["samples"],
            total=ledger["samples_total"],
            epoch=min(ledger["epoch"] + 1, self._recipe.train.epochs),
            facts=_facts(report),
        )
        self._live.update(Group(self._bar, _members(report)))

    def _tell_news(self, report: Mapping[str, Any]) -> None:
        """What is worth a line that stays: an evaluation, one that failed, the first refused gradient."""
        scores, ledger = report.get("scores") or {}, report.get("ledger")
        line = (scores.get("test_accuracy"), scores.get("test_loss"))
        if ledger and line != self._last_line and scores:
            self._last_line = line
            self.say(f"epoch {ledger['epoch']}: {_facts(report)}")
        self._tell_once(report.get("evaluation_error"), "an evaluation failed: {}; see logs/eval.log")
        refused = (ledger or {}).get("refusals")
        self._tell_once(refused and "refused", "a gradient was refused (inf or NaN?); see events.jsonl for every one")
        alarm = next((s["alarm"] for s in report.get("shards", ()) if s.get("alarm")), "")
        self._tell_once(alarm and "diverging", f"the run seems to diverge: {alarm}; `zasgd status` tells more")
        waiting = report.get("phase") == "training" and not report.get("workers")
        self._tell_once(waiting and "waiting", "no worker is left; the run waits for one")

    def _tell_once(self, what: Any, text: str) -> None:
        if what and what not in self._told:
            self._told.add(what)
            self.say(text.format(what))

    @staticmethod
    def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
        """The end of a run, as a table."""
        table = Table(title=Text(f"{summary['recipe']}: {summary['outcome']}"), show_header=False, title_justify="left")
        done, wanted = summary["epochs_completed"], summary["epochs"]
        lag = summary["lag"]
        rows = {
            "test accuracy": _accuracy(summary),
            "train loss": "unknown" if summary["train_loss"] is None else summary["train_loss"],
            "samples used": f"{summary['samples']} ({summary['torn']} torn)",
            "epochs completed": f"{done} of {wanted}",
            "samples skipped": summary["skipped"],
            "batches given to another worker": summary["reissued_batches"],
            "updates per shard": ", ".join(map(str, summary["updates"])),
            "lag": f"mean {lag['mean']:.2f}, p99 {lag['p99']}, max {lag['max']}",
            "time": f"{summary['seconds']:.1f} s",
            "run folder": summary["run_dir"],
            "model": summary["model"] or "none",
        }
        for name, value in rows.items():
            table.add_row(name, Text(str(value)))
        console.print(table)


def _accuracy(summary: Mapping[str, Any]) -> str:
    final, last = summary["test_accuracy"], summary["last_test_accuracy"]
    if final is not None:
        return f"{100 * final:.2f} %"
    return "not evaluated" if last is None else f"{100 * last:.2f} % at the last evaluation, before the end"


def _facts(report: Mapping[str, Any]) -> str:
    parts = [report.get("phase", "")] if report.get("phase") != "training" else []
    if report.get("loss") is not None:
        parts.append(f"loss {report['loss']:.4g}")
    accuracy = (report.get("scores") or {}).get("test_accuracy")
    if accuracy is not None:
        parts.append(f"accuracy {100 * accuracy:.2f} %")
    if report.get("samples_per_s"):
        parts.append(f"{report['samples_per_s']:.0f} samples/s")
    return ", ".join(parts)


def _members(report: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for worker in report.get("workers", []):
        name = worker["name"] or worker["id"]
        state, lag, rate = worker["state"], worker["lag"], worker["samples_per_s"]
        table.add_row(
            Text(f"  worker {name}"),
            Text(f"{state}"),
            f"lag {lag}",
            f"{rate:.0f} samples/s",
            f"{worker['steps']} steps",
        )
    return table
