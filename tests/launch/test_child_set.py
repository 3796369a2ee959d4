"""Ending all processes of a run: politely, then surely, and without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch_deadline import wait_until

from zasgd.launch.children import ChildSet, processes_of_run, spawn_command

STUBBORN = "trap '' TERM; touch {ready}; while :; do sleep 0.05; done"
POLITE = "trap 'exit 0' TERM; touch {ready}; while :; do sleep 0.05; done"


def start_shell(children: ChildSet, script: str, tmp_path: Path, name: str, env: dict[str, str]):
    ready = tmp_path / f"{name}.ready"
    child = spawn_command(name, ["sh", "-c", script.format(ready=ready)], tmp_path / f"{name}.log", env)
    children.add(child)
    wait_until(ready.exists)
    return child


def test_terminate_asks_first_and_kills_those_that_stay(
    children: ChildSet, env: dict[str, str], tmp_path: Path
) -> None:
    polite = start_shell(children, POLITE, tmp_path, "polite", env)
    stubborn = start_shell(children, STUBBORN, tmp_path, "stubborn", env)

    began = time.monotonic()
    killed = children.terminate(grace_s=1.0)

    assert killed == [stubborn]
    assert (polite.ending, stubborn.ending) == ("exit code 0", "SIGKILL")
    assert children.running == ()
    assert 1.0 <= time.monotonic() - began < 2.5


def test_terminate_returns_at_once_when_all_end_politely(
    children: ChildSet, env: dict[str, str], tmp_path: Path
) -> None:
    start_shell(children, POLITE, tmp_path, "polite", env)
    began = time.monotonic()
    assert children.terminate(grace_s=60.0) == []
    assert time.monotonic() - began < 5.0


def test_a_grandchild_in_a_session_of_its_own_is_found_by_its_environment(
    children: ChildSet, run: str, env: dict[str, str], tmp_path: Path
) -> None:
    detached = "setsid sleep 600 & echo $! > {ready}.pid; mv {ready}.pid {ready}; exit 0"
    child = start_shell(children, detached, tmp_path, "parent", env)
    wait_until(lambda: child.poll() is not None)
    assert len(processes_of_run(run)) == 1

    children.terminate(grace_s=0.0)

    assert processes_of_run(run) == []


def test_an_exception_in_the_supervisor_leaves_no_process_behind(run: str, env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(KeyError), ChildSet(run) as children:
        start_shell(children, STUBBORN, tmp_path, "stubborn", env)
        raise KeyError("a bug")
    assert processes_of_run(run) == []


def test_processes_of_run_knows_a_run_from_one_whose_name_begins_alike(run: str) -> None:
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "ZASGD_RUN": run + "0"})
    try:
        wait_until(lambda: processes_of_run(run + "0") == [other.pid])
        assert processes_of_run(run) == []
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
