"""Finding free loopback ports, and naming who holds one that is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise

import pytest

from zasgd.launch import LaunchError
from zasgd.launch.ports import claim_port_block, free_port_block, port_owner


@pytest.fixture
def base() -> int:
    """The first of twenty free ports, away from the default ones that a run of the user's may hold."""
    return free_port_block(20, start=21000)


def listen(stack: ExitStack, port: int, host: str = "127.0.0.1") -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = stack.enter_context(socket.socket(family))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(1)


def test_a_block_starts_behind_the_last_port_in_its_way(base: int) -> None:
    with ExitStack() as held:
        listen(held, base + 1)
        listen(held, base + 4, host="0.0.0.0")
        assert free_port_block(2, start=base) == base + 2
        assert free_port_block(3, start=base) == base + 5
        assert free_port_block(1, start=base) == base
    assert free_port_block(5, start=base) == base


def test_the_ports_of_a_block_are_free_again_afterwards(base: int) -> None:
    with ExitStack() as held:
        for port in range(base, base + 5):
            listen(held, port)


def test_a_block_never_touches_the_avoided_range() -> None:
    assert free_port_block(3, start=10000, avoid=range(10002, 21000)) >= 21000


def test_no_block_below_the_ephemeral_ports_is_one_clear_line(base: int) -> None:
    with pytest.raises(LaunchError, match=f"^no 3 consecutive free ports on .* from {base} to {base + 1}$"):
        free_port_block(3, start=base, below=base + 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_owner_of_a_port_is_named_by_pid_and_command(base: int, host: str) -> None:
    with ExitStack() as held:
        try:
            listen(held, base, host)
        except OSError as error:
            pytest.skip(f"no {host} here: {error}")
        owner = port_owner(base)
    assert owner is not None
    assert owner.startswith(f"pid {os.getpid()} (")
    assert "python" in owner


def test_a_port_nobody_listens_on_has_no_owner(base: int) -> None:
    assert port_owner(base) is None


# ---- claims ----------------------------------------------------------------------------------------

CLAIMANT = """
import sys
from zasgd.launch.ports import claim_port_block
with claim_port_block(3, start=int(sys.argv[1])) as claim:
    print(claim.base, flush=True)
    sys.stdin.read()
"""


def claimant(stack: ExitStack, start: int) -> subprocess.Popen[str]:
    """Another process that claims three ports from `start` on, prints the first, and keeps them."""
    command = [sys.executable, "-c", CLAIMANT, str(start)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process


def base_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_two_claims_in_one_process_share_no_port(base: int) -> None:
    with claim_port_block(3, start=base) as first, claim_port_block(2, start=base + 1) as second:
        assert (first.base, second.base) == (base, base + 3)
        assert free_port_block(5, start=base) == base, "the ports themselves stay free for whoever claimed them"


def test_a_released_block_can_be_claimed_again(base: int) -> None:
    first = claim_port_block(3, start=base)
    first.release()
    first.release()
    with claim_port_block(3, start=base) as second:
        assert second.base == base
    with claim_port_block(3, start=base) as third:
        assert third.base == base


def test_a_claim_starts_behind_a_port_in_use_and_keeps_nothing_before_it(base: int) -> None:
    with ExitStack() as held:
        listen(held, base + 1)
        with claim_port_block(2, start=base) as claim, claim_port_block(1, start=base) as before:
            assert (claim.base, before.base) == (base + 2, base)


def test_jobs_started_together_claim_blocks_of_their_own(base: int) -> None:
    with ExitStack() as stack:
        jobs = [claimant(stack, base) for _ in range(3)]
        bases = sorted(base_of(job) for job in jobs)
    assert all(later - earlier >= 3 for earlier, later in pairwise(bases)), bases


def test_the_claim_of_a_killed_process_ends_with_it(base: int) -> None:
    with ExitStack() as stack:
        other = claimant(stack, base)
        assert base_of(other) == base
        with claim_port_block(3, start=base) as claim:
            assert claim.base == base + 3
        other.kill()
        other.wait(10)
        with claim_port_block(3, start=base) as claim:
            assert claim.base == base


def test_a_child_does_not_inherit_a_claim(base: int) -> None:
    command = [sys.executable, "-c", "import sys; print('runs', flush=True); sys.stdin.read()"]
    claim = claim_port_block(3, start=base)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"runs\n"  # what closes on exec is closed
        claim.release()
        with claim_port_block(3, start=base) as again:
            assert again.base == base
        child.kill()


def test_no_claimable_block_is_one_clear_line_and_keeps_no_claim(base: int) -> None:
    with (
        claim_port_block(1, start=base + 2),
        pytest.raises(LaunchError, match=f"^no 3 consecutive free ports on .* from {base} to {base + 3}$"),
    ):
        claim_port_block(3, start=base, below=base + 4)
    with claim_port_block(4, start=base) as claim:
        assert claim.base == base
