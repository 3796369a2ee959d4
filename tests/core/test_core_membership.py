"""Membership: the course of a life is a table, ids are stable, leases end it, tables shrink back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zasgd.core.membership import TRANSITIONS, Event, Member, Membership, State
from zasgd.core.node import InvariantError

LEASE_S = 10.0


def joined(members: Membership, now: float = 0.0, name: str = "", role: str = "worker") -> Member:
    """A new member in ADMITTING."""
    number = members.worker_id(name) if role == "worker" else 0
    token = f"{role}{members.num_incarnations}".encode()
    return members.join(now, role, number, token, "peer", name, "host", 4711)


def live(members: Membership, now: float = 0.0, name: str = "", role: str = "worker") -> Member:
    """A new member that is admitted."""
    member = joined(members, now, name, role)
    members.step(member, Event.ADMITTED)
    return member


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_step_follows_the_table_and_no_other_is_possible(state: State, event: Event) -> None:
    members = Membership(LEASE_S)
    member = joined(members)
    member.state = state
    if (state, event) in TRANSITIONS:
        assert members.step(member, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(InvariantError, match="no transition"):
            members.step(member, event)


def test_a_whole_life() -> None:
    members = Membership(LEASE_S)
    member = joined(members)
    assert members.of("worker") == [] and members.by_token(member.token) is member
    members.step(member, Event.ADMITTED)
    assert members.of("worker") == [member]
    members.step(member, Event.LEFT)
    assert member.end is Event.LEFT and members.of("worker") == []
    assert members.get(member.incarnation) is member, "remembered until every shard has answered"
    members.step(member, Event.FENCED)
    assert members.get(member.incarnation) is None and members.by_token(member.token) is None
    members.validate()


def test_a_name_keeps_its_id_and_a_nameless_worker_gets_a_fresh_one() -> None:
    members = Membership(LEASE_S)
    assert [members.worker_id(n) for n in ("ann", "", "bob", "", "ann", "bob")] == [0, 1, 2, 3, 0, 2]


def test_incarnations_are_never_reused() -> None:
    members = Membership(LEASE_S)
    seen = set()
    for _ in range(50):
        member = live(members, name="ann")
        assert member.incarnation not in seen
        seen.add(member.incarnation)
        members.step(member, Event.EXPELLED)
        members.step(member, Event.FENCED)
    assert len(members) == 0


def test_a_hundred_short_lives_leave_nothing_behind() -> None:
    """torchft#63: start and kill 100 short workers; the tables shrink back."""
    members = Membership(LEASE_S)
    for _ in range(100):
        member = live(members)
        members.step(member, Event.LEASE_RAN_OUT)
        members.step(member, Event.FENCED)
    assert len(members) == 0 and not members._by_token and not members._ids_by_name


def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    members = Membership(LEASE_S)
    silent, lively = live(members), live(members)
    members.renew(9.0, lively, steps=1, phase="computing")
    assert members.next_due() == 10.0
    assert members.due(9.99) == []
    assert members.due(10.0) == [(silent, Event.LEASE_RAN_OUT)]
    members.step(silent, Event.LEASE_RAN_OUT)
    assert members.due(18.9) == []
    assert members.due(19.0) == [(lively, Event.LEASE_RAN_OUT)]


def test_renewing_without_progress_for_six_leases_is_being_hung() -> None:
    members = Membership(LEASE_S)
    member = live(members)
    for now in range(2, 62, 2):
        members.renew(float(now), member, steps=1, phase="computing")
        assert members.due(float(now)) == []
    members.renew(63.0, member, steps=1, phase="computing")
    assert members.due(63.0) == [(member, Event.HUNG)]


def test_waiting_for_work_is_not_being_hung_and_slow_steps_are_given_time() -> None:
    members = Membership(LEASE_S)
    idle, slow = live(members), live(members)
    slow.facts["step_s"] = 60.0
    for now in range(0, 500, 5):
        members.renew(float(now), idle, steps=0, phase="idle")
        members.renew(float(now), slow, steps=0, phase="computing")
        assert members.due(float(now)) == []


def test_time_that_the_broker_itself_lost_is_given_back_to_all() -> None:
    members = Membership(LEASE_S)
    member = live(members)
    members.extend_all(30.0, 20.0)
    assert members.due(30.0) == []
    assert member.lease_until >= 40.0


def test_a_worker_is_found_by_name_before_number() -> None:
    members = Membership(LEASE_S)
    zero = live(members, name="1")
    one = live(members, name="bob")
    assert members.find("1") is zero and members.find("bob") is one and members.find("0") is zero
    assert members.find("carol") is None


def test_members_of_a_process_are_found_until_they_have_ended() -> None:
    members = Membership(LEASE_S)
    member = live(members)
    assert members.by_process("host", 4711) == [member] and members.by_process("other", 4711) == []
    members.step(member, Event.LEFT)
    assert members.by_process("host", 4711) == []


def test_two_live_incarnations_under_one_id_are_a_contradiction() -> None:
    members = Membership(LEASE_S)
    live(members, name="ann")
    live(members, name="ann")
    with pytest.raises(InvariantError, match="share an id"):
        members.validate()


@given(st.lists(st.tuples(st.sampled_from(list(Event)), st.integers(0, 5)), max_size=80))
def test_whatever_happens_the_tables_agree(events: list[tuple[Event, int]]) -> None:
    members = Membership(LEASE_S)
    for event, which in events:
        joined(members)
        everybody = list(members.members.values())
        member = everybody[which % len(everybody)]
        if (member.state, event) in TRANSITIONS:
            members.step(member, event)
        members.validate()
        assert len(members) <= members.num_incarnations
