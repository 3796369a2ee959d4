"""`benchmarks/peers.py`: its table, the page that it writes, and peers that cannot be had."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "peers.py"


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_peers", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_peers"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_table_stands_between_the_markers_and_the_rest_of_the_page_stays(peers: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"# Title\n\n{peers.BEGIN}\nold\n{peers.END}\n\nThe end.\n")
    for _ in range(2):
        peers.write("| new |", page)
        assert page.read_text() == f"# Title\n\n{peers.BEGIN}\n| new |\n{peers.END}\n\nThe end.\n"


def test_a_page_that_is_not_there_is_made_and_one_without_markers_refused(peers: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    peers.write("| new |", page)
    assert page.read_text() == f"{peers.BEGIN}\n| new |\n{peers.END}\n"
    page.write_text("# Title\n")
    with pytest.raises(SystemExit, match="put these two lines"):
        peers.write("| new |", page)
    assert page.read_text() == "# Title\n"


def test_the_page_of_this_repository_has_the_markers(peers: ModuleType) -> None:
    told = peers.PAGE.read_text()
    assert told.count(peers.BEGIN) == told.count(peers.END) == 1 and told.index(peers.BEGIN) < told.index(peers.END)


def test_our_rows_tell_how_many_times_a_peers_rate_they_reach(peers: ModuleType) -> None:
    ours, slow = peers.Row("ours", ()), peers.Row("peer", (), peers.GLOO)
    ours.found += [{"steps_per_s": rate, "gb_per_s": rate / 5} for rate in (40.0, 20.0, 30.0)]
    slow.found += [{"steps_per_s": 10.0, "gb_per_s": 2.0}]
    *_, first, second = peers.table([ours, slow]).splitlines()
    assert first == "| ours | 30.0 (20.0 - 40.0) | 6.00 | 3.0 |"
    assert second == "| peer | 10.0 (10.0 - 10.0) | 2.00 |  |"


def test_a_program_that_fails_is_a_row_that_says_why_and_is_not_tried_again(peers: ModuleType, tmp_path: Path) -> None:
    row = peers.Row("broken", ("-c", "import sys; sys.exit('no such thing')"))
    for _ in range(2):
        row.measure(tmp_path)
    assert row.why_not == "ended with exit code 1: no such thing" and not row.found
    assert peers.table([row]).splitlines()[-1] == "| broken | ended with exit code 1: no such thing |  |"


def test_a_program_whose_figures_cannot_be_read_is_such_a_row_too(peers: ModuleType, tmp_path: Path) -> None:
    figures = {"steps_per_s": 2.5, "more": [0] * 300}
    fine, chatty = (peers.Row("row", ("-c", f"print({told!r})")) for told in (json.dumps(figures), "hi"))
    fine.measure(tmp_path), chatty.measure(tmp_path)
    assert fine.found == [figures]
    assert chatty.why_not == "printed no figures but hi"


def test_packages_without_a_python_that_is_old_enough_are_a_reason_too(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda name: None)
    row = peers.Row("ancient", (), peers.Environment("ancient", ("thing",), newest=(3, 8)))
    row.measure(tmp_path)
    assert row.why_not == "needs a Python up to 3.8, and there is none here"


def test_a_program_that_starts_others_leaves_none_of_them(peers: ModuleType) -> None:
    starts = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL);"
        "print(child.pid)"
    )
    pid = int(peers.output_of([sys.executable, "-c", starts]))
    give_up_at = time.monotonic() + 10.0
    while is_running(pid) and time.monotonic() < give_up_at:
        pass
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Neither gone nor waiting to be collected by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
