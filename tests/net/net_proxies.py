"""What stands between two peers in a test: a TCP proxy that is slow or cuts, a ZeroMQ proxy that loses answers.

Decides nothing by itself but what the test told it; each owns one thread, which its `close` ends.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time

import zmq

RESET = struct.pack("ii", 1, 0)
CHUNK = 1 << 16


class TcpProxy:
    """Forwards connections to `port`; at most `bytes_per_s` in each direction of a connection; cuts when told.

    `cut_after` resets all connections when so many bytes have come back from the server since it was set, and swallows
    those bytes: an answer is lost together with its connection.
    """

    def __init__(self, port: int, bytes_per_s: float = float("inf")) -> None:
        self.target = port
        self.bytes_per_s = bytes_per_s
        self.num_connections = self.num_cuts = 0
        self._swallow = -1
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._wake_r, self._wake_w = socket.socketpair()
        self._pairs: list[tuple[_Pipe, _Pipe]] = []
        self._orders: list[str] = []
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset every connection; new ones are taken again."""
        self._order("cut")

    def cut_after(self, num_bytes: int) -> None:
        """Reset every connection once the server has answered that much, and lose that answer."""
        self._swallow = num_bytes

    def close(self) -> None:
        self._order("close")
        self._thread.join(10)

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _order(self, order: str) -> None:
        self._orders.append(order)
        self._wake_w.send(b"x")

    def _run(self) -> None:
        while True:
            pipes = [pipe for pair in self._pairs for pipe in pair]
            now = time.monotonic()
            reads = {pipe.source: pipe for pipe in pipes if pipe.wants_more(now)}
            writes = {pipe.sink: pipe for pipe in pipes if pipe.waiting}
            paced = 0.005 if any(pipe.paced(now) for pipe in pipes) else None
            readable, writable, _ = select.select([self._listener, self._wake_r, *reads], list(writes), [], paced)
            if self._wake_r in readable:
                self._wake_r.recv(4096)
                if not self._obey():
                    break
                continue
            if self._listener in readable:
                self._accept()
            for sock in readable:
                if sock in reads:
                    self._read(reads[sock])
            for sock in writable:
                if writes[sock].sink.fileno() >= 0:
                    writes[sock].flush()
            for pair in [pair for pair in self._pairs if pair[0].broken or pair[1].broken]:
                self._pairs.remove(pair)
                _shut(pair)
        self._listener.close()
        for sock in (self._wake_r, self._wake_w):
            sock.close()

    def _read(self, pipe: _Pipe) -> None:
        if pipe.source.fileno() < 0:
            return
        data = pipe.read()
        if pipe.from_server and self._swallow >= 0:
            self._swallow -= len(data)
            pipe.waiting = b""
            if self._swallow < 0:
                self._reset()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        self.num_connections += 1
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = _Pipe(client, server, self.bytes_per_s, False), _Pipe(server, client, self.bytes_per_s, True)
        self._pairs.append((up, down))

    def _obey(self) -> bool:
        closing = "close" in self._orders
        self._orders.clear()
        self._reset()
        return not closing

    def _reset(self) -> None:
        self.num_cuts += 1
        for pair in self._pairs:
            _shut(pair)
        self._pairs = []


def _shut(pair: tuple[_Pipe, _Pipe]) -> None:
    for sock in (pair[0].source, pair[0].sink):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)  # a reset, not a farewell
        sock.close()


class _Pipe:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, bytes_per_s: float, from_server: bool) -> None:
        self.source, self.sink, self.from_server = source, sink, from_server
        self.waiting = b""
        self.broken = False
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def paced(self, now: float) -> bool:
        return self._free_at > now

    def wants_more(self, now: float) -> bool:
        return not self.waiting and not self.paced(now)

    def read(self) -> bytes:
        try:
            self.waiting = self.source.recv(CHUNK)
        except BlockingIOError:
            return b""
        except OSError:
            self.waiting = b""
        self.broken = not self.waiting
        self._free_at = max(time.monotonic(), self._free_at) + len(self.waiting) / self._bytes_per_s
        return self.waiting

    def flush(self) -> None:
        try:
            sent = self.sink.send(self.waiting)
        except BlockingIOError:
            return
        except OSError:
            self.broken = True
            return
        self.waiting = self.waiting[sent:]


class LossyProxy:
    """A ROUTER in front of a DEALER that hands everything on but a share of the answers."""

    def __init__(self, port: int, share: float, seed: int) -> None:
        self._ctx = ctx = zmq.Context()
        self.lost = self.passed = 0
        self._share, self._rng = share, random.Random(seed)
        self._front, self._back = ctx.socket(zmq.ROUTER), ctx.socket(zmq.DEALER)
        self._stop_r, self._stop_w = ctx.socket(zmq.PAIR), ctx.socket(zmq.PAIR)
        for sock in (self._front, self._back, self._stop_r, self._stop_w):
            sock.linger = sock.sndhwm = sock.rcvhwm = 0
        self._front.bind("tcp://127.0.0.1:0")
        self._back.connect(f"tcp://127.0.0.1:{port}")
        self.port = int(self._front.last_endpoint.decode().rpartition(":")[2])
        self._stop_r.bind(f"inproc://lossy-{self.port}")
        self._stop_w.connect(f"inproc://lossy-{self.port}")
        self._thread = threading.Thread(target=self._run, name="lossy-proxy", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _run(self) -> None:
        poller = zmq.Poller()
        for sock in (self._front, self._back, self._stop_r):
            poller.register(sock, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_r in ready:
                break
            if self._front in ready:
                self._back.send_multipart(self._front.recv_multipart())
            if self._back in ready:
                answer = self._back.recv_multipart()
                if self._rng.random() < self._share:
                    self.lost += 1
                else:
                    self.passed += 1
                    self._front.send_multipart(answer)
        for sock in (self._front, self._back, self._stop_r):
            sock.close(0)

    def close(self) -> None:
        self._stop_w.send(b"")
        self._thread.join(10)
        self._stop_w.close(0)
        self._ctx.term()

    def __enter__(self) -> LossyProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RawZmtp:
    """A TCP connection that speaks just enough ZMTP 3.0 to be a DEALER, and then whatever it likes.

    Framing: https://rfc.zeromq.org/spec/23/
    """

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(10)
        self.sock.connect(("127.0.0.1", port))
        self.sock.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        self._read(64)
        ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        self.sock.sendall(bytes([4, len(ready)]) + ready)
        flags, size = self._read(2)
        assert flags == 4, "no READY"
        self._read(size)

    def send(self, frames: list[bytes]) -> None:
        """A whole message, long frames everywhere."""
        last = len(frames) - 1
        self.sock.sendall(b"".join(self.start_of(len(f), more=i < last) + f for i, f in enumerate(frames)))

    @staticmethod
    def start_of(size: int, *, more: bool) -> bytes:
        """What announces a frame of `size` bytes."""
        return bytes([2 | more]) + size.to_bytes(8, "big")

    def closed_by_peer(self) -> bool:
        """Wait for the end of the connection."""
        try:
            while self.sock.recv(CHUNK):
                pass
        except ConnectionResetError:
            pass
        return True

    def reset(self) -> None:
        """Vanish without a farewell."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            assert more, "the connection ended in the greeting"
            data += more
        return data
