"""Evaluations, and how a run ends: the last evaluation, the model on disk, STOP to everybody, figures.

Decides when the evaluator is asked, what happens without one, and how long anybody is waited for. Never settles a
sample: what the ledger says at the end is what the summary says.
"""

from __future__ import annotations

import math

from zasgd.core import report
from zasgd.core.exchange import Exchange, RoundTrip, over_shards
from zasgd.core.membership import Member, State
from zasgd.core.messages import Ack, Evaluate, Observe, Params, Result, StopMsg
from zasgd.core.node import Effect, Note, Save, Send, Stop
from zasgd.core.run import Run, RunPhase

ASK_AGAIN_S = 2.0
LOOK_EVERY_S = 0.25
STOP_AGAIN_S = 0.5
EVALUATOR_WAIT_S = 60.0
SAVE_WAIT_S = 60.0
INTERRUPTED_WAIT_S = 2.0
GOODBYE_S = 2.0


class Ending:
    """Asks for evaluations while the run goes on, and brings it to its end."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._evaluation: Evaluate | None = None
        self._num_orders = 0
        self._finish_by = math.inf
        self._saving: Exchange | None = None

    @property
    def _interrupted(self) -> bool:
        return self.run.outcome == "interrupted"

    # ---- evaluations ------------------------------------------------------------------------------

    def evaluate(self, now: float, epoch: int, *, final: bool) -> list[Effect]:
        """Have the parameters scored; a newer order replaces one that has no answer yet."""
        self._num_orders += 1
        self._evaluation = Evaluate(
            run=self.run.id, seq=self._num_orders, epoch=epoch, final=final, interrupted=self._interrupted
        )
        return self.ask_evaluator(now)

    def ask_evaluator(self, now: float) -> list[Effect]:
        """Send the order that is out, if there is one and an evaluator; repeated until answered."""
        evaluators = self.run.members.of("eval")
        if self._evaluation is None or not evaluators:
            return []
        self.run.timers.set("evaluate", now + ASK_AGAIN_S)
        return [Send(evaluators[0].peer, self._evaluation)]

    def result(self, now: float, msg: Result) -> list[Effect]:
        """Take the answer to the order that is out; after the final one everybody may stop."""
        order = self._evaluation
        if order is None or msg.seq != order.seq:
            return []
        self._evaluation = None
        self.run.timers.clear("evaluate")
        scores = {str(k)[:40]: v for k, v in (msg.scores or {}).items() if type(v) in (int, float, str)}
        if scores and "error" not in scores:
            self.run.scores, self.run.scores_are_final = scores, order.final
        self.run.evaluation_error = str(scores.get("error", ""))
        note = Note("evaluated", {"epoch": order.epoch, "samples": self.run.settled, "final": order.final, **scores})
        if not order.final:
            return [note]
        return [note, *(self._save(now) if "error" in scores else self.stop_all(now))]

    # ---- the end ----------------------------------------------------------------------------------

    def finish(self, now: float, outcome: str) -> list[Effect]:
        """No more grants; the last evaluation, or without an evaluator the parameters as they are; then STOP."""
        run = self.run
        run.outcome = outcome
        run.phase = RunPhase.FINISHING
        self._finish_by = now + (INTERRUPTED_WAIT_S if self._interrupted else EVALUATOR_WAIT_S)
        run.timers.set("finish", now + LOOK_EVERY_S)
        if not run.open:
            return self.stop_all(now)
        return self.evaluate(now, max(0, run.ledger.epoch - (1 if run.ledger.complete else 0)), final=True)

    def on_finish_timer(self, now: float) -> list[Effect]:
        """Is there still an evaluator to wait for?"""
        if self.run.phase is not RunPhase.FINISHING or self._saving is not None or self._evaluation is None:
            return []
        self.run.timers.set("finish", now + LOOK_EVERY_S)
        present = bool(self.run.members.of("eval"))
        if self._interrupted:
            waits = present and now < self._finish_by
        else:
            waits = present or (self.run.config.wants_evaluator and now < self._finish_by)
        return [] if waits else self._save(now)

    def _save(self, now: float) -> list[Effect]:
        """Without an evaluator the broker's side writes the parameters."""
        run = self.run
        self._evaluation = None
        peers = {m.number: m.peer for m in run.members.of("server")}
        if len(peers) < run.config.num_shards:
            return self.stop_all(now)
        self._num_orders += 1
        seq = self._num_orders
        requests = over_shards(
            run.config.num_shards, peers.__getitem__, lambda k: [Observe(run=run.id, shard=k, seq=seq, whole=True)]
        )
        self._saving = Exchange(now, seq, requests, RoundTrip())
        run.timers.set("save_over", now + (INTERRUPTED_WAIT_S if self._interrupted else SAVE_WAIT_S))
        return self._saving.start()

    def observed(self, now: float, msg: Params | Ack) -> list[Effect]:
        """Part of a shard's parameters, asked for by `_save`."""
        saving, layout = self._saving, self.run.layout
        if saving is None or layout is None:
            return []
        saving.on_reply(now, msg)
        if not saving.settled:
            return []
        self._saving = None
        return [Save("params", {"layout": layout, "pieces": saving.pieces(layout)}), *self.stop_all(now)]

    def on_save_over_timer(self, now: float) -> list[Effect]:
        """The shards had their time."""
        if self._saving is None:
            return []
        self._saving = None
        return [Note("save_failed", {"reason": "the shards did not answer"}), *self.stop_all(now)]

    def fail(self, now: float, reason: str) -> list[Effect]:
        """The run cannot go on."""
        self.run.outcome, self.run.exit_code = "failed", 3
        return [Note("run_failed", {"reason": reason, **report.summary(self.run, now)}), *self.stop_all(now, reason)]

    def stop_all(self, now: float, reason: str = "") -> list[Effect]:
        """STOP to every member; the broker follows when they have said BYE, or after GOODBYE_S."""
        run = self.run
        run.phase = RunPhase.STOPPING
        self._saving = self._evaluation = None
        run.timers.clear_all()
        run.timers.set("goodbye", now + GOODBYE_S)
        return self.order_stop(now, reason) + self.stop_if_alone(now)

    def order_stop(self, now: float, reason: str = "") -> list[Effect]:
        """Tell whoever is left."""
        run = self.run
        run.timers.set("stop", now + STOP_AGAIN_S)
        order = StopMsg(
            run=run.id,
            reason=reason or f"the run is {run.outcome}",
            code=0 if self._interrupted else run.exit_code,
            interrupted=self._interrupted,
        )
        return [Send(member.peer, order) for member in self._left()]

    def stop_if_alone(self, now: float) -> list[Effect]:
        """Once everybody has said BYE, with last figures, nothing is left to wait for."""
        return [] if self._left() else self.stop(now)

    def stop(self, now: float) -> list[Effect]:
        """The end, told with the figures of the run."""
        run = self.run
        if run.phase is RunPhase.STOPPED:
            return []
        run.phase = RunPhase.STOPPED
        told: list[Effect] = []
        if run.outcome != "failed":
            told = [Note(f"run_{run.outcome}", report.summary(run, now))]
        return [*told, Stop(f"the run is {run.outcome}", run.exit_code)]

    def _left(self) -> list[Member]:
        states = (State.ADMITTING, State.LIVE)
        return [m for role in ("worker", "eval", "server") for m in self.run.members.of(role, *states)]

    # ---- the node's timers ------------------------------------------------------------------------

    def on_timer(self, now: float) -> list[Effect]:
        """Doubt the shards' answers to `_save`."""
        return self._saving.on_timer(now) if self._saving else []

    def next_deadline(self) -> float:
        """The earliest such doubt."""
        return self._saving.next_deadline() if self._saving else math.inf
