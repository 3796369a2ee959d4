"""torch.distributed gloo: all-reduce of one float32 vector over the loopback, one thread per rank.

python gloo_allreduce.py --ranks 4 --params 25000000 --steps 8

Prints one JSON line. A step is one rank that has reduced the whole vector; steps per second are those of all ranks, and
GB/s counts the vector twice per step, as for a push and a pull. Needs torch and nothing of this package.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WARM_UP_STEPS = 2


def run_rank(rank: int, args: argparse.Namespace, port: int) -> None:
    """One rank, from joining to leaving; rank 0 prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    vector = torch.randn(args.params)
    seconds_of(WARM_UP_STEPS, vector)
    seconds = seconds_of(args.steps, vector)
    if rank == 0:
        rate = args.steps * args.ranks / seconds
        gb_per_s = rate * args.params * 8 / 1e9
        print(json.dumps({"steps_per_s": round(rate, 3), "gb_per_s": round(gb_per_s, 3)}), flush=True)
    dist.destroy_process_group()


def seconds_of(steps: int, vector: torch.Tensor) -> float:
    """How long all ranks together take."""
    dist.barrier()
    began_at = time.perf_counter()
    for _ in range(steps):
        dist.all_reduce(vector)
    dist.barrier()
    return time.perf_counter() - began_at


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--params", type=int, default=25_000_000)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    mp.spawn(run_rank, (args, port), args.ranks)


if __name__ == "__main__":
    main()
