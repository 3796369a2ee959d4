"""One worker's step on a GPU: is what it computes right, and how much of its copies does the computation hide.

    python benchmarks/cuda_step.py [--params 25000000] [--steps 30]

First, bit for bit: three steps whose gradients and parameters go through pinned memory on the side stream, beside the
same by plain autograd and blocking copies, with two memories in turn, parts that leave early, and a clipped gradient.
Then times, medians: pinned copies alone each way (the limit), forward and backward alone, and whole steps with the
parameters brought at their beginning or, `prefetch`, during the step before. Prints one JSON object; `hidden` is the
share of the copies' time by which a step is shorter than computing and copying one after the other. Under two minutes.
Exits 1 if a value differs. Without a GPU it says so in one line and exits 77.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from zasgd.core.region import Memory, RegionPlan, memories, private_region
from zasgd.torch.flat import FlatModule

Array = np.ndarray[Any, Any]
NO_GPU = 77


def net(num_params: int, layers: int = 8) -> nn.Sequential:
    """Square layers of about `num_params` parameters together, on the GPU, the same each time."""
    torch.manual_seed(0)
    width = max(16, round((num_params / layers) ** 0.5))
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))).cuda()


def inputs(module: nn.Sequential, batch: int) -> torch.Tensor:
    """One batch, the same each time."""
    torch.manual_seed(1)
    return torch.randn(batch, module[0][0].in_features, device="cuda")


def slots(flat: FlatModule) -> tuple[Memory, Memory]:
    """Two memories with different values."""
    region = private_region(RegionPlan(flat.layout.sizes["params"], 2))
    first, second = memories(region, flat.layout)
    first.params[:] = flat.initial()["params"]
    np.multiply(first.params, np.float32(1.25), out=second.params)
    return first, second


def step(flat: FlatModule, memory: Memory, batch: torch.Tensor, clip_norm: float = 0.0, **early: Any) -> None:
    """What a trainer does for one push."""
    flat.bind(memory)
    flat.adopt()
    if not clip_norm:
        flat.expect_last(**early)
    flat.module(batch).square().sum().backward()
    if not flat.gradient(clip_norm).finite:
        raise ArithmeticError("the gradient of finite parameters is not finite")


# ---- is it right -----------------------------------------------------------------------------------------------


def plain_gradient(flat: FlatModule, plain: nn.Module, memory: Memory, batch: torch.Tensor, clip_norm: float) -> Array:
    """The same by blocking copies of one tensor after the other."""
    found, names = np.zeros_like(memory.grads), dict(plain.named_parameters())
    for name, parameter in names.items():
        start = flat.layout.offsets[name]
        values = torch.from_numpy(memory.params[start : start + parameter.numel()].copy())
        parameter.data.copy_(values.view(parameter.shape))
        parameter.grad = None
    plain(batch).square().sum().backward()
    if clip_norm:
        nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
    for name, parameter in names.items():
        start = flat.layout.offsets[name]
        found[start : start + parameter.numel()] = parameter.grad.cpu().reshape(-1)
    return found


def wrong(num_params: int) -> list[str]:
    """What differs from plain autograd, in words."""
    flat, plain, found = FlatModule(net(num_params)), net(num_params), []
    batch, both, size = inputs(flat.module, 64), slots(flat), flat.layout.sizes["params"]
    parts = [(start, min(start + (1 << 20), size)) for start in range(0, size, 1 << 20)]
    for i in range(3):
        memory, heard = both[i % 2], []

        def ready(start: int, stop: int, memory: Memory = memory, heard: list[Any] = heard) -> None:
            heard.append((start, stop, memory.grads[start:stop].copy()))

        step(flat, memory, batch, parts=parts, ready=ready)
        expected = plain_gradient(flat, plain, memory, batch, 0.0)
        if not np.array_equal(memory.grads, expected):
            found.append(f"gradient of step {i}")
        if not all(np.array_equal(values, expected[start:stop]) for start, stop, values in heard):
            found.append(f"part that left early in step {i}")
        if not np.array_equal(flat.params(), memory.params):
            found.append(f"parameters of step {i}")
        memory.params[:] -= np.float32(1e-4) * memory.grads
    step(flat, both[0], batch, clip_norm=0.5)
    if not np.allclose(both[0].grads, plain_gradient(flat, plain, both[0], batch, 0.5), rtol=1e-4, atol=1e-9):
        found.append("clipped gradient")
    flat.unbind()
    return found


# ---- how long does it take ---------------------------------------------------------------------------------------


def median_ms(run: Callable[[], None], repeats: int) -> float:
    """Milliseconds of one run and all that it asked the GPU for."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(times), 3)


def copies_ms(num_params: int, repeats: int) -> dict[str, float]:
    """One vector down and one up through pinned memory, with nothing beside it."""
    there, here = torch.ones(num_params, device="cuda"), torch.ones(num_params).pin_memory()
    down = median_ms(lambda: here.copy_(there, non_blocking=True), repeats)
    up = median_ms(lambda: there.copy_(here, non_blocking=True), repeats)
    return {"down": down, "up": up}


def times_ms(num_params: int, repeats: int) -> dict[str, float]:
    """Forward and backward alone, and whole steps, of a batch for which computing takes about as long as copying."""
    copies = copies_ms(num_params, repeats)
    plain, flat = net(num_params), FlatModule(net(num_params))
    first, second = slots(flat)
    batch = inputs(plain, 256)

    def compute() -> None:
        plain.zero_grad(set_to_none=True)
        plain(batch).square().sum().backward()

    while (computing := median_ms(compute, 5)) < copies["down"] + copies["up"] and len(batch) < 1 << 16:
        batch = inputs(plain, 2 * len(batch))
    turn = [first, second]

    def prefetched() -> None:
        flat.bind(turn[0])
        flat.adopt()
        flat.expect_last()
        flat.module(batch).square().sum().backward()
        flat.prefetch(turn[1])
        flat.gradient()
        turn.reverse()

    whole, ahead = median_ms(lambda: step(flat, first, batch), repeats), median_ms(prefetched, repeats)
    flat.unbind()
    return {"batch": len(batch), **copies, "compute": computing, "step": whole, "step_with_prefetch": ahead}


def figures(num_params: int, repeats: int) -> dict[str, Any]:
    """Times, bandwidths, and how much of the copies is hidden."""
    ms = times_ms(num_params, repeats)
    both, gigabytes = ms["down"] + ms["up"], 4 * num_params / 1e9
    return {
        "device": torch.cuda.get_device_name(),
        "params": num_params,
        "ms": ms,
        "gb_per_s": {way: round(1000 * gigabytes / ms[way], 2) for way in ("down", "up")},
        "hidden": round((ms["compute"] + both - ms["step"]) / both, 3),
        "hidden_with_prefetch": round((ms["compute"] + both - ms["step_with_prefetch"]) / both, 3),
    }


def main() -> int:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=25_000_000)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing was checked and nothing measured")
        return NO_GPU
    torch.backends.cuda.matmul.allow_tf32 = False
    differing = wrong(min(options.params, 5_000_000))
    print(json.dumps({"wrong": differing, **figures(options.params, options.steps)}, indent=2))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
