"""Removes the shared memory that runs of this user have left behind; never what a process still uses."""

from __future__ import annotations

import json
from pathlib import Path

from zasgd.net.arena import Found, Leftover, default_folder, regions, sweep


def clean(*, json_output: bool) -> None:
    """Remove every region that nobody uses, and print what was removed and what stays.

    JSON keys: folder, removed and in_use; of each region its name and bytes.
    """
    folder = default_folder()
    removed = sweep(folder)
    kept = regions(folder)
    if json_output:
        print(json.dumps(_as_data(folder, removed, kept)))
    else:
        for line in _lines(folder, removed, kept):
            print(line)


def _as_data(folder: Path, removed: list[Leftover], kept: list[Found]) -> dict[str, object]:
    return {
        "folder": str(folder),
        "removed": [{"name": name, "bytes": num_bytes} for name, num_bytes in removed],
        "in_use": [{"name": name, "bytes": num_bytes} for name, num_bytes, in_use in kept if in_use],
    }


def _lines(folder: Path, removed: list[Leftover], kept: list[Found]) -> list[str]:
    lines = [f"removed {name} ({_mib(num_bytes)})" for name, num_bytes in removed]
    for name, num_bytes, in_use in kept:
        fate = "in use" if in_use else "not removed"
        lines.append(f"{fate}: {name} ({_mib(num_bytes)})")
    return lines or [f"nothing to remove in {folder}"]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
