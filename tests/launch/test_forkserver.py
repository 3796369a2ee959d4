"""Workers forked from a process that has torch loaded, and nothing that a fork breaks."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import launch_targets
import pytest
from launch_deadline import is_running, wait_until

from zasgd.launch import LaunchError
from zasgd.launch.children import ChildSet, processes_of_run
from zasgd.launch.forkserver import TorchForkserver

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def test_a_forked_worker_finds_torch_and_an_otherwise_clean_process(
    forkserver: TorchForkserver, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # it would keep OpenBLAS single-threaded by itself
    with ChildSet(run, forkserver) as children:
        forkserver.start()
        wait_until(forkserver.ready)
        (pid,) = processes_of_run(run)
        threads_before_the_fork = threads_of(pid)
        facts = tmp_path / "facts.json"
        child = children.add(
            forkserver.fork(launch_targets.describe_yourself, (str(facts),), "worker 0", tmp_path / "w0.log")
        )
        wait_until(children.poll)
        parent_environment = dict(os.environ)
    assert child.ending == "exit code 7", child.log.read_text()
    assert json.loads(facts.read_text()) == {
        "torch_loaded": True,
        "zmq_loaded": False,
        "cli_loaded": False,
        "cuda_touched": False,
        "session": child.pid,
        "pid": child.pid,
        "sigint_is_default": True,
        "sigterm_is_default": True,
        "blocked_signals": [],
        "run": run,
        "openblas": os.environ.get("OPENBLAS_NUM_THREADS"),
        "start_method": None,
    }
    assert threads_before_the_fork == 1
    assert "ZASGD_RUN" not in parent_environment


def test_a_run_leaves_nothing_whatever_its_workers_do(forkserver: TorchForkserver, run: str, tmp_path: Path) -> None:
    before = direct_children()
    with ChildSet(run, forkserver) as children:
        forkserver.start()
        failed = children.add(forkserver.fork(launch_targets.raise_an_error, (), "w0", tmp_path / "w0.log"))
        ready = [tmp_path / "stubborn", tmp_path / "grandchild"]
        stubborn, parent = (
            children.add(forkserver.fork(target, (str(path),), path.name, tmp_path / f"{path.name}.log"))
            for target, path in zip(
                (launch_targets.ignore_sigterm, launch_targets.leave_a_grandchild), ready, strict=True
            )
        )
        wait_until(lambda: failed.poll() is not None and all(path.exists() for path in ready))

        began = time.monotonic()
        assert children.terminate(grace_s=0.5) == [stubborn]
        assert time.monotonic() - began < 3.0

    assert (failed.exit_code, stubborn.ending, parent.ending) == (1, "SIGKILL", "SIGTERM")
    assert "about to fail\n" in failed.log.read_text()
    assert "ValueError: no such batch" in failed.log.read_text()
    assert processes_of_run(run) == []
    assert direct_children() == before


def test_stopping_while_torch_is_loading_does_not_wait_for_it(forkserver: TorchForkserver) -> None:
    before = direct_children()
    forkserver.start()
    assert not forkserver.ready()
    began = time.monotonic()
    forkserver.stop()
    assert time.monotonic() - began < 1.0
    assert direct_children() == before


@needs_torch
def test_workers_end_when_their_supervisor_is_killed(run: str, tmp_path: Path) -> None:
    supervisor = f"""
import signal, sys
from pathlib import Path
import launch_targets
from zasgd.launch.forkserver import TorchForkserver
folder = Path({str(tmp_path)!r})
forkserver = TorchForkserver({{"ZASGD_RUN": {run!r}}}, folder / "forkserver.log")
forkserver.start()
child = forkserver.fork(launch_targets.ignore_sigterm, (str(folder / "ready"),), "w0", folder / "w0.log")
print(child.pid, flush=True)
signal.pause()
"""
    path = {"PYTHONPATH": str(Path(launch_targets.__file__).parent)}
    command = [sys.executable, "-c", supervisor]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **path}) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        wait_until((tmp_path / "ready").exists)
        assert len(processes_of_run(run)) == 2  # the worker and its forkserver
        process.kill()
        wait_until(lambda: not is_running(worker), within_s=5)
        wait_until(lambda: not processes_of_run(run), within_s=5)


def test_a_ctrl_c_in_the_terminal_does_not_reach_the_loading_forkserver(forkserver: TorchForkserver, run: str) -> None:
    """Its log would begin with the traceback of a KeyboardInterrupt."""
    with ChildSet(run, forkserver):
        forkserver.start()
        wait_until(lambda: processes_of_run(run))
        (pid,) = processes_of_run(run)
        os.kill(pid, signal.SIGINT)
        wait_until(forkserver.ready)


@needs_torch
def test_the_console_script_is_not_run_again_in_every_worker(tmp_path: Path, run: str) -> None:
    script = tmp_path / "console-script"
    (tmp_path / "heavy_console_script.py").write_text("")
    script.write_text(f"""
import sys
import heavy_console_script
from pathlib import Path
import launch_targets
from zasgd.launch.children import ChildSet
from zasgd.launch.forkserver import TorchForkserver

if __name__ == "__main__":
    folder = Path({str(tmp_path)!r})
    forkserver = TorchForkserver({{"ZASGD_RUN": {run!r}}}, folder / "forkserver.log")
    forkserver.start()
    with ChildSet({run!r}, forkserver) as children:
        facts = str(folder / "facts.json")
        children.add(forkserver.fork(launch_targets.describe_yourself, (facts,), "w0", folder / "w0.log"))
        while not children.poll():
            pass
""")
    path = {"PYTHONPATH": f"{Path(launch_targets.__file__).parent}:{tmp_path}"}
    subprocess.run([sys.executable, str(script)], check=True, timeout=60, env={**os.environ, **path})
    assert json.loads((tmp_path / "facts.json").read_text())["cli_loaded"] is False


def test_files_in_the_users_folder_do_not_shadow_what_the_forkserver_imports(
    forkserver: TorchForkserver, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('the random module of the user')")
    monkeypatch.chdir(tmp_path)
    with ChildSet(run, forkserver):
        forkserver.start()
        wait_until(forkserver.ready)


def test_a_torch_that_cannot_be_loaded_is_one_clear_line(
    forkserver: TorchForkserver, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    with ChildSet(run, forkserver):
        forkserver.start()
        log = tmp_path / "forkserver.log"
        wait_until(lambda: "torch could not be loaded" in log.read_text())
        for use in (forkserver.ready, lambda: forkserver.fork(launch_targets.raise_an_error, (), "w0", log)):
            with pytest.raises(LaunchError, match=rf"^torch could not be loaded; the reason is in {log}$"):
                use()
        assert "libcudart.so" in log.read_text()


def test_without_torch_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"torch is not installed.*pip install 'zasgd\[train\]'"):
        TorchForkserver({}, tmp_path / "log").start()


def test_only_functions_of_a_module_can_be_targets(forkserver: TorchForkserver, run: str, tmp_path: Path) -> None:
    with ChildSet(run, forkserver):
        forkserver.start()
        with pytest.raises(TypeError, match="not a function at the top level"):
            forkserver.fork(lambda: 0, (), "w0", tmp_path / "w0.log")


def direct_children() -> set[str]:
    """The pids of this process's children, zombies included."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
