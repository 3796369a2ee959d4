"""Freed frames leave their memory to the next ones, and no more of it is kept than was needed at once."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from zasgd.net import heap

PROGRAM = textwrap.dedent("""
    import resource, sys, threading
    import zmq
    from zasgd.net import frames
    from zasgd.net.heap import keep_heap

    if sys.argv[1] == "kept":
        assert keep_heap()
    ctx = zmq.Context()
    inbox, outbox = ctx.socket(zmq.PULL), ctx.socket(zmq.PUSH)
    port = inbox.bind_to_random_port("tcp://127.0.0.1")
    outbox.connect(f"tcp://127.0.0.1:{port}")
    pieces = [b"x" * (1 << 20)] * 48  # what a shard of 12 M parameters holds when a push is complete

    def move(count):
        for _ in range(count):
            frames.write(outbox, pieces)
            inbox.poll()
            frames.read(inbox)

    def used():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_minflt, int(open("/proc/self/statm").read().split()[1]) * 4096

    move(5)
    faults_before, bytes_before = used()
    move(20)
    faults, num_bytes = used()
    print(faults - faults_before, num_bytes - bytes_before)
    ctx.destroy(linger=0)
""")


def moved(how: str) -> tuple[int, int]:
    """Page faults of 20 messages of 48 MiB over TCP, and by how many bytes the process grew meanwhile."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    faults, growth = run.stdout.split()
    return int(faults), int(growth)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_frames_of_large_pushes_fault_in_no_new_pages_and_the_process_stays_as_large() -> None:
    faults, growth = moved("kept")
    assert faults < moved("as it comes")[0] / 10  # 0 and 168,000 with glibc 2.36
    assert growth < 16 << 20


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = type("OtherLibrary", (), {})
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: other())
    assert not heap.keep_heap()
