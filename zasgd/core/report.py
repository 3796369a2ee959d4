"""What people are told of a run: its state, its progress, its end. Plain values only; decides nothing."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from zasgd.core.membership import Member, State
from zasgd.core.run import Run, who
from zasgd.core.tally import lag_summary


def status(run: Run, now: float) -> dict[str, Any]:
    """The answer to STATUS."""
    evaluators = run.members.of("eval")
    return {
        "run": f"{run.id:08x}",
        "phase": run.phase.value,
        "outcome": run.outcome,
        "seconds": round(now - run.began_at, 3),
        "num_shards": run.config.num_shards,
        "loss": _plain(run.loss.value),
        "samples_per_s": round(run.rate.value, 2),
        "workers": [_worker(run, member, now) for member in run.members.of("worker", *State)],
        "shards": [_shard(member) for member in run.servers()],
        "evaluator": next(({"host": m.host, "pid": m.pid, "phase": m.phase} for m in evaluators), None),
        "ledger": run.books.progress() if run.books else None,
        "lag": lag_summary(run.lags),
        "scores": run.scores,
        "evaluation_error": run.evaluation_error,
        "ends": dict(run.ends),
        "refusals": dict(run.refusals),
    }


def _worker(run: Run, member: Member, now: float) -> dict[str, Any]:
    rate = run.rates.get(member.incarnation)
    live = member.state is State.LIVE
    state = member.phase if live and member.phase else member.state.value
    return {
        **who(member),
        "id": member.number,
        "state": "draining" if member.drain and live else state,
        "steps": member.steps,
        "lag": _whole(member.facts.get("lag", 0)),
        "data_path": member.facts.get("data_path", ""),
        "samples_per_s": _plain(round(rate.value, 2)) if rate else 0.0,
        "lease_s": round(member.lease_until - now, 2),
    }


def _shard(member: Member) -> dict[str, Any]:
    facts = member.facts
    return {
        "id": member.number,
        "pid": member.pid,
        "host": member.host,
        "state": member.phase or member.state.value,
        **{name: _whole(facts.get(name, 0)) for name in ("version", "samples", "bytes", "resident_bytes")},
        "lag": lag_summary(facts.get("lags", Counter())),
        "gap_rmse": _plain(facts.get("gap_rmse", 0.0)),
        "damping": _plain(facts.get("damping", 1.0)),
        "alarms": _whole(facts.get("alarms", 0)),
        "alarm": facts.get("alarm", ""),
    }


def progress(run: Run, now: float) -> dict[str, Any]:
    """The facts of a `progress` event; call it about once a second, since it measures the rate."""
    lags = lag_summary(run.lags)
    return {
        "epoch": run.ledger.epoch,
        "samples": run.settled,
        "samples_total": run.ledger.epochs * run.num_samples,
        "loss": _plain(run.loss.value),
        "samples_per_s": round(run.rate.look(now, run.settled), 2),
        "workers": len(run.members.of("worker")),
        **{f"lag_{name}": value for name, value in lags.items() if name != "p50"},
    }


def summary(run: Run, now: float) -> dict[str, Any]:
    """What the end of a run is told with: samples by state, updates per shard, lag, loss, scores."""
    lags = run.lags
    books = run.books.progress() if run.books else {}
    return {
        "samples": books.get("once", 0) + books.get("torn", 0),
        "torn": books.get("torn", 0),
        "skipped": books.get("skipped", 0),
        "reissued": books.get("reissued", 0),
        "epochs": books.get("epoch", 0),
        "updates": [int(run.shard_facts[k].get("version", 0)) for k in sorted(run.shard_facts)],
        "lag": {**lag_summary(lags), "histogram": {str(k): lags[k] for k in sorted(lags)}},
        "train_loss": _plain(run.loss.value),
        "seconds": round(now - run.began_at, 3),
        "ends": dict(run.ends),
        "scores": run.scores,
        "scores_are_final": run.scores_are_final,
        "evaluation_error": run.evaluation_error,
    }


def _plain(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _whole(value: float) -> int:
    """A count that a peer reported, as one that every answer can hold."""
    return int(min(max(value, 0), 1 << 62))
