"""Regions of memory that the processes of one host share: files of /dev/shm that every user maps.

Decides who uses a region and when it is garbage. Whoever made or opened one holds a shared lock on its file for as
long as it uses it; the kernel drops the lock when the process dies, however it dies. So a region is garbage exactly
when the exclusive lock is free to take, and whoever finds it so removes it: the last user who leaves, the supervisor
at the end of a run, or `zasgd clean`. Never decides what a region holds nor who may write where, and never uses
multiprocessing.shared_memory, whose tracker removes what others still use.

Forked children of a user (those of a data loader) inherit its lock. They count as the same user, which loses nothing:
they map the memory too, and they end with their parent.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from zasgd.core.node import Share, Unshare
from zasgd.core.region import Array, Region, RegionPlan, SharedMemoryError

PREFIX = "zasgd-"
NAME = re.compile(r"[0-9a-f-]{1,64}")
MAGIC = b"zasgd-r1"
HEADER = struct.Struct("<8sQQ16s")
"""Magic, num_params, num_slots, token; the rest of the region's first page is zero."""
MAX_ATTEMPTS = 100
"""How often a new region may be swept between its making and its lock before we give up."""
_OPEN = os.O_RDWR | os.O_NOFOLLOW
"""To read and write also where reading is enough: so a pipe under the name makes nobody wait."""


class Leftover(NamedTuple):
    """A region that was removed, and how large its file was."""

    name: str
    num_bytes: int


class Found(NamedTuple):
    """A region that lies in the folder, how large its file is, and whether any process uses it."""

    name: str
    num_bytes: int
    in_use: bool


class _Held(NamedTuple):
    fd: int
    plan: RegionPlan
    region: Region


def default_folder() -> Path:
    """$ZASGD_SHM_DIR, else /dev/shm."""
    return Path(os.environ.get("ZASGD_SHM_DIR") or "/dev/shm")


class Arena:
    """The regions that this process has made or opened; used by one thread.

    folder: where the files lie, `default_folder()` when None. Two descriptors are open per region.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = default_folder() if folder is None else folder
        self._held: dict[str, _Held] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_all()

    def create(self, name: str, plan: RegionPlan) -> Region:
        """A new region, zeroed, with every byte reserved: to write into it cannot fail later.

        Raises SharedMemoryError, and then leaves no file.
        """
        path = _path(self._folder, name)
        with _in_one_line(path, plan):
            for _ in range(MAX_ATTEMPTS):
                held = _made(path, plan)
                if held is not None:
                    self._held[name] = held
                    return held.region
        raise SharedMemoryError(f"shared memory {path} is swept as fast as it is made; is `zasgd clean` in a loop?")

    def open(self, name: str, plan: RegionPlan) -> Region:
        """The region that another process of this user has made by the same plan; the same one when asked again.

        Raises SharedMemoryError for anything else.
        """
        path = _path(self._folder, name)
        held = self._held.get(name)
        if held is None:
            with _in_one_line(path, plan):
                held = self._held[name] = _opened(path, plan)
        elif held.plan != plan:
            raise SharedMemoryError(f"{path} is open here as {held.plan}, not as {plan}")
        return held.region

    def close(self, name: str) -> None:
        """This process uses the region no more; who is last removes its file. Not an error if it is not open.

        Views stay valid: the memory itself goes with the last of them.
        """
        held = self._held.pop(name, None)
        if held is not None:
            _leave(_path(self._folder, name), held.fd)

    def close_all(self) -> None:
        """Close every region."""
        for name in tuple(self._held):
            self.close(name)

    def share(self, effect: Share) -> Region | SharedMemoryError:
        """Carry out the effect; an error is returned, since the node decides what to do without the memory."""
        try:
            return (self.create if effect.create else self.open)(effect.name, effect.plan)
        except SharedMemoryError as error:
            return error

    def unshare(self, effect: Unshare) -> None:
        """Carry out the effect."""
        self.close(effect.name)


def sweep(folder: Path) -> list[Leftover]:
    """Remove every region of this user that no process uses, and tell which; none where there is no such folder."""
    removed = []
    for name, path, fd in _files(folder):
        if _alone(fd) and _unlink(path, fd):
            removed.append(Leftover(name, os.fstat(fd).st_size))
    return removed


def regions(folder: Path) -> list[Found]:
    """Every region of this user. A user who leaves at this very moment may leave its file to the next sweep."""
    return [Found(name, os.fstat(fd).st_size, not _alone(fd)) for name, _, fd in _files(folder)]


def _path(folder: Path, name: str) -> Path:
    # The name comes from the network.
    if not NAME.fullmatch(name):
        raise SharedMemoryError(f"{name[:80]!r} is no name of shared memory: 1 to 64 of the characters 0-9 a-f -")
    return folder / f"{PREFIX}{name}"


def _made(path: Path, plan: RegionPlan) -> _Held | None:
    """None when it was swept between its making and its lock."""
    with ExitStack() as undo:
        fd = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        undo.callback(os.close, fd)
        undo.callback(_unlink, path, fd)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if not os.fstat(fd).st_nlink:
            return None
        # Reserved here: where shared memory is too small this is an error, a page missing later is a SIGBUS.
        os.posix_fallocate(fd, 0, plan.num_bytes)
        token = secrets.token_bytes(16)
        os.pwrite(fd, HEADER.pack(MAGIC, plan.num_params, plan.num_slots, token), 0)
        held = _Held(fd, plan, plan.region(_mapped(fd, plan), token))
        undo.pop_all()
    return held


def _opened(path: Path, plan: RegionPlan) -> _Held:
    with ExitStack() as undo:
        fd = os.open(path, _OPEN)
        undo.callback(os.close, fd)
        # Before we wait for the lock: another user may hold it for ever, on a file of his own.
        if not _ours(fd):
            raise SharedMemoryError(f"{path} is not a file of this user")
        fcntl.flock(fd, fcntl.LOCK_SH)
        token = _checked(path, fd, plan)
        held = _Held(fd, plan, plan.region(_mapped(fd, plan), token))
        undo.pop_all()
    return held


def _checked(path: Path, fd: int, plan: RegionPlan) -> bytes:
    """The token in the header of a locked file, which is as its plan says."""
    found = os.fstat(fd)
    if not found.st_nlink:
        raise SharedMemoryError(f"{path} has just been removed")
    if found.st_size != plan.num_bytes:
        raise SharedMemoryError(f"{path} has {found.st_size} bytes, not {plan.num_bytes}: another model or another run")
    magic, num_params, num_slots, token = HEADER.unpack(os.pread(fd, HEADER.size, 0))
    if magic != MAGIC:
        raise SharedMemoryError(f"{path} is not shared memory of this version of zasgd")
    if (num_params, num_slots) != (plan.num_params, plan.num_slots):
        raise SharedMemoryError(
            f"{path} has {num_slots} slots of {num_params} parameters, not {plan.num_slots} of {plan.num_params}"
        )
    return bytes(token)


def _mapped(fd: int, plan: RegionPlan) -> Array:
    memory = mmap.mmap(fd, plan.num_bytes)
    # Without effect where /dev/shm is mounted huge=never, as most are; large pages also come without it where the
    # mount says huge=within_size. Never MADV_DONTFORK: data loaders fork.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _leave(path: Path, fd: int) -> None:
    try:
        if _alone(fd):
            _unlink(path, fd)
    finally:
        # In so many words: views keep the open file, and with it a lock, past the close of its descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _alone(fd: int) -> bool:
    """Take the exclusive lock if no other user has the file. A shared lock on this descriptor is lost either way."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlink(path: Path, fd: int) -> bool:
    """Remove the file `path` if it is still this one; whether it was removed."""
    try:
        if os.path.samestat(path.lstat(), os.fstat(fd)):
            path.unlink()
            return True
    except OSError:  # gone by itself, or the folder lets nobody remove: then the sweep meets it again
        pass
    return False


def _files(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """(name, path, a descriptor for the length of a step) of each file of this user that is named like a region."""
    for path in sorted(folder.glob(f"{PREFIX}*")):
        name = path.name.removeprefix(PREFIX)
        if NAME.fullmatch(name) is None:
            continue
        try:
            fd = os.open(path, _OPEN)
        except OSError:  # gone since, another user's, a link, a folder
            continue
        try:
            if _ours(fd):
                yield name, path, fd
        finally:
            os.close(fd)


def _ours(fd: int) -> bool:
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


@contextmanager
def _in_one_line(path: Path, plan: RegionPlan) -> Iterator[None]:
    """What the operating system refuses, as a SharedMemoryError."""
    try:
        yield
    except OSError as error:
        raise SharedMemoryError(_line(error, path, plan)) from error


def _line(error: OSError, path: Path, plan: RegionPlan) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"shared memory is too small: {_mib(plan.num_bytes)} wanted, {_mib(_free(path.parent))} free in "
            f"{path.parent}; give the container more (docker run --shm-size=8g) or set ZASGD_SHM_DIR to a larger tmpfs"
        )
    if error.errno == errno.EFBIG:
        return f"shared memory {path} of {_mib(plan.num_bytes)} is over the limit on file sizes; raise `ulimit -f`"
    if error.errno == errno.ENOENT:
        return f"there is no shared memory {path}; is the other process on this host, and {path.parent} the same?"
    if error.errno == errno.ELOOP:
        return f"{path} is a symbolic link, not shared memory"
    return f"shared memory {path}: {os.strerror(error.errno or 0)}"


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
