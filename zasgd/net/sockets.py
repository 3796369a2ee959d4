"""Every ZeroMQ socket option of zasgd, each with the fault that it prevents.

No ROUTING_ID is ever set: two DEALERs under one id make zombies (libzmq#4407, #4503); identity travels in F0. Send and
receive buffers are left to the kernel's own tuning (libzmq#2338).
"""

from __future__ import annotations

import re

import zmq

from zasgd.core.codec import MAX_FRAME_BYTES, MAX_INLINE_BODY_BYTES

DEFAULT_PORT = 7470
DEFAULT_BROKER = f"127.0.0.1:{DEFAULT_PORT}"
CONTROL_HWM = 1000
CONNECT_WAIT_MS = 200
MAX_INLINE_MESSAGE_BYTES = MAX_INLINE_BODY_BYTES + 64 * 1024
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + 64 * 1024


class AddressError(ValueError):
    """An address that cannot be used: not HOST:PORT, or beyond loopback without consent."""


class BindError(OSError):
    """A port that is taken or a host that is not ours; `port` names it."""

    def __init__(self, address: str, port: int, why: str) -> None:
        super().__init__(f"cannot listen on {address}: {why}")
        self.address = address
        self.port = port


def context(num_shards: int = 1) -> zmq.Context[zmq.Socket[bytes]]:
    """A context of this process; contexts do not survive a fork (pyzmq#1049), so none is shared."""
    ctx: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=max(1, min(4, num_shards // 2)))
    ctx.set(zmq.MAX_SOCKETS, 65536)
    return ctx


def router(ctx: zmq.Context[zmq.Socket[bytes]], address: str, *, control: bool) -> zmq.Socket[bytes]:
    """A bound ROUTER that answers whoever asks; raises BindError. `address` is HOST:PORT, port 0 picks one."""
    sock = ctx.socket(zmq.ROUTER)
    _common(sock, control)
    # A departed peer is EHOSTUNREACH instead of silence; sends use DONTWAIT only (libzmq#2348).
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        sock.bind(f"tcp://{address}")
    except zmq.ZMQError as e:
        sock.close(0)
        _, port = split_address(address)
        in_use = e.errno == zmq.EADDRINUSE
        raise BindError(address, port, "the port is in use" if in_use else f"{zmq.strerror(e.errno)}") from None
    return sock


def dealer(ctx: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, control: bool) -> zmq.Socket[bytes]:
    """A DEALER that dials `endpoint` (tcp://HOST:PORT) and redials for ever; raises AddressError."""
    sock = ctx.socket(zmq.DEALER)
    _common(sock, control)
    sock.setsockopt(zmq.IMMEDIATE, 1)  # without it a DEALER hoards messages for a peer that is not there
    sock.setsockopt(zmq.RECONNECT_IVL, 100)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as e:
        sock.close(0)
        raise AddressError(f"cannot dial {endpoint[:80]!r}: {zmq.strerror(e.errno)}") from None
    return sock


def await_connection(sock: zmq.Socket[bytes]) -> None:
    """Give a fresh DEALER a moment: until it is connected it drops what is sent, and a retry costs half a second."""
    sock.poll(CONNECT_WAIT_MS, zmq.POLLOUT)


def _common(sock: zmq.Socket[bytes], control: bool) -> None:
    hwm = CONTROL_HWM if control else 0  # data is bounded by the push window; a reached mark loses messages
    sock.setsockopt(zmq.SNDHWM, hwm)
    sock.setsockopt(zmq.RCVHWM, hwm)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_INLINE_MESSAGE_BYTES)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    # Heartbeat timers reset only after a whole frame (libzmq#2709): longer than four of our largest at 1 MiB/s.
    sock.setsockopt(zmq.HEARTBEAT_IVL, 3000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 16000)
    sock.setsockopt(zmq.HEARTBEAT_TTL, 30000)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)


def linger_for_goodbye(sock: zmq.Socket[bytes]) -> None:
    """Let the last messages out when the socket closes."""
    sock.setsockopt(zmq.LINGER, 2000)


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT -> (host, port); a bare port means loopback, a bare host the default port. Raises AddressError."""
    text = address.removeprefix("tcp://")
    if text.isascii() and text.isdecimal():
        text = f"127.0.0.1:{text}"
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(DEFAULT_PORT))
    host = host.strip("[]") if host.startswith("[") else host
    if not re.fullmatch(r"[A-Za-z0-9._*-]+", host) or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise AddressError(f"{address!r} is not HOST:PORT, for example {DEFAULT_BROKER}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """The host can be reached from this machine only."""
    return host == "localhost" or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def check_bind(address: str, *, insecure: bool) -> tuple[str, int]:
    """The parts of an address to listen on; beyond loopback only with `insecure`. Raises AddressError."""
    host, port = split_address(address)
    if not is_loopback(host) and not insecure:
        raise AddressError(
            f"{address} can be reached from other machines and nothing is encrypted or authenticated yet: "
            "add --insecure if the network is trusted"
        )
    return host, port
