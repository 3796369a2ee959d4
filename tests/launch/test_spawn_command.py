"""Commands started as children: their log, their environment, their session, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launch_deadline import is_running, wait_until

from zasgd.launch.children import ChildSet, processes_of_run, spawn_command


def test_a_command_writes_to_its_log_and_reports_its_exit_code_once(
    children: ChildSet, env: dict[str, str], tmp_path: Path
) -> None:
    script = "echo out; echo err >&2; echo run=$ZASGD_RUN; exit 3"
    child = children.add(spawn_command("shard 0", ["sh", "-c", script], tmp_path / "logs" / "shard.log", env))

    wait_until(lambda: child.poll() is not None)

    assert children.poll() == [child]
    assert children.poll() == []
    assert (child.exit_code, child.ending) == (3, "exit code 3")
    assert child.log.read_text() == f"out\nerr\nrun={env['ZASGD_RUN']}\n"


def test_a_killed_command_is_reported_by_the_name_of_the_signal(
    children: ChildSet, env: dict[str, str], tmp_path: Path
) -> None:
    child = children.add(spawn_command("broker", ["sleep", "600"], tmp_path / "log", env))
    assert child.ending == "running"

    child.send(signal.SIGKILL)
    wait_until(children.poll)

    assert (child.exit_code, child.ending) == (-signal.SIGKILL, "SIGKILL")
    child.send(signal.SIGTERM)  # to one that has ended: nothing happens


def test_a_command_that_does_not_exist_says_so_in_its_log(
    children: ChildSet, env: dict[str, str], tmp_path: Path
) -> None:
    child = children.add(spawn_command("broker", ["no-such-command"], tmp_path / "log", env))
    wait_until(children.poll)
    assert child.exit_code == 127
    assert child.log.read_text() == "cannot start no-such-command: No such file or directory\n"


def test_a_command_has_a_session_of_its_own_so_that_ctrl_c_passes_it_by(
    children: ChildSet, env: dict[str, str], tmp_path: Path
) -> None:
    child = children.add(spawn_command("broker", ["sleep", "600"], tmp_path / "log", env))
    assert os.getsid(child.pid) == child.pid != os.getsid(0)


def test_a_command_ends_when_its_supervisor_is_killed(tmp_path: Path, run: str) -> None:
    supervisor = f"""
import signal, sys
from pathlib import Path
from zasgd.launch.children import spawn_command
child = spawn_command("broker", ["sleep", "600"], Path({str(tmp_path / "log")!r}), {{"ZASGD_RUN": {run!r}}})
print(child.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        # once the child is the command: the tie must have survived the exec
        wait_until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"))
        process.kill()
        wait_until(lambda: not is_running(pid), within_s=5)
    assert processes_of_run(run) == []


def test_a_command_whose_supervisor_is_already_gone_never_starts(tmp_path: Path) -> None:
    lifeline = Path(sys.modules[spawn_command.__module__].__file__ or "").with_name("lifeline.py")
    somebody_else = "1"
    started = tmp_path / "started"
    tied = [sys.executable, "-I", "-S", str(lifeline), somebody_else, "touch", str(started)]
    assert subprocess.run(tied, check=False).returncode == 1
    assert not started.exists()


def test_children_are_started_from_the_main_thread_only(env: dict[str, str], tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def start() -> None:
        with pytest.raises(RuntimeError, match="main thread") as caught:
            spawn_command("broker", ["true"], tmp_path / "log", env)
        raised.append(caught.value)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(raised) == 1
