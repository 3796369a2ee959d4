"""`make demo`: the story it tells, and that it is true."""

from __future__ import annotations

import re

from e2e_counting import events_of, expect_complete_epochs
from e2e_job import Job


def test_the_demo_tells_how_a_visitor_came_and_was_killed_and_nothing_was_lost(job: Job) -> None:
    command = job.start("demo", "--json", "--run-dir", job.run_dir)
    assert command.ends(90.0) == 0, command
    summary = command.result()
    assert summary["samples"] == 12 * 1297
    assert summary["skipped"] == 0
    assert summary["test_accuracy"] > 0.9
    expect_complete_epochs(job.run_dir, 12, 1297)

    story = [line for line in command.stderr.splitlines() if "fourth worker joins" in line or "kill -9" in line]
    assert len(story) == 2, command.stderr
    assert "nothing missing, nothing repeated" in command.stderr
    (visitor,) = events_of(job.run_dir, "worker_lost")
    assert f"(pid {visitor['pid']})" in story[0]
    told = re.search(rf"kill -9 {visitor['pid']}: the newcomer dies after (\d+) pushes", story[1])
    # It is killed as soon as the broker reports the 20th push; how many more there were is a matter of load.
    assert told is not None and int(told[1]) >= 20, story[1]
    joined = {e["name"]: e["t"] for e in events_of(job.run_dir, "worker_joined")}
    second_epoch_at = events_of(job.run_dir, "epoch_completed")[1]["t"]
    assert joined[visitor["name"]] > second_epoch_at
    assert len(joined) == 4
    job.expect_nothing_left()
