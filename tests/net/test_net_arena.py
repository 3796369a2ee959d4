"""Shared memory between real processes: who sees what, who may open it, and when it is removed."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from zasgd.core.node import Share, Unshare
from zasgd.core.region import PAGE_BYTES, Region, RegionPlan, SharedMemoryError
from zasgd.net.arena import HEADER, Arena, Found, Leftover, default_folder, regions, sweep

DEADLINE_S = 20.0
PLAN = RegionPlan(num_params=1000, num_slots=2)
NAME = "7f3a-2"
PRELUDE = """
import os, sys, traceback
from pathlib import Path
from zasgd.core.region import RegionPlan, SharedMemoryError
from zasgd.net.arena import Arena, regions, sweep
PLAN, NAME, folder = RegionPlan(1000, 2), "7f3a-2", Path(sys.argv[1])
arena = Arena(folder)
"""
INTERPRETER = """
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except SyntaxError:
        exec(line)
        print(flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


class Peer:
    """Another process with an arena of its own, which does what it is told."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", PRELUDE + INTERPRETER, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )

    def tell(self, code: str) -> str:
        """Run one line of Python there; what it is worth, or the error it raised."""
        self.begin(code)
        return self.answer(code)

    def begin(self, code: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(code.encode() + b"\n")

    def answer(self, code: str) -> str:
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert ready, f"no answer to {code!r} within {DEADLINE_S:g} s"
        return self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def cleanup(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on real shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tests-") as path:
        yield Path(path)


@pytest.fixture
def peer(folder: Path) -> Iterator[Callable[[], Peer]]:
    """Starts another process, which is dead when the test ends."""
    with ExitStack() as ends:

        def start() -> Peer:
            started = Peer(folder)
            ends.callback(started.cleanup)
            return started

        yield start


@pytest.fixture
def arena(folder: Path) -> Iterator[Arena]:
    with Arena(folder) as arena:
        yield arena


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {DEADLINE_S:g} s"
        os.sched_yield()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def planted(folder: Path, content: bytes) -> Path:
    path = folder / f"zasgd-{NAME}"
    path.write_bytes(content)
    return path


def as_made(token: bytes = b"t" * 16) -> bytes:
    """The bytes of a region made by PLAN."""
    return HEADER.pack(b"zasgd-r1", 1000, 2, token).ljust(PLAN.num_bytes, b"\0")


# ---- two processes, one memory -----------------------------------------------------------------------


def test_each_process_sees_what_the_other_writes(arena: Arena, peer: Callable[[], Peer]) -> None:
    worker = peer()
    mine = arena.create(NAME, PLAN)
    mine.params[1][:] = np.arange(1000)
    worker.tell("theirs = arena.open(NAME, PLAN)")
    assert worker.tell("float(theirs.params[1].sum())") == "499500.0"
    assert worker.tell("float(theirs.params[0].sum() + theirs.grads[1].sum())") == "0.0"
    worker.tell("theirs.grads[0][999] = 7.5")
    assert mine.grads[0][999] == 7.5
    assert [len(mine.params), len(mine.grads), mine.params[0].size] == [2, 2, 1000]
    assert all(vector.ctypes.data % PAGE_BYTES == 0 for vector in mine.params + mine.grads)


def test_only_who_maps_the_region_can_tell_its_token(arena: Arena, folder: Path, peer: Callable[[], Peer]) -> None:
    worker = peer()
    worker.tell("theirs = arena.create(NAME, PLAN)")
    token = arena.open(NAME, PLAN).token
    assert worker.tell("theirs.token") == repr(token)
    assert len(token) == 16
    assert arena.create("7f3a-3", PLAN).token != token
    assert not any(token.hex() in name for name in names(folder))


def test_the_file_is_for_its_user_only(arena: Arena, folder: Path) -> None:
    arena.create(NAME, PLAN)
    found = (folder / f"zasgd-{NAME}").stat()
    assert (oct(found.st_mode & 0o777), found.st_size) == ("0o600", PLAN.num_bytes)
    assert found.st_blocks * 512 >= PLAN.num_bytes, "not every byte is reserved"


def test_to_open_again_is_the_same_memory(arena: Arena, folder: Path) -> None:
    with Arena(folder) as other:
        arena.create(NAME, PLAN)
        first = other.open(NAME, PLAN)
        assert other.open(NAME, PLAN) is first
        with pytest.raises(SharedMemoryError, match="is open here as"):
            other.open(NAME, RegionPlan(1000, 3))


def test_a_forked_child_writes_into_the_same_memory(arena: Arena) -> None:
    region = arena.create(NAME, PLAN)
    if (child := os.fork()) == 0:
        region.grads[0][0] = 3.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert region.grads[0][0] == 3.0


def test_the_effects_of_a_node(arena: Arena, folder: Path) -> None:
    made = arena.share(Share(NAME, PLAN, create=True))
    with Arena(folder) as other:
        opened = other.share(Share(NAME, PLAN, create=False))
        refused = other.share(Share("0", PLAN, create=False))
    assert isinstance(made, Region) and isinstance(opened, Region) and made.token == opened.token
    assert isinstance(refused, SharedMemoryError)
    arena.unshare(Unshare(NAME))
    arena.unshare(Unshare(NAME))
    assert names(folder) == []


def test_the_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("ZASGD_SHM_DIR", raising=False)
    assert default_folder() == Path("/dev/shm")
    monkeypatch.setenv("ZASGD_SHM_DIR", str(folder))
    with Arena() as arena:
        arena.create(NAME, PLAN)
        assert names(folder) == [f"zasgd-{NAME}"]


# ---- when it goes ------------------------------------------------------------------------------------


def test_whoever_leaves_last_removes_the_file(arena: Arena, folder: Path) -> None:
    mine = arena.create(NAME, PLAN)
    with Arena(folder) as other:
        theirs = other.open(NAME, PLAN)
        arena.close(NAME)
        assert names(folder) == [f"zasgd-{NAME}"]
    assert names(folder) == []
    theirs.params[0][0] = 5.0
    assert mine.params[0][0] == 5.0, "views must outlive the file"


def test_whoever_leaves_removes_no_file_but_his_own(arena: Arena, folder: Path) -> None:
    region = arena.create(NAME, PLAN)
    moved = (folder / f"zasgd-{NAME}").rename(folder / "zasgd-0")
    planted(folder, b"of somebody else")
    arena.close(NAME)
    assert names(folder) == ["zasgd-0", f"zasgd-{NAME}"]
    (folder / f"zasgd-{NAME}").unlink()
    assert moved.exists() and sweep(folder) == [Leftover("0", PLAN.num_bytes)], "locked by one who has left"
    assert region.params[0][0] == 0.0


def test_a_region_survives_the_kill_of_its_maker(arena: Arena, folder: Path, peer: Callable[[], Peer]) -> None:
    worker = peer()
    worker.tell("arena.create(NAME, PLAN).params[0].fill(2)")
    mine = arena.open(NAME, PLAN)
    worker.kill()
    assert sweep(folder) == []
    assert regions(folder) == [Found(NAME, PLAN.num_bytes, in_use=True)]
    mine.params[0][0] += 1
    assert list(mine.params[0][:2]) == [3, 2]
    arena.close(NAME)
    assert names(folder) == []


def test_what_the_killed_left_is_swept(folder: Path, peer: Callable[[], Peer]) -> None:
    workers = [peer(), peer()]
    workers[0].tell("region = arena.create(NAME, PLAN)")
    workers[1].tell("region = arena.open(NAME, PLAN)")
    for worker in workers:
        assert sweep(folder) == []
        worker.kill()
    assert regions(folder) == [Found(NAME, PLAN.num_bytes, in_use=False)]
    assert sweep(folder) == [Leftover(NAME, PLAN.num_bytes)]
    assert names(folder) == []


def test_a_forked_child_keeps_the_region_of_a_killed_worker(folder: Path, peer: Callable[[], Peer]) -> None:
    worker = peer()
    worker.tell("region = arena.create(NAME, PLAN)")
    loader = int(worker.tell("os.fork() or os.read(os.pipe()[0], 1)"))
    worker.kill()
    assert sweep(folder) == []
    os.kill(loader, signal.SIGKILL)
    until(lambda: sweep(folder), "a region without users")
    assert names(folder) == []


def test_a_forked_child_does_not_keep_the_region_of_a_worker_that_leaves(
    arena: Arena, folder: Path, peer: Callable[[], Peer]
) -> None:
    arena.create(NAME, PLAN)
    worker = peer()
    worker.tell("region = arena.open(NAME, PLAN)")
    loader = int(worker.tell("os.fork() or os.read(os.pipe()[0], 1)"))
    try:
        worker.tell("arena.close(NAME)")
        arena.close(NAME)
        assert names(folder) == []
    finally:
        os.kill(loader, signal.SIGKILL)


def test_sweeping_touches_nothing_else(arena: Arena, folder: Path) -> None:
    arena.create(NAME, PLAN)
    others = ["zasgd-UPPER", f"zasgd-{'a' * 65}", "torch-1", "zasgd-"]
    for name in others:
        (folder / name).touch()
    (folder / "zasgd-d1").mkdir()
    (folder / "zasgd-e1").symlink_to(folder / "torch-1")
    os.mkfifo(folder / "zasgd-f1")
    before = names(folder)
    assert sweep(folder) == []
    assert names(folder) == before
    assert regions(folder) == [Found(NAME, PLAN.num_bytes, in_use=True)]
    assert (sweep(folder / "absent"), regions(folder / "absent")) == ([], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_neither_opened_nor_swept(arena: Arena, folder: Path) -> None:
    path = planted(folder, as_made())
    os.chown(path, 1, 1)
    with path.open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)  # the other user holds it for ever: nobody may wait for him
        with pytest.raises(SharedMemoryError, match="is not a file of this user"):
            arena.open(NAME, PLAN)
    assert (sweep(folder), regions(folder)) == ([], [])
    assert path.exists()


def test_a_region_swept_before_its_lock_is_made_again(
    arena: Arena, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, swept = fcntl.flock, []

    def late(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not swept:
            swept.extend([None, *sweep(folder)])
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    arena.create(NAME, PLAN)
    assert swept == [None, Leftover(NAME, 0)]
    assert regions(folder) == [Found(NAME, PLAN.num_bytes, in_use=True)]


def test_a_region_removed_before_the_opener_has_its_lock_is_refused(
    arena: Arena, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.create(NAME, PLAN)
    real = fcntl.flock

    def late(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            arena.close(NAME)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with Arena(folder) as other, pytest.raises(SharedMemoryError, match="has just been removed"):
        other.open(NAME, PLAN)


def test_no_region_is_lost_to_a_sweeper_that_never_rests(arena: Arena, folder: Path, peer: Callable[[], Peer]) -> None:
    sweeper = peer()
    sweeping = "while (folder / 'go').exists(): sweep(folder)"
    (folder / "go").touch()
    garbage = planted(folder, b"")
    sweeper.begin(sweeping)
    until(lambda: not garbage.exists(), "a sweep")
    for i in range(1000):
        arena.create(f"{i:x}", PLAN)
        with Arena(folder) as other:
            other.open(f"{i:x}", PLAN)
            arena.close(f"{i:x}")
    (folder / "go").unlink()
    assert sweeper.answer(sweeping) == ""
    assert names(folder) == []


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "../x", "a/b", "/etc/passwd", ".", "..", "a.b", "A", "g", "a\n", "a" * 300, "١"])
def test_a_name_that_is_none_is_refused(arena: Arena, folder: Path, name: str) -> None:
    for act in (arena.create, arena.open):
        with pytest.raises(SharedMemoryError, match="is no name of shared memory") as refused:
            act(name, PLAN)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
    arena.close(name)
    assert names(folder) == []


def test_a_name_is_taken_once(arena: Arena, folder: Path) -> None:
    arena.create(NAME, PLAN).params[0][0] = 1.0
    with Arena(folder) as other, pytest.raises(SharedMemoryError, match="File exists"):
        other.create(NAME, PLAN)
    assert arena.open(NAME, PLAN).params[0][0] == 1.0
    assert names(folder) == [f"zasgd-{NAME}"]


def test_a_link_under_the_name_is_refused(arena: Arena, folder: Path) -> None:
    target = folder / "precious"
    target.write_bytes(as_made())
    (folder / f"zasgd-{NAME}").symlink_to(target)
    with pytest.raises(SharedMemoryError, match="is a symbolic link"):
        arena.open(NAME, PLAN)
    with pytest.raises(SharedMemoryError, match="File exists"):
        arena.create(NAME, PLAN)
    assert target.read_bytes() == as_made()


def test_the_planted_file_of_these_tests_is_one_that_opens(arena: Arena, folder: Path) -> None:
    planted(folder, as_made(b"0123456789abcdef"))
    assert arena.open(NAME, PLAN).token == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (as_made()[:-1], "has 20479 bytes, not 20480"),
        (as_made() + b"\0", "has 20481 bytes, not 20480"),
        (b"", "has 0 bytes, not 20480"),
        (as_made()[:10], "has 10 bytes, not 20480"),
        (as_made().replace(b"zasgd-r1", b"zasgd-r0"), "is not shared memory of this version"),
        (bytes(PLAN.num_bytes), "is not shared memory of this version"),
    ],
)
def test_a_file_that_is_not_the_region_is_refused(arena: Arena, folder: Path, content: bytes, reason: str) -> None:
    path = planted(folder, content)
    with pytest.raises(SharedMemoryError, match=reason):
        arena.open(NAME, PLAN)
    assert path.read_bytes() == content
    assert sweep(folder) == [Leftover(NAME, len(content))], "a refused file must not stay locked"


def test_a_region_of_another_plan_is_refused_although_it_is_as_large(arena: Arena, folder: Path) -> None:
    other_plan = RegionPlan(1001, 2)
    assert other_plan.num_bytes == PLAN.num_bytes
    arena.create(NAME, PLAN)
    with Arena(folder) as other:
        with pytest.raises(SharedMemoryError, match="has 2 slots of 1000 parameters, not 2 of 1001"):
            other.open(NAME, other_plan)
        assert other.open(NAME, PLAN).params[0].size == 1000


def test_a_pipe_or_a_folder_under_the_name_is_refused_at_once(arena: Arena, folder: Path) -> None:
    os.mkfifo(folder / f"zasgd-{NAME}")
    (folder / "zasgd-0").mkdir()
    with pytest.raises(SharedMemoryError, match="is not a file of this user"):
        arena.open(NAME, PLAN)
    with pytest.raises(SharedMemoryError, match="Is a directory"):
        arena.open("0", PLAN)


def test_what_is_not_there_is_said_in_one_line(arena: Arena, folder: Path) -> None:
    with pytest.raises(
        SharedMemoryError, match=r"there is no shared memory .*7f3a-2; is the other process on this host"
    ):
        arena.open(NAME, PLAN)
    with pytest.raises(SharedMemoryError, match=r"there is no shared memory .*absent"):
        Arena(folder / "absent").create(NAME, PLAN)


# ---- too little of it --------------------------------------------------------------------------------

TOO_LARGE = """
try:
    arena.create(NAME, RegionPlan(100_000))
    print("made")
except SharedMemoryError as error:
    print(error)
print([path.name for path in folder.iterdir()], len(os.listdir("/proc/self/fd")) - BEFORE)
print(arena.create("1", RegionPlan(1000)).params[0].size)
"""
BEFORE = 'BEFORE = len(os.listdir("/proc/self/fd"))\n'


def ran(command: list[str], **options: object) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.splitlines()


def unshare() -> list[str] | None:
    """A command that runs another one with mounts of its own, where this machine allows that."""
    command = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    try:
        probe = ["sh", "-c", "mount -t tmpfs tmpfs /mnt"]
        return command if subprocess.run([*command, *probe], capture_output=True).returncode == 0 else None
    except FileNotFoundError:
        return None


def test_shared_memory_too_small_is_an_error_of_one_line_and_leaves_no_file(folder: Path) -> None:
    command = unshare()
    if command is None:
        pytest.skip("no mount namespaces here")
    mount = 'mount -t tmpfs -o size=64k tmpfs "$2" && exec "$0" -c "$1" "$2"'
    told = ran([*command, "sh", "-c", mount, sys.executable, PRELUDE + BEFORE + TOO_LARGE, str(folder)])
    assert told == [
        f"shared memory is too small: 0.8 MiB wanted, 0.1 MiB free in {folder}; give the container more "
        "(docker run --shm-size=8g) or set ZASGD_SHM_DIR to a larger tmpfs",
        "[] 0",
        "1000",
    ]


def test_a_limit_on_file_sizes_is_an_error_of_one_line_and_leaves_no_file(folder: Path) -> None:
    told = ran(
        [sys.executable, "-c", PRELUDE + BEFORE + TOO_LARGE, str(folder)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)),
    )
    assert told == [
        f"shared memory {folder}/zasgd-{NAME} of 0.8 MiB is over the limit on file sizes; raise `ulimit -f`",
        "[] 0",
        "1000",
    ]


# ---- nothing is left ---------------------------------------------------------------------------------


def test_the_end_of_a_process_removes_nothing_and_warns_of_nothing(arena: Arena, folder: Path) -> None:
    # multiprocessing's resource tracker would unlink the region at this exit, and say so.
    script = PRELUDE + "region = arena.create(NAME, PLAN)\nregion.params[0].fill(9)\n"
    assert ran([sys.executable, "-X", "dev", "-W", "error", "-c", script, str(folder)]) == []
    assert arena.open(NAME, PLAN).params[0][0] == 9
    script = PRELUDE + "region = arena.open(NAME, PLAN)\narena.close(NAME)\narena.create('1', PLAN)\narena.close('1')\n"
    assert ran([sys.executable, "-X", "dev", "-W", "error", "-c", script, str(folder)]) == []
    assert names(folder) == [f"zasgd-{NAME}"]


def test_a_thousand_regions_leave_no_descriptor_and_no_file(folder: Path) -> None:
    before = num_fds()
    with Arena(folder) as arena, Arena(folder) as other:
        for i in range(1000):
            arena.create(f"{i:x}", PLAN)
            other.open(f"{i:x}", PLAN)
            arena.close(f"{i:x}")
            other.close(f"{i:x}")
    assert (num_fds(), names(folder)) == (before, [])


def test_a_refusal_leaves_no_descriptor(arena: Arena, folder: Path) -> None:
    planted(folder, as_made()[:-1])
    before = num_fds()
    for _ in range(10):
        for act in (arena.open, arena.create):
            with pytest.raises(SharedMemoryError):
                act(NAME, PLAN)
    assert num_fds() == before
