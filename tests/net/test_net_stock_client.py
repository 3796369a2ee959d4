"""The client that docs/wire.md prints: pyzmq, msgpack and the stock msgpack-numpy package, nothing of ours.

The code under test is the fenced block of that page, taken from there and run.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from net_rig import SMALL, Rig, Stepper, until

from zasgd.core.layout import Layout, TensorSpec

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
SIZE = SMALL.sizes["params"]
PLAIN = [list(row) for row in SMALL.to_plain()]


def printed_code() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return block


@pytest.fixture
def client() -> Iterator[SimpleNamespace]:
    """The names that the printed code defines; every socket it opened is closed afterwards."""
    names: dict[str, Any] = {"__name__": "printed"}
    exec(compile(printed_code(), str(PAGE), "exec"), names)
    yield SimpleNamespace(**names)
    zmq.Context.instance().destroy(0)


def test_the_printed_client_uses_nothing_but_stock_packages() -> None:
    imports = [node for node in ast.walk(ast.parse(printed_code())) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {name.name for node in imports if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    standard = {"hashlib", "json", "secrets", "struct", "time", "collections"}
    assert modules == standard | {"msgpack", "msgpack_numpy", "numpy", "zmq"}


def test_it_joins_seeds_pulls_pushes_is_answered_and_leaves(client: SimpleNamespace) -> None:
    """It trains a whole run alone: eight batches through the relay, each computed on what the shards had."""
    seen: list[np.ndarray] = []
    batches: list[list[int]] = []

    def gradient(flat: np.ndarray, batch: list[int]) -> np.ndarray:
        seen.append(flat.copy())
        batches.append(batch)
        return np.arange(SIZE, dtype=np.float32)

    start = np.linspace(0, 1, SIZE, dtype=np.float32)
    with Rig() as rig:
        client.work(f"tcp://{rig.address}", PLAIN, 64, start, gradient, 8)
        summary = rig.completed()
        assert batches == [[0, b, 8 * b, 8 * b + 8] for b in range(8)]
        expected = start
        for flat in seen:
            assert np.array_equal(flat, expected)
            expected = expected - np.arange(SIZE, dtype=np.float32)
        assert np.array_equal(rig.flat(), expected)
        assert (summary["samples"], summary["torn"], summary["updates"]) == (64, 0, [8, 8])
        (left,) = rig.events("worker_left")
        assert left["worker"] == 0


def test_two_of_it_share_a_run_with_a_worker_of_ours(client: SimpleNamespace) -> None:
    """The first leaves after three batches; the second shows the same layout and hears no seeding order."""
    ones = np.ones(SIZE, np.float32)
    with Rig() as rig:
        for share in (3, 2):
            client.work(f"tcp://{rig.address}", PLAIN, 64, np.zeros(SIZE, np.float32), lambda flat, batch: ones, share)
        rig.worker()
        assert rig.completed()["samples"] == 64
        assert np.array_equal(rig.flat(), -8 * ones)


def test_a_slice_of_several_inline_parts_is_put_together(client: SimpleNamespace) -> None:
    """9 MiB of parameters on one shard come back in three parts of at most 4 MiB."""
    big = Layout((TensorSpec("w", (9 << 18,)),))
    start = np.arange(9 << 18, dtype=np.float32)
    with Rig(num_shards=1, layout=big, num_samples=16) as rig:
        seen: list[np.ndarray] = []

        def gradient(flat: np.ndarray, batch: list[int]) -> np.ndarray:
            seen.append(flat)
            return np.ones_like(flat)

        plain = [list(row) for row in big.to_plain()]
        client.work(f"tcp://{rig.address}", plain, 16, start, gradient, 2)
        rig.completed()
        assert np.array_equal(seen[0], start)
        assert np.array_equal(seen[1], start - 1)


def test_it_works_directly_at_the_shards_own_sockets(client: SimpleNamespace) -> None:
    with Rig() as rig:
        control = client.connect(f"tcp://{rig.address}")
        hello = {"role": "worker", "token": b"direct", "layout": PLAIN, "num_samples": 64}
        head, (welcome,) = client.ask(control, (0, 0, 0), client.HELLO, client.WELCOME, hello)
        me = (head.run, head.worker, head.incarnation)
        assert [f"tcp://{rig.shard(k).address}" for k in range(2)] == welcome["endpoints"]
        shards = [client.connect(endpoint) for endpoint in welcome["endpoints"]]
        cuts = [s.start for s in SMALL.slices("params", 2)] + [SIZE]
        zeros, ones = np.zeros(SIZE, np.float32), np.ones(SIZE, np.float32)
        for k, dealer in enumerate(shards):
            init = {"layout_hash": SMALL.hash, "params": [zeros[cuts[k] : cuts[k + 1]]]}
            client.ask(dealer, me, client.INIT, client.ACK, init, k, 1)
            pulled, _ = client.ask(dealer, me, client.PULL, client.PARAMS, {}, k, 2)
            push = {"layout_hash": SMALL.hash, "grads": [ones[cuts[k] : cuts[k + 1]]], "num_samples": 8}
            flags = client.COMMIT | client.INLINE
            acked, (body,) = client.ask(dealer, me, client.PUSH, client.ACK, push, k, 3, pulled.version, flags)
            assert (pulled.version, acked.version) == (0, 1)
            assert np.array_equal(body["params"][0], -ones[cuts[k] : cuts[k + 1]])
        client.ask(control, me, client.BYE, client.DONE, {})
        until(lambda: rig.events("worker_left"))
        assert rig.relay.dropped.total() == 0, "something went through the relay"


def test_it_says_why_it_was_refused(client: SimpleNamespace) -> None:
    with Rig() as rig:
        first = Stepper(rig)  # its layout is the run's
        other = [["w", [61], "float32", "params", 0], PLAIN[1]]
        with pytest.raises(RuntimeError, match=r"LAYOUT_MISMATCH.*w \[60\] float32.*w \[61\] float32"):
            client.work(f"tcp://{rig.address}", other, 64, np.zeros(96, np.float32), lambda flat, batch: flat, 1)
        first.close()


def test_a_stop_of_the_run_ends_it(client: SimpleNamespace) -> None:
    with Rig() as rig:

        def gradient(flat: np.ndarray, batch: list[int]) -> np.ndarray:
            rig.running.loop.post(lambda now: rig.broker.leave(now, "test"))
            return np.ones_like(flat)

        with pytest.raises(SystemExit, match="the run is interrupted"):
            client.work(f"tcp://{rig.address}", PLAIN, 64, np.zeros(SIZE, np.float32), gradient, 8)
