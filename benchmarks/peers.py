"""Our steps per second beside those of MXNet dist_async and gloo all-reduce on this machine, in alternating runs.

python benchmarks/peers.py [--repeats 3] [--params 25000000] [--env-dir FOLDER] [--no-write]

Makes an environment for each peer the first time, prints one table and writes it to docs/performance.md. A peer that
cannot be installed is a row that says why. One step takes a whole model of float32 from a worker to the servers and new
parameters back, or once through an all-reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
PATIENCE_S = 600
OURS = "zasgd"


class Unavailable(Exception):
    """Why a program cannot be measured here, in one line."""


@dataclass(frozen=True)
class Environment:
    """Packages of a peer. newest: the last Python, as (major, minor), that they have wheels for; None for any."""

    name: str
    packages: tuple[str, ...]
    newest: tuple[int, int] | None = None

    def python(self, folder: Path) -> str:
        """The interpreter of the environment, made if it is not there yet. Raises Unavailable."""
        place = folder / self.name
        made = place / "made-of"
        wanted = "\n".join(self.packages)
        if not made.exists() or made.read_text() != wanted:
            self._make(place)
            made.write_text(wanted)
        return str(place / "bin" / "python")

    def _make(self, place: Path) -> None:
        print(f"making {place}: {' '.join(self.packages)}", file=sys.stderr)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([self._interpreter(), "-m", "venv", str(place)], check=True)
        install = [str(place / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *self.packages]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"cannot be installed: {last_line(done.stderr)[:200]}")

    def _interpreter(self) -> str:
        """One that is not too new for the packages."""
        newest = self.newest or sys.version_info[:2]
        if sys.version_info[:2] <= newest:
            return sys.executable
        candidates = (f"python{newest[0]}.{minor}" for minor in range(newest[1], 7, -1))
        found = next(filter(None, map(shutil.which, candidates)), None)
        if found is None:
            raise Unavailable(f"needs a Python up to {newest[0]}.{newest[1]}, and there is none here")
        return found


MXNET = Environment("mxnet", ("mxnet==1.9.1", "numpy==1.23.5"), newest=(3, 11))
GLOO = Environment("gloo", ("torch==2.13.0", "numpy"))


@dataclass
class Row:
    """One program: its name, its command, and what it has printed. environment: None for our own."""

    name: str
    arguments: tuple[str, ...]
    environment: Environment | None = None
    found: list[dict[str, Any]] = field(default_factory=list)
    why_not: str = ""

    def measure(self, folder: Path) -> None:
        """Run it once more, unless it has failed before."""
        if self.why_not:
            return
        try:
            python = self.environment.python(folder) if self.environment else sys.executable
            self.found.append(figures_of([python, *self.arguments]))
        except Unavailable as error:
            self.why_not = str(error)

    def median(self, key: str) -> float:
        """Over the runs."""
        return statistics.median(figures[key] for figures in self.found)


def figures_of(command: list[str]) -> dict[str, Any]:
    """The JSON object on the last line that `command` prints. Raises Unavailable."""
    told = output_of(command)
    try:
        return json.loads(told)
    except ValueError:
        raise Unavailable(f"printed no figures but {told[:200]}") from None


def output_of(command: list[str]) -> str:
    """The last line that `command` prints; it and all that it has started are ended. Raises Unavailable."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        told, errors = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"did not end within {PATIENCE_S} s") from None
    finally:
        end_group(process)
    if process.returncode or not told.strip():
        raise Unavailable(f"ended with exit code {process.returncode}: {last_line(errors)[:200]}")
    return last_line(told)


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill whatever is left of the process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended
    process.wait()


def last_line(text: str) -> str:
    """Its last line with something on it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def rows(params: int, workers: int, servers: int, seconds: float) -> list[Row]:
    """What is measured, ours first."""
    size = ("--params", str(params))
    both = (*size, "--workers", str(workers), "--servers", str(servers))
    step = ("-m", "zasgd", "bench", "step", *both, "--rule", "dc-asgd-c", "--seconds", str(seconds), "--repeats", "1")
    mxnet = (str(HERE / "peers" / "mxnet_dist_async.py"), *both)
    gloo = (str(HERE / "peers" / "gloo_allreduce.py"), *size, "--ranks", str(workers))
    return [
        Row(f"{OURS} arena, dc-asgd-c", (*step, "--path", "arena", "--json")),
        Row(f"{OURS} arena, dc-asgd-c, gradients written", (*step, "--path", "arena", "--write-grads", "--json")),
        Row(f"{OURS} direct, dc-asgd-c", (*step, "--path", "direct", "--json")),
        Row(f"{OURS} relay, dc-asgd-c", (*step, "--path", "relay", "--json")),
        Row("MXNet 1.9.1 dist_async, SGD", (*mxnet, "--optimizer", "sgd"), MXNET),
        Row("MXNet 1.9.1 dist_async, DCASGD", (*mxnet, "--optimizer", "dcasgd"), MXNET),
        Row("gloo all-reduce, torch 2.13.0", gloo, GLOO),
    ]


def table(measured: list[Row]) -> str:
    """Markdown: medians with their ranges, and how many times a peer's rate each of our paths reaches."""
    peers = [row for row in measured if row.environment and row.found]
    heads = ["program", "steps/s (lowest - highest)", "GB/s", *(f"x {row.name.split(', torch')[0]}" for row in peers)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in measured:
        lines.append("| " + " | ".join(cells(row, peers)) + " |")
    return "\n".join(lines)


def cells(row: Row, peers: list[Row]) -> list[str]:
    """One line of the table."""
    if not row.found:
        return [row.name, row.why_not, "", *("" for _ in peers)]
    rates = [figures["steps_per_s"] for figures in row.found]
    median = row.median("steps_per_s")
    times = ("" if row.environment else f"{median / peer.median('steps_per_s'):.1f}" for peer in peers)
    return [row.name, f"{median:.1f} ({min(rates):.1f} - {max(rates):.1f})", f"{row.median('gb_per_s'):.2f}", *times]


def write(text: str, page: Path) -> None:
    """Put `text` between the markers of `page`; a page that does not exist becomes the markers alone."""
    before, after = "", "\n"
    if page.exists():
        before, _, rest = page.read_text().partition(BEGIN)
        _, found, after = rest.partition(END)
        if not found:
            raise SystemExit(f"{page} has no {BEGIN} ... {END}: put these two lines where the table belongs")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each program (default: 3)")
    parser.add_argument("--params", type=int, default=25_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each of our runs (default: 5)")
    parser.add_argument("--env-dir", type=Path, default=Path.home() / ".cache" / "zasgd-bench")
    parser.add_argument("--no-write", action="store_true", help="print the table only")
    return parser.parse_args()


def main() -> int:
    """Measure every program in turn, as often as asked; 1 if one of our own failed."""
    args = arguments()
    measured = rows(args.params, args.workers, args.servers, args.seconds)
    for i in range(args.repeats):
        for row in measured:
            row.measure(args.env_dir)
            rate = f"{row.found[-1]['steps_per_s']:.2f} steps/s" if not row.why_not else row.why_not
            print(f"run {i + 1} of {args.repeats}: {row.name}: {rate}", file=sys.stderr)
    size = f"{args.params:,} float32 parameters, {args.workers} workers or ranks, {args.servers} servers"
    text = f"{size}; medians of {args.repeats} alternating runs, {os.cpu_count()} CPUs.\n\n{table(measured)}"
    print(text)
    if not args.no_write:
        write(text, PAGE)
    return int(any(row.why_not for row in measured if row.environment is None))


if __name__ == "__main__":
    sys.exit(main())
