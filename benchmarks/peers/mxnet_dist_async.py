"""Apache MXNet: its dist_async key-value store (ps-lite over ZeroMQ) with its SGD or DCASGD optimizer.

python mxnet_dist_async.py --workers 4 --servers 2 --optimizer dcasgd --params 25000000 --steps 5

Starts scheduler, servers and workers itself and prints one JSON line. A step is one worker's push, the update and the
pull of the whole model; steps per second are those of all workers. Needs mxnet and nothing of this package; written for
Python 3.8, since MXNet has seen no release since 2022.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time

NUM_KEYS = 50
"""Tensors of the model: MXNet cuts none of them over its servers unless it is larger than a million elements."""


def work(args: argparse.Namespace) -> None:
    """What this process is, by its DMLC_ROLE; scheduler and servers never come back from the first line."""
    import mxnet as mx  # a server begins to serve when this is imported

    store = mx.kv.create("dist_async")
    if os.environ["DMLC_ROLE"] != "worker":
        return
    keys = [str(i) for i in range(NUM_KEYS)]
    shape = (args.params // NUM_KEYS,)
    store.init(keys, [mx.nd.zeros(shape) for _ in keys])
    if store.rank == 0:
        store.set_optimizer(mx.optimizer.create(args.optimizer, learning_rate=1e-6))
    store._barrier()
    grads = [mx.nd.random.normal(shape=shape) * 0.01 for _ in keys]
    params = [mx.nd.zeros(shape) for _ in keys]
    mx.nd.waitall()

    def step() -> None:
        store.push(keys, grads)
        store.pull(keys, out=params)
        for tensor in params:
            tensor.wait_to_read()

    step()
    store._barrier()
    began_at = time.perf_counter()
    for _ in range(args.steps):
        step()
    store._barrier()
    if store.rank == 0:
        rate = args.steps * store.num_workers / (time.perf_counter() - began_at)
        gb_per_s = rate * args.params * 8 / 1e9
        print(json.dumps({"steps_per_s": round(rate, 3), "gb_per_s": round(gb_per_s, 3)}), flush=True)


def launch(args: argparse.Namespace) -> None:
    """Start every role as this same program, and wait for all."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environment = dict(
        os.environ,
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT=str(port),
        DMLC_INTERFACE="lo",
        DMLC_NUM_WORKER=str(args.workers),
        DMLC_NUM_SERVER=str(args.servers),
        OMP_NUM_THREADS="1",
    )
    roles = ["scheduler"] + ["server"] * args.servers + ["worker"] * args.workers
    command = [sys.executable, *sys.argv]
    processes = [subprocess.Popen(command, env=dict(environment, DMLC_ROLE=role)) for role in roles]
    for process in processes:
        process.wait()


def main() -> None:
    """The one command that a person gives, and each of the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--optimizer", default="dcasgd", choices=["dcasgd", "sgd"])
    parser.add_argument("--params", type=int, default=25_000_000)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    (work if "DMLC_ROLE" in os.environ else launch)(args)


if __name__ == "__main__":
    main()
