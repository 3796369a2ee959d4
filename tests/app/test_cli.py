"""The command line itself: what `--help` says, and streams that are closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from zasgd.cli import app

ZASGD = [sys.executable, "-m", "zasgd"]


FROZEN = {
    "train": "recipe workers servers set run-dir port seed device record-pushes json",
    "demo": "run-dir json",
    "broker": "recipe servers bind insecure set run-dir json",
    "server": "broker bind advertise insecure connect-timeout broker-timeout record record-pushes",
    "worker": "broker name device threads connect-timeout broker-timeout data-path",
    "eval": "broker run-dir device threads connect-timeout broker-timeout",
    "status": "broker json timeout",
    "drain": "worker broker json timeout",
    "stop": "broker json timeout",
    "replay": "run_dir threads json",
    "recipes": "recipe set json",
    "rules": "matrix markdown json",
    "simulate": "recipe workers rule speeds network churn seed step-ms curve set json",
    "compare": "recipe rules out workers speeds network churn seeds step-ms jobs curve target-loss set json",
    "doctor": "recipe workers set warm json",
    "bench roundtrip": "params seconds repeats json",
    "bench kernels": "params repeats rules json",
    "bench step": "path params workers servers rule write-grads compress compress-pull seconds repeats json",
    "bench scale": "workers step-ms params servers steps json",
    "clean": "json",
}
"""Command -> its arguments and options. Whoever changes it changes what users have in their scripts."""


def commands(group: Any, prefix: str = "") -> dict[str, str]:
    """The same of the code."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{prefix}{name} ")
        elif not command.hidden:
            shown = [p for p in command.params if not getattr(p, "hidden", False)]
            found[prefix + name] = " ".join(p.opts[0].lstrip("-") for p in shown if p.name != "help")
    return found


def test_the_command_line_is_frozen() -> None:
    assert commands(typer.main.get_command(app)) == FROZEN


def help_of(command: str) -> str:
    """What `zasgd COMMAND --help` prints, its frame and line breaks taken away."""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    told = subprocess.run([*ZASGD, command, "--help"], env=environment, capture_output=True, text=True, timeout=60)
    return " ".join(told.stdout.replace("│", " ").split())


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("train", ("the recipe's run.workers", "the recipe's run.servers")),
        ("train", ("runs/NAME-TIME", "first free block from 7470")),
        ("server", ("first free port after the broker's",)),
    ],
)  # fmt: skip
def test_help_names_the_defaults_that_depend_on_something(command: str, defaults: tuple[str, ...]) -> None:
    told = help_of(command)
    assert [default for default in defaults if f"(default: {default})" not in told] == []


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [("recipes", "digits"), ("recipes",), ("--version",), ("--help",)])
def test_a_reader_that_has_gone_ends_the_command_quietly(arguments: tuple[str, ...], unbuffered: str) -> None:
    code, told = run_without_reader(arguments, unbuffered, stderr=subprocess.PIPE)
    assert (code, told) == (1, "")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_of_the_error_line_may_have_gone_too(unbuffered: str) -> None:
    assert run_without_reader(("train", "nowhere.toml"), unbuffered, stderr=subprocess.STDOUT)[0] == 1


def run_without_reader(arguments: tuple[str, ...], unbuffered: str, stderr: int) -> tuple[int, str | None]:
    """(exit code, stderr) of a command whose standard output is a pipe that nobody reads."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [*ZASGD, *arguments], env=environment, stdout=writer, stderr=stderr, text=True, timeout=60
        )
    finally:
        os.close(writer)
    return ended.returncode, ended.stderr


REPORT = """
import os, sys
from pathlib import Path
from zasgd.cli import main
sys.argv = ["zasgd", "recipes", "digits"]
try:
    main()
except SystemExit as ended:
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
    streams = [stream is not None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    Path(os.environ["REPORT"]).write_text(f"{ended.code} {fds} {streams} {os.get_inheritable(1)}")
"""


def test_no_socket_can_take_the_place_of_a_closed_standard_stream(tmp_path: Path) -> None:
    report = tmp_path / "report"
    environment = {**os.environ, "REPORT": str(report)}
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, REPORT]
    subprocess.run(command, env=environment, timeout=60)
    assert report.read_text() == f"0 {['/dev/null'] * 3} {[True] * 3} True"
