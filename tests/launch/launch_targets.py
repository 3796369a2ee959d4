"""What forked children run in these tests: functions of an importable module, as workers are."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path


def describe_yourself(path: str) -> int:
    """Write what a worker finds at its entry, then exit with 7."""
    facts = {
        "torch_loaded": "torch" in sys.modules,
        "zmq_loaded": "zmq" in sys.modules,
        "cli_loaded": "heavy_console_script" in sys.modules,
        "cuda_touched": sys.modules["torch"].cuda.is_initialized(),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "sigint_is_default": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sigterm_is_default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "run": os.environ.get("ZASGD_RUN"),
        "openblas": os.environ.get("OPENBLAS_NUM_THREADS"),
        "start_method": multiprocessing.get_start_method(allow_none=True),
    }
    Path(path).write_text(json.dumps(facts))
    return 7


def raise_an_error() -> int:
    print("about to fail")
    raise ValueError("no such batch")


def ignore_sigterm(ready: str) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(ready).touch()
    while True:
        signal.pause()


def leave_a_grandchild(ready: str) -> int:
    """Start a process of another session, as a data loader of the user's might, and wait for ever."""
    grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(ready).write_text(str(grandchild.pid))
    signal.pause()
    return 0
