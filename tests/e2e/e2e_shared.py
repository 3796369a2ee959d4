"""Jobs whose shared memory lies in a folder of its own, light workers without torch, and what /proc tells of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e_job import MARKER, Job, Process, until

from zasgd.net.arena import default_folder

LIGHT = Path(__file__).with_name("e2e_light.py")


class SharedJob(Job):
    """A job that looks for shared memory in `shm` and nowhere else."""

    def __init__(self, folder: Path, shm: Path) -> None:
        super().__init__(folder)
        self.shm = shm

    def start(self, *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Process:
        return super().start(*arguments, env={**self._env, **(env or {})}, cwd=cwd)

    def light(self, *arguments: object) -> Process:
        """Light workers: see e2e_light.py."""
        name = f"{len(self.processes)}-light"
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            popen = subprocess.Popen(
                [sys.executable, str(LIGHT), self.address, *map(str, arguments)], cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
                env={**os.environ, **self._env, MARKER: self.mark},
            )  # fmt: skip
        self.processes.append(Process(f"light workers {arguments}", popen, out, err))
        return self.processes[-1]

    @property
    def _env(self) -> dict[str, str]:
        return {"ZASGD_SHM_DIR": str(self.shm), "OMP_NUM_THREADS": "1"}

    def regions(self) -> set[str]:
        """The files of shared memory of this job."""
        return {path.name for path in self.shm.glob("zasgd-*")}

    def region_of(self, pid: int) -> str:
        """The one that a worker has mapped, empty if none."""
        maps = Path(f"/proc/{pid}/maps").read_text()
        return next((name for name in self.regions() if f"{self.shm}/{name}\n" in maps), "")

    def expect_nothing_left(self, within_s: float = 5.0) -> None:
        """No process, no port, no shared memory."""
        until(lambda: not self.left(), within_s, "no process is left", lambda: str(self.left()))
        until(self._ports_are_free, within_s, "the ports are free")
        until(lambda: not self.regions(), within_s, "no shared memory is left", lambda: str(self.regions()))


@contextmanager
def shared_job(folder: Path) -> Iterator[SharedJob]:
    """The processes of a test; afterwards none is left, nor a port, nor shared memory."""
    shm = Path(tempfile.mkdtemp(dir=default_folder(), prefix="tests-"))
    try:
        job = SharedJob(folder, shm)
        try:
            yield job
        finally:
            job.close()
    finally:
        shutil.rmtree(shm)


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by the names of /proc/PID/status: VmRSS, RssAnon, RssFile, RssShmem and others."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def own_memory_of(pid: int) -> int:
    """Resident bytes without those that are shared."""
    memory = memory_of(pid)
    return memory["RssAnon"] + memory["RssFile"]


def num_files_of(pid: int) -> int:
    """Descriptors that a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def shards_of(report: dict[str, Any]) -> list[int]:
    """Process ids by number of shard."""
    return [shard["pid"] for shard in sorted(report["shards"], key=lambda shard: int(shard["id"]))]
