"""Workers without torch for a run by hand: many processes forked from one that has imported everything.

`python e2e_light.py HOST:PORT --count N ...`: each is a worker core with sockets of its own whose gradient is ones. The
parent counts their steps over a window and prints one line of JSON; it waits for their end, its exit code is the worst.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import sys
import time
from typing import Any

import numpy as np

from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.node import Note
from zasgd.core.transfer import Gradient
from zasgd.core.worker import GradientTask, Worker, WorkerConfig
from zasgd.net.processes import Post, host_name, new_token, run_member

PATIENCE_S = 120.0


def main() -> int:
    """Fork, count, wait."""
    parser = argparse.ArgumentParser()
    parser.add_argument("broker")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--params", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--paths", default="auto", help="of the workers in turn, with commas between")
    parser.add_argument("--inflight", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="leave after so many")
    parser.add_argument("--name", default="light")
    parser.add_argument("--window-s", type=float, default=0.0)
    options = parser.parse_args()
    # Anonymous, shared with the children: each counts its own steps there.
    steps = np.frombuffer(mmap.mmap(-1, 8 * options.count), np.int64)
    gc.freeze()  # what the children never collect they never copy
    children = [child for i in range(options.count) if (child := _forked(options, i, steps))]
    if options.window_s:
        print(json.dumps(_counted(steps, options.window_s)), flush=True)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _forked(options: argparse.Namespace, number: int, steps: np.ndarray[Any, Any]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = _work(options, number, steps)
        finally:
            os._exit(code)
    return child


def _work(options: argparse.Namespace, number: int, steps: np.ndarray[Any, Any]) -> int:
    layout = Layout((TensorSpec("w", (options.params,)),))
    zeros = np.zeros(layout.sizes["params"], np.float32)
    no_stats, no_counters = np.empty(0, np.float32), np.empty(0, np.int64)
    paths = options.paths.split(",")
    config = WorkerConfig(
        name=f"{options.name}-{number}", host=host_name(), pid=os.getpid(), data_path=paths[number % len(paths)],
        inflight=options.inflight, connect_timeout_s=PATIENCE_S, broker_timeout_s=PATIENCE_S,
    )  # fmt: skip
    seed = {"params": zeros, "stats": no_stats, "counters": no_counters}
    node = Worker(time.monotonic(), new_token(), config, layout, options.samples, lambda: seed)

    def compute(task: GradientTask, post: Post) -> Gradient:
        task.memory.grads.fill(1.0)
        steps[number] += 1
        if steps[number] == options.steps:
            post(lambda now: node.leave(now, "its steps are done"))
        num_samples = sum(grant.num_samples for grant in task.grants)
        return Gradient(task.memory.grads, no_stats, no_counters, num_samples, 1.0, True)

    return run_member(node, options.broker, compute, note=_say).code


def _counted(steps: np.ndarray[Any, Any], window_s: float) -> dict[str, Any]:
    """Steps of each worker within a window that begins when all have begun."""
    deadline = time.monotonic() + PATIENCE_S
    while steps.min() < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{int((steps < 2).sum())} of {steps.size} workers have not begun")
        time.sleep(0.05)
    before, began_at = steps.copy(), time.monotonic()
    time.sleep(window_s)
    return {"window_s": time.monotonic() - began_at, "steps": (steps - before).tolist()}


def _say(note: Note) -> None:
    print(note.event, dict(note.fields), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
