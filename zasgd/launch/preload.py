"""What the forkserver loads before it forks: torch, compiled loops, and nothing that a fork would break.

Importing this module is its effect, since a module is all that multiprocessing lets a forkserver load. It
starts no thread, opens no socket and never touches CUDA. Its log ends with READY once a fork no longer has to
wait.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from zasgd.launch.forkserver import FAILED, LOG_VARIABLE, READY, send_output_to
from zasgd.launch.lifeline import end_with_parent


def _leave_the_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()


def _load_torch() -> None:
    began = time.monotonic()
    try:
        import torch

        from zasgd.core import copying

        copying.warm_up()
    except Exception:  # a broken installation may raise anything: it ends here, in the log
        traceback.print_exc()
        print(FAILED, flush=True)
        sys.exit(1)
    print(f"torch {torch.__version__} loaded in {time.monotonic() - began:.1f} s, {READY}", flush=True)


_leave_the_terminal()
end_with_parent()
send_output_to(os.environ[LOG_VARIABLE])
_load_torch()
