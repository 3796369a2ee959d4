"""How long a person waits: `zasgd train digits` to the first applied update, and `zasgd --help`.

python benchmarks/startup.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from zasgd.launch.ports import free_port_block
from zasgd.net.client import BrokerError, Client

PATIENCE_S = 120.0


def first_update_s() -> float:
    """Seconds from the start of the command until every shard has applied an update."""
    port = free_port_block(4)
    with tempfile.TemporaryDirectory() as folder:
        began_at = time.monotonic()
        command = [sys.executable, "-m", "zasgd", "train", "digits", "--port", str(port), "--run-dir", f"{folder}/run"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            return _wait_for_update(port, began_at)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _wait_for_update(port: int, began_at: float) -> float:
    with Client(f"127.0.0.1:{port}") as client:
        while time.monotonic() - began_at < PATIENCE_S:
            try:
                report = client.status(1.0)
            except BrokerError:
                continue
            # Workers report with each renewal, several times a second at the beginning of a run.
            if any(worker["steps"] for worker in report["workers"]):
                return time.monotonic() - began_at
            time.sleep(0.02)
    raise SystemExit(f"no update within {PATIENCE_S:.0f} s")


def help_s() -> float:
    """Seconds of `zasgd --help`."""
    began_at = time.monotonic()
    subprocess.run([sys.executable, "-m", "zasgd", "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began_at


def main() -> None:
    """Print medians and ranges as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    result = {}
    for name, measure in (("help_s", help_s), ("first_update_s", first_update_s)):
        found = sorted(measure() for _ in range(repeats))
        result[name] = {"median": round(statistics.median(found), 2), "all": [round(x, 2) for x in found]}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
