"""How fast virtual time passes: simulated events per second, without tensor work, every message through the wire.

python benchmarks/simulator.py [--workers 16] [--repeats 5]

An event is one message, timer or result that a core has handled. The models have 128 parameters, so what is measured is
the cores, the encoder and the simulator: `plain` is asgd on parameters alone, `full` dc-asgd-a with momentum on two
groups and with float and integer buffers. `bare` runs without trace, validation and observer; `validated` adds each
core's validate() after each event; `watched` is what the tests run: with observer and trace too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from zasgd.core.layout import Layout, TensorSpec
from zasgd.core.rules import GroupSpec, RuleSpec
from zasgd.sim.cluster import Cluster, Plan

NUM_PUSHES = 2430
MODELS: dict[str, dict[str, Any]] = {
    "plain": {
        "layout": Layout((TensorSpec("weight", (128,)),)),
        "rule": RuleSpec("asgd"),
        "groups": (GroupSpec(),),
    },
    "full": {},
}
MODES: dict[str, dict[str, Any]] = {
    "bare": {"watches": (), "traced": False, "validate_every": 0},
    "validated": {"watches": (), "traced": False},
    "watched": {},
}


def events_per_s(num_workers: int, model: str, mode: str, num_pushes: int = NUM_PUSHES) -> float:
    """Events per second of this process's CPU time over a run of `num_pushes` batches on two shards."""
    samples = 16 * num_pushes // 2
    plan = Plan(num_workers=num_workers, num_samples=samples, batch_size=16, epochs=2, step_s=0.5, **MODELS[model])
    cluster = Cluster(plan, 1, **MODES[mode])
    began_s = time.process_time()
    cluster.run(1e9)
    took_s = time.process_time() - began_s
    return sum(process.num_events for process in cluster.world.processes.values()) / took_s


def main() -> None:
    """Print medians and ranges as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    found: dict[str, list[float]] = {}
    for model in MODELS:
        events_per_s(asked.workers, model, "watched", 100)  # compiles the kernels
    for _ in range(asked.repeats):  # in turn, so that a busy moment of the machine meets all alike
        for model in MODELS:
            for mode in MODES:
                found.setdefault(f"{model} {mode}", []).append(events_per_s(asked.workers, model, mode))
    result = {
        name: {"median": round(statistics.median(each)), "all": [round(x) for x in sorted(each)]}
        for name, each in found.items()
    }
    print(json.dumps({"workers": asked.workers, "events_per_s": result}, indent=2))


if __name__ == "__main__":
    main()
