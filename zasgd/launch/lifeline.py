"""Ties the life of a process to its parent's: the kernel kills it when the parent ends, whatever ended that.

As a script, `python -I -S lifeline.py PARENT_PID COMMAND...`, it ties itself and becomes COMMAND; the tie
survives the exec. A `preexec_fn` would do the same, but runs Python between fork and exec of a process that
may have threads. This module needs only the standard library and never imports the rest of the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_CANNOT_EXEC = 127  # what a shell answers for a command it cannot find


def end_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends.

    Raises OSError where the kernel refuses. A parent that ended before this call goes unnoticed: the caller
    checks that it still lives.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")


def become(parent_pid: int, command: Sequence[str]) -> int:
    """Replace this process by `command`, tied to `parent_pid`; returns an exit code only when that fails."""
    end_with_parent()
    if os.getppid() != parent_pid:
        return 1
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
    return _CANNOT_EXEC


if __name__ == "__main__":
    sys.exit(become(int(sys.argv[1]), sys.argv[2:]))
