"""Many torch processes for the price of one import: a forkserver that has loaded torch and nothing else.

The supervisor's side is `TorchForkserver`; `_enter` is the first code of ours that a forked child runs.
Before a fork there is no second thread, no ZeroMQ context and no CUDA: none of them survives one. Uses
multiprocessing's own forkserver, of which a process has only one.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver as mp_forkserver
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from zasgd.launch import LaunchError
from zasgd.launch.children import Child, require_main_thread
from zasgd.launch.lifeline import end_with_parent

LOG_VARIABLE = "ZASGD_FORKSERVER_LOG"
READY = "ready to fork"
FAILED = "torch could not be loaded"

_FORKSERVER_ENV = {
    # numpy's OpenBLAS starts a thread per further core on import; only a process with one thread forks safely
    "OPENBLAS_NUM_THREADS": "1",
    # python -c puts the current folder first: a user's random.py or torch/ there must not be what is loaded
    "PYTHONSAFEPATH": "1",
}


class TorchForkserver:
    """Forks children that find torch already imported, each with a session and a log of its own.

    env: variables added to this process's own, for the forkserver and every child. log: a file for what
    loading torch prints. Used from the main thread only.
    """

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        self._env = dict(env)
        self._log = log
        self._context = multiprocessing.get_context("forkserver")

    def start(self) -> None:
        """Begin to import torch in the background and return at once.

        Raises LaunchError if torch is not installed; what a broken torch raises is reported by `ready` and
        `fork`.
        """
        if importlib.util.find_spec("torch") is None:
            raise LaunchError("torch is not installed, and workers need it: pip install 'zasgd[train]'")
        require_main_thread()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        self._context.set_forkserver_preload(["zasgd.launch.preload"])
        # started before the environment is the run's: a sweep of the run spares it, it has names to unlink
        resource_tracker.ensure_running()
        self._ensure_running()

    def ready(self) -> bool:
        """Whether `fork` would return within milliseconds; LaunchError if torch could not be loaded."""
        text = self._log.read_text(errors="replace")
        if FAILED in text:
            raise LaunchError(f"{FAILED}; the reason is in {self._log}")
        return READY in text

    def fork(self, target: Callable[..., int | None], args: tuple[Any, ...], name: str, log: Path) -> Child:
        """Run `target(*args)` in a new child, which exits with what it returns. Waits for torch to load.

        target: a function at the top level of a module; args are pickled. Signal handlers are the default
        ones. Everything the child prints goes to `log`, the traceback of an uncaught exception too (exit code
        1). It leaves by `os._exit`: atexit is not run. Raises LaunchError if torch could not be loaded.
        """
        require_main_thread()
        self.ready()
        log.parent.mkdir(parents=True, exist_ok=True)
        order = (_reference(target), args, str(log), {**os.environ, **self._env})
        process = self._context.Process(target=_enter, args=order, name=name)
        try:
            self._ensure_running()
            with _without_main_module():
                process.start()
        except (OSError, EOFError) as error:
            raise LaunchError(f"the process that loads torch ended; see {self._log}") from error
        return Child(name, process.pid or 0, log, _exit_code_of(process))

    def stop(self) -> None:
        """End the forkserver, whatever it is doing, and with it every child that still runs; idempotent."""
        _end_multiprocessing_servers()

    def _ensure_running(self) -> None:
        """Start it unless it runs; SIGINT stays blocked in it until it has left the terminal's session."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with _variables({**self._env, **_FORKSERVER_ENV, LOG_VARIABLE: str(self._log.absolute())}):
                mp_forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def send_output_to(path: str) -> None:
    """Append stdout and stderr, those of C libraries too, to the file at `path` from here on."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _end_multiprocessing_servers() -> None:
    """Kill and reap the forkserver, then let the tracker of named resources unlink what is left and end.

    Private API, the only one used: the standard library ends both only when this process exits, and a
    forkserver that is still importing torch not for seconds.
    """
    server = mp_forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
    resource_tracker._resource_tracker._stop()


def _reference(target: Callable[..., Any]) -> str:
    if "." in target.__qualname__:
        raise TypeError(f"{target.__qualname__} is not a function at the top level of a module")
    return f"{target.__module__}:{target.__qualname__}"


def _exit_code_of(process: ForkServerProcess) -> Callable[[], int | None]:
    return lambda: process.exitcode


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while: multiprocessing lets a forkserver only inherit them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide `__main__` from multiprocessing, which would run the console script's file again in every
    child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _enter(target: str, args: tuple[Any, ...], log: str, environ: Mapping[str, str]) -> None:
    """The child's first steps. The target is named, not pickled, so that a failing import too ends in the
    log."""
    send_output_to(log)
    os.setsid()
    end_with_parent()
    _default_signals()
    os.environ.clear()
    os.environ.update(environ)
    _forget_the_start_method()
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        raise SystemExit(1)  # it ended before end_with_parent, and with it the forkserver
    module, _, function = target.partition(":")
    raise SystemExit(getattr(importlib.import_module(module), function)(*args))


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _forget_the_start_method() -> None:
    """Let a user's DataLoader start its workers as in any script, not through the supervisor's forkserver."""
    multiprocessing.set_start_method(None, force=True)
