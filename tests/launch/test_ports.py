"""Finding free loopback ports, and naming who holds one that is not."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

import pytest

from zasgd.launch import LaunchError
from zasgd.launch.ports import free_port_block, port_owner


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
