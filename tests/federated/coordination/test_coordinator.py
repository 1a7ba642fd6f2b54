"""Rounds, quorums, lost nodes and late replies, one situation at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.federated.coordination.worlds import World, update_of

from arclight.federated.coordination import events as ev
from arclight.federated.coordination.coordinator import Coordinator
from arclight.federated.coordination.events import EvaluatePlan, FitPlan
from arclight.federated.coordination.records import ClientFailed, RoundEvaluated, UpdateAccepted, UpdateRefused
from arclight.federated.coordination.settings import Buffered, Sampling, Streaming, Waiting
from arclight.federated.errors import FederatedError
from arclight.federated.privacy.settings import SecureSum
from arclight.federated.protocol import (
    ActiveWork,
    Close,
    Evaluated,
    Failed,
    Heartbeat,
    HeldRound,
    Join,
    Leave,
    Receipt,
    Wait,
    WorkRequest,
)
from arclight.federated.settings import Federation


def world(clients: Any = ("a", "b", "c", "d"), **settings: Any) -> World:
    count = clients if isinstance(clients, int) else len(clients)
    return World(Federation(**{"clients": count, "rounds": 2, "local_steps": 5} | settings), clients).begin()


def test_a_run_of_four_clients_on_two_nodes() -> None:
    run = world(evaluate_every=1)
    first, second = run.node("first"), run.node("second")
    while run.ended is None:
        assert first.run() + second.run() > 0
    assert run.ended == ev.RunOver(why="all 2 rounds are done", failed=False)
    assert run.closed() == {1: ("a", "b", "c", "d"), 2: ("a", "b", "c", "d")}
    assert [(fold.round, fold.clock, len(fold.updates)) for fold in run.folds] == [(1, 5, 4), (2, 10, 4)]
    assert [r.round for r in run.journal if isinstance(r, RoundEvaluated)] == [0, 1, 2]
    assert isinstance(first.take(), Close)


def test_a_plan_describes_the_fit() -> None:
    run = world(waiting=Waiting(deadline_s=60.0))
    node = run.node("n")
    run.pass_(1.0)
    plan = node.take()
    assert isinstance(plan, FitPlan)
    assert (plan.round, plan.base, plan.clock, plan.steps, plan.fragment) == (1, "weights 0", 0, 5, None)
    assert plan.deadline_s == pytest.approx(59.0)
    assert plan.seed == run.coordinator.sampler.seed_of(1, plan.client)


def test_updates_fold_in_the_order_of_the_clients_not_of_their_arrival() -> None:
    run = world(rounds=1)
    node = run.node("n", "abcd")
    for _ in range(4):
        node.take()
    for client in "cadb":
        assert node.deliver(client).accepted
    assert [update.client for update in run.folds[0].updates] == ["a", "b", "c", "d"]


def test_a_work_request_is_held_until_there_is_work() -> None:
    run = world(clients=["a"])
    run.eager = False
    node = run.node("n")
    node.take()
    request = node.hold(wait=20.0)
    run.pass_(1.0)
    node.deliver("a")
    assert request not in run.answers
    run.tell(run.committed(run.folds[-1]))
    assert isinstance(run.answers[request], FitPlan)


def test_a_held_work_request_is_answered_with_the_clients_that_are_missing() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(heartbeat_interval_s=10.0))
    first, second = run.node("first", "a"), run.node("second", "b")
    first.run()
    second.take()
    request = first.hold(wait=4.0)
    run.pass_(5.0)
    plan = run.answers[request]
    assert isinstance(plan, Wait)
    assert plan.waiting_for == "round 1: 1 of 2 updates; waiting for b (node second, given)"


def test_a_quorum_closes_a_round_after_its_grace() -> None:
    run = world(waiting=Waiting(quorum=0.5, grace_s=3.0, heartbeat_interval_s=100.0))
    node = run.node("n", "abcd")
    for _ in "abcd":
        node.take()
    node.deliver("a")
    run.pass_(50.0)
    node.deliver("b")
    run.pass_(2.0)
    node.deliver("d")
    run.pass_(0.9)
    assert run.closed() == {}
    run.pass_(0.2)
    assert run.closed() == {1: ("a", "b", "d")}
    late = node.deliver("c", 1)
    assert (late.accepted, late.reason, late.committed) == (False, "stale", 1)


def test_a_straggler_is_cancelled() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(quorum=0.5, grace_s=0.0))
    slow, quick = run.node("slow", "a"), run.node("quick", "b")
    slow.take(), quick.take()
    quick.deliver("b")
    assert run.closed() == {1: ("b",)}
    assert [(one.client, one.round) for one in slow.beat().cancel] == [("a", 1)]
    assert slow.beat().cancel == ()
    plan = slow.take()
    assert isinstance(plan, FitPlan)
    assert (plan.client, plan.round) == ("a", 2)


def test_a_deadline_closes_with_a_quorum_and_asks_again_without_one() -> None:
    waiting = Waiting(quorum=0.75, grace_s=1000.0, deadline_s=10.0, heartbeat_interval_s=1000.0, retries=1)
    run = world(waiting=waiting)
    node = run.node("n", "abcd")
    for _ in "abcd":
        node.take()
    for client in "abc":
        node.deliver(client)
    run.pass_(10.1)
    assert run.closed() == {1: ("a", "b", "c")}
    node.work.clear()
    node.beat()
    run.pass_(10.1)  # of round 2 there is nothing
    assert run.coordinator.state.open[2].attempt == 1
    run.pass_(10.1)
    assert run.ended is not None
    assert run.ended.failed
    assert "round 2 has 0 of the 3 updates" in run.ended.why
    assert "not heard from: a (queued at node n)" in run.ended.why


def test_a_failing_client_is_not_asked_for_ever_and_the_run_gives_the_reason() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(retries=5))
    node = run.node("n", "ab")
    node.take()
    node.fail("a", error="no such column: x")
    assert run.ended is not None
    assert run.ended.failed
    assert run.ended.why == (
        "round 1 has 0 of the 2 updates that its quorum needs; failed: a (node n says: no such column: x); "
        "no others could be asked: mend that, or let rounds close with fewer updates (waiting.quorum, now 0.75)"
    )


def test_failures_that_may_pass_are_tried_again_a_few_times() -> None:
    run = world(clients=["a"], rounds=1, waiting=Waiting(attempts=3, retries=0))
    node = run.node("n", "a")
    for _ in range(2):
        assert isinstance(node.take(), FitPlan)
        node.fail("a", again=True, error="disk full")
        assert run.ended is None
    assert isinstance(node.take(), FitPlan)
    node.fail("a", again=True, error="disk full")
    assert run.ended is not None
    assert "disk full" in run.ended.why


def test_failures_up_to_the_quorum_are_tolerated_in_each_round() -> None:
    run = world(rounds=3, waiting=Waiting(quorum=0.5))
    node = run.node("n", "abcd")
    for round in (1, 2, 3):
        for _ in range(2):
            plan = node.take()
            assert isinstance(plan, FitPlan)
            node.fail(plan.client)
        assert node.take() is not None
        assert node.take() is not None
        for client in list(node.work):
            node.deliver(client)
        assert len(run.closed()[round]) == 2
    assert run.ended == ev.RunOver(why="all 3 rounds are done", failed=False)


def test_a_failed_run_is_taken_up_again() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(retries=0))
    node = run.node("n", "ab")
    node.take()
    node.fail("a")
    assert run.ended is not None
    run.ended = None
    run.restart()
    run.pass_(1.0)
    node = run.node("n", "ab")
    assert node.run() == 4
    assert run.ended == ev.RunOver(why="all 2 rounds are done", failed=False)


def test_the_same_update_may_come_twice_and_another_one_may_not() -> None:
    run = world(clients=["a", "b"])
    node = run.node("n", "ab")
    node.take()
    assert node.deliver("a").accepted
    assert node.deliver("a", 1).accepted
    other = node.deliver("a", 1, digest="other")
    assert (other.accepted, other.reason) == (False, "duplicate")
    node.take()
    node.deliver("b")
    again = node.deliver("b", 1)  # its receipt was lost, and the round is committed now
    assert (again.accepted, again.committed) == (True, 1)
    assert len([r for r in run.journal if isinstance(r, UpdateAccepted)]) == 2


@pytest.mark.parametrize(
    ("client", "round", "reason"), [("x", 1, "unknown_client"), ("a", 0, "stale"), ("a", 9, "stale"), ("d", 1, "unknown_client")]
)  # fmt: skip
def test_updates_that_nobody_asked_for_are_refused(client: str, round: int, reason: str) -> None:
    run = world(clients=list("abcd"), sampling=Sampling(per_round=1))
    node = run.node("n", "abcd")
    (asked,) = run.coordinator.state.open[1].drawn
    client = {"d": next(c for c in "abcd" if c != asked), "a": asked}.get(client, client)
    before = len(run.journal)
    receipt = node.deliver(client, round)
    assert (receipt.accepted, receipt.reason) == (False, reason)
    update = update_of(node.session, client, round)
    assert run.coordinator.refusal(node.session, update, "another") == (reason, receipt.message)
    assert len(run.journal) == before


def test_unsound_updates_put_a_client_out_and_damaged_ones_may_come_again() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(quorum=0.5))
    node = run.node("n", "ab")
    node.take(), node.take()
    for reason in ("damaged", "not_finite"):
        receipt = run.rejected(update_of(node.session, "a", 1), reason, f"it is {reason}")
        assert isinstance(receipt, Receipt)
        assert receipt.reason == reason
        assert ("a" in run.coordinator.state.open[1].failed) == (reason == "not_finite")
    assert [r.reason for r in run.journal if isinstance(r, UpdateRefused)] == ["damaged", "not_finite"]
    refused = node.deliver("a", 1)
    assert refused.reason == "stale"
    assert "not_finite" in refused.message


def test_a_silent_node_is_noticed_within_two_seconds() -> None:
    run = world(clients=["a", "b"])
    node = run.node("n", "ab")
    node.take()
    start = run.now
    for _ in range(10):
        run.pass_(0.5)
        node.beat({"a": 1})
    assert not [c for c in run.commands if isinstance(c, ev.NodeLost)]
    last = run.now
    run.pass_(2.0)
    (lost,) = [c for c in run.commands if isinstance(c, ev.NodeLost)]
    assert lost.node == "n"
    assert last - start == pytest.approx(5.0)
    assert node.beat().reason == "session"


def test_a_restarted_node_goes_on_with_what_it_held() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(lease_s=10.0))
    node, other = run.node("n"), run.node("other")
    plan = node.take()
    assert isinstance(plan, FitPlan)
    run.until(1.0)
    other.beat({})
    run.until(2.0)  # the node is lost; its begun work is kept for it
    other.beat({})
    done = other.run()
    assert done == 1
    back = run.node("n", process="second", held=[HeldRound(client=plan.client, round=1, finished=False)])
    assert back.take() == plan
    back.deliver(plan.client)
    assert len(run.closed()[1]) == 2


@pytest.mark.parametrize("reported", [False, True])
def test_a_restarted_node_gets_its_begun_round_as_soon_as_it_knows_that_the_round_before_is_taken(
    reported: bool,
) -> None:
    """reported: its first request still names the finished round, as it does until its update is answered."""
    streaming, waiting = Streaming(fragments=2, overlap=1), Waiting(lease_s=10.0)
    run = world(clients=["a"], rounds=4, local_steps=4, streaming=streaming, waiting=waiting)
    node = run.node("n", "a")
    first, second = node.take(), node.take()
    assert isinstance(first, FitPlan)
    assert isinstance(second, FitPlan)
    assert node.deliver("a", 1).accepted
    run.until(2.0)
    held = [HeldRound(client="a", round=round, finished=round == 1) for round in (1, 2)]
    back = run.node("n", "a", process="second", held=held)
    if reported:
        back.plans = [first]
    request = back.hold(wait=20.0)
    assert (request in run.answers) == (not reported), run.answers.get(request)
    back.plans = []
    back.beat()
    assert run.answers[request] == second


def test_begun_work_of_a_lost_node_moves_after_its_lease() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(lease_s=10.0), rounds=1)
    node, other = run.node("n"), run.node("other")
    plan = node.take()
    assert isinstance(plan, FitPlan)
    other.run()
    for second in range(30):
        run.until(second / 2)
        other.beat({})
        if other.run():
            break
    assert [c for c in run.commands if isinstance(c, ev.ClientMoved)] == [
        ev.ClientMoved(client=plan.client, round=1, node="n")
    ]
    assert run.now == pytest.approx(11.5)
    assert run.closed()[1] == ("a", "b")


def test_a_client_whose_only_node_is_lost_counts_as_lost_after_its_lease() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(lease_s=5.0, quorum=0.5, grace_s=1000.0), rounds=1)
    owner, other = run.node("owner", "a"), run.node("other", "b")
    owner.take()
    other.run()
    for second in range(40):
        run.until(second / 4)
        other.beat({})
    (failed,) = [r for r in run.journal if isinstance(r, ClientFailed)]
    assert failed.client == "a"
    assert failed.lost
    assert run.closed()[1] == ("b",)


def test_the_owner_of_a_client_that_was_given_up_may_still_deliver_while_the_round_is_open() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(lease_s=1.0, quorum=0.5, grace_s=1000.0), rounds=1)
    owner, other = run.node("owner", "a"), run.node("other", "b")
    owner.take()
    other.take()
    for second in range(20):
        run.until(second / 4)
        other.beat()
    assert "a (no node that could do it is here)" in run.coordinator.status(run.now)
    back = run.node("owner", "a", held=[HeldRound(client="a", round=1, finished=True)])
    assert back.deliver("a", 1).accepted
    assert other.deliver("b").accepted
    assert run.closed()[1] == ("a", "b")


def test_thirty_two_clients_on_two_nodes_are_balanced_and_stay() -> None:
    run = world(clients=32, rounds=3)
    nodes = {name: run.node(name) for name in ("x", "y")}
    seen: list[dict[str, str]] = []
    for _ in range(3):
        places: dict[str, str] = {}
        for name, node in nodes.items():
            while isinstance(plan := node.take(), FitPlan):
                places[plan.client] = name
        seen.append(places)
        for client, name in places.items():
            nodes[name].deliver(client)
    assert [sorted(places.values()).count("x") for places in seen] == [16, 16, 16]
    assert seen[0] == seen[1] == seen[2]


def test_speeds_share_the_clients() -> None:
    run = world(clients=30, rounds=1)
    for name, speed in (("slow", 1.0), ("quick", 2.0)):
        run.deliver(Join(node=name, process=name, clients=(), steps_per_second=speed), name)
    loads = {name: len(node.queue) for name, node in run.coordinator.cluster.nodes.items()}
    assert loads == {"slow": 10, "quick": 20}


def test_a_node_that_leaves_gives_its_clients_to_the_others() -> None:
    run = world(clients=32, rounds=1)
    first, second = run.node("first"), run.node("second")
    first.take(), first.take()
    assert isinstance(run.deliver(Leave(node="first", session=first.session), first.session), Receipt)
    assert second.run() == 32
    assert len(run.closed()[1]) == 32


def test_a_node_that_leaves_after_it_was_silent_is_heard() -> None:
    run = world()
    a, b = run.node("a"), run.node("b")
    kept = a.take().client  # type: ignore[union-attr]
    run.pass_(1.0)
    b.beat()
    run.pass_(1.0)
    b.beat()
    assert run.coordinator.cluster.nodes["a"].lost is not None
    told = run.deliver(Leave(node="a", session=a.session, reason="the data cannot be divided"), a.session)
    assert told.accepted  # type: ignore[union-attr]
    assert [one.why for one in run.commands if isinstance(one, ev.NodeLost)][1:] == [
        "it has left: the data cannot be divided"
    ]
    assert "a" not in run.coordinator.cluster.nodes
    assert b.run() == 8
    assert kept in run.closed()[1], "its lease is not waited for"
    again = run.deliver(Leave(node="a", session=a.session, reason="once more"), a.session)
    assert (again.accepted, again.reason) == (False, "session")  # type: ignore[union-attr]


def test_two_processes_of_one_name_are_distinguished() -> None:
    run = world(clients=["a"])
    first = run.node("n", "a", process="one")
    second = run.node("n", "a", process="two")
    assert second.session == ""
    for _ in range(8):
        run.pass_(0.25)
        first.beat()
    closed = second.join()
    assert isinstance(closed, Close)
    assert "another process works as node 'n'" in closed.reason
    assert first.beat().accepted


def test_a_restarted_process_gets_in_when_the_dead_one_is_silent_long_enough() -> None:
    run = world(clients=["a"])
    run.node("n", "a", process="one")
    second = run.node("n", "a", process="two")
    wait = second.join()
    assert isinstance(wait, Wait)
    run.pass_(wait.retry_after_s)
    assert isinstance(second.join(), ev.SessionGranted)


def test_messages_of_unknown_sessions_are_answered_with_a_request_to_join() -> None:
    run = world(clients=["a"])
    node = run.node("n", "a")
    run.restart()
    for plan in (node.take(), node.beat(), node.deliver("a", 1)):
        assert isinstance(plan, Receipt)
        assert (plan.accepted, plan.reason) == (False, "session")
    assert isinstance(run.deliver(Join(node="m", clients=("zz",)), "s"), Close)


def test_a_restarted_server_lets_nodes_go_on_and_gives_begun_work_to_nobody_else() -> None:
    run = world(clients=["a", "b", "c"], rounds=1)
    first, second = run.node("first"), run.node("second")
    mine, yours = first.take(), second.take()
    assert isinstance(mine, FitPlan)
    assert isinstance(yours, FitPlan)
    run.restart()
    second.join([HeldRound(client=yours.client, round=1, finished=False)])
    second.beat({yours.client: 3})
    assert isinstance(second.take(), Wait)  # a moment for the others to come back
    run.pass_(0.2)
    first.join([HeldRound(client=mine.client, round=1, finished=True)])
    assert first.deliver(mine.client).accepted
    for _ in range(8):
        run.pass_(0.25)
        first.beat({})
        second.beat({yours.client: 4})
    plans = [first.take(), second.take()]
    assert {plan.client for plan in plans if isinstance(plan, FitPlan)} == set("abc") - {mine.client, yours.client}
    assert second.deliver(yours.client).accepted


def test_a_fold_that_was_under_way_is_asked_for_again_after_a_restart() -> None:
    run = world(clients=["a"], rounds=1)
    run.eager = False
    run.node("n").run()
    (fold,) = run.folds
    run.restart()
    assert run.folds == [fold]
    run.tell(run.committed(fold))
    run.tell(run.committed(fold))  # said twice does not matter
    assert run.coordinator.state.committed == 1


def test_an_order_whose_answer_was_lost_is_given_again() -> None:
    run = world(clients=["a"])
    node = run.node("n")
    plan = node.take()
    node.forget("a", 1)
    for _ in range(4):
        run.pass_(0.5)
        node.beat()  # it does not name the client: it has never heard of it
    assert node.take() == plan


def test_run_ends_if_too_few_nodes_join() -> None:
    run = world(waiting=Waiting(join_timeout_s=60.0, nodes=2))
    run.node("n", "abcd")
    run.pass_(59.0)
    assert run.ended is None
    run.pass_(2.0)
    assert run.ended is not None
    assert run.ended.why == "0 of 2 nodes came within 60.0 s before the first round"


def test_a_run_fails_if_all_nodes_are_lost_and_none_joins_in_time() -> None:
    run = world(waiting=Waiting(join_timeout_s=60.0))
    run.node("n").take()
    run.pass_(55.0)
    assert run.ended is None
    run.pass_(30.0)
    assert run.ended is not None
    assert run.ended.failed
    assert "no node is here" in run.ended.why


def test_a_node_that_lives_but_does_nothing_is_lost_in_the_end() -> None:
    run = world(clients=["a"], waiting=Waiting(no_progress_timeout_s=100.0, heartbeat_interval_s=10.0))
    node = run.node("n")
    node.take()
    while run.now < 90:
        run.pass_(10.0)
        assert node.beat({"a": 1}).accepted
    for _ in range(3):
        run.pass_(10.0)
        node.beat({"a": 1})
    (lost,) = [c for c in run.commands if isinstance(c, ev.NodeLost)]
    assert "has done nothing for 1" in lost.why


def test_clients_measure_the_weights_and_the_mean_goes_by_samples() -> None:
    run = world(clients=["a", "b"], rounds=1, evaluate_on="clients")
    node = run.node("n", "ab")
    plan = node.take()
    assert isinstance(plan, EvaluatePlan)
    assert (plan.round, plan.base) == (0, "weights 0")
    who = {"node": "n", "session": node.session, "client": plan.client}
    run.deliver(Evaluated(**who, round=0, samples=12, metrics={"loss": 2.0}), node.session)  # type: ignore[arg-type]
    node.work.clear()
    node.run()
    assert run.ended is not None
    means = {r.round: r for r in run.journal if isinstance(r, RoundEvaluated) and r.client is None}
    assert (means[0].samples, means[0].metrics) == (16, {"loss": pytest.approx((12 * 2.0 + 4 * 0.5) / 16)})
    assert means[1].samples == 8


def test_the_mean_of_a_metric_is_over_the_clients_that_reported_it() -> None:
    """A site whose loss is NaN leaves it out; divided by its samples too, the others' mean would look better than any of them."""
    run = world(clients=["a", "b", "c"], rounds=1, evaluate_on="clients")
    node = run.node("n", "abc")
    for client, samples, metrics in (
        ("a", 4, {"loss": 2.0, "f1": 0.5}),
        ("b", 12, {"f1": 0.1}),
        ("c", 0, {"top": 1.0}),
    ):
        message = Evaluated(node="n", session=node.session, client=client, round=0, samples=samples, metrics=metrics)
        run.deliver(message, node.session)
    (mean,) = [r for r in run.journal if isinstance(r, RoundEvaluated) and r.client is None]
    assert (mean.samples, mean.metrics) == (16, {"loss": 2.0, "f1": pytest.approx(0.2)})


def test_an_evaluation_saved_without_samples_by_metric_is_continued() -> None:
    run = world(clients=["a", "b", "c"], rounds=1, evaluate_on="clients")
    measuring = run.coordinator.state.measuring[0]
    measuring.samples, measuring.sums = 4, {"loss": 8.0}  # as former versions saved it
    del measuring.waiting["a"]
    assert measuring.mean == {"loss": 2.0}
    node = run.node("n", "bc")
    for client, samples, metrics in (("b", 4, {"loss": 1.0}), ("c", 8, {})):
        message = Evaluated(node="n", session=node.session, client=client, round=0, samples=samples, metrics=metrics)
        run.deliver(message, node.session)
    (mean,) = [r for r in run.journal if isinstance(r, RoundEvaluated) and r.client is None]
    assert (mean.samples, mean.metrics) == (16, {"loss": 1.5})


def test_a_client_that_cannot_measure_goes_on_with_its_next_round_at_once() -> None:
    run = world(clients=["a", "b"], evaluate_on="clients")
    node = run.node("n", "ab")
    plan = node.take()
    assert isinstance(plan, EvaluatePlan)
    assert node.fail(plan.client, error="no validation data").accepted
    other, following = node.take(), node.take()
    assert isinstance(other, EvaluatePlan)
    assert isinstance(following, FitPlan)
    assert following.client == plan.client
    assert node.beat().cancel == ()


def test_over_provisioned_rounds_take_the_first_that_answer() -> None:
    run = world(clients=10, rounds=1, sampling=Sampling(per_round=4, over_provision=0.5))
    node = run.node("n")
    plans = [node.take() for _ in range(6)]
    clients = [plan.client for plan in plans if isinstance(plan, FitPlan)]
    assert len(clients) == 6
    for client in clients[2:]:
        node.deliver(client)
    assert run.closed()[1] == tuple(sorted(clients[2:], key=int))


def test_buffered_rounds_step_when_the_buffer_is_full_and_take_stale_updates() -> None:
    run = world(clients=4, rounds=3, buffered=Buffered(size=2, max_staleness=2))
    nodes = [run.node(str(n), [str(n)]) for n in range(4)]
    for node in nodes:
        node.take()
    for round in (1, 2, 3):
        for node in nodes[:2]:
            plan = node.take() if round > 1 and not node.work else None
            if plan is not None:
                assert isinstance(plan, FitPlan)
                assert (plan.round, plan.base) == (round, f"weights {round - 1}")
            giver = nodes[3] if round == 2 and node is nodes[1] else node  # it began in round 1
            assert giver.deliver(next(iter(giver.work))).accepted
    stale = [(r.client, r.round, r.staleness) for r in run.journal if isinstance(r, UpdateAccepted) and r.staleness]
    assert stale == [("3", 2, 1), ("1", 3, 1)]
    assert run.closed() == {1: ("0", "1"), 2: ("0", "3"), 3: ("0", "1")}


def test_updates_that_are_too_stale_are_refused() -> None:
    run = world(clients=3, rounds=6, buffered=Buffered(size=1, max_staleness=1))
    slow, quick = run.node("slow", ["0"]), run.node("quick", ["1"])
    slow.take()
    for _ in range(3):
        quick.take()
        quick.deliver("1")
    assert slow.deliver("0", 1).reason == "stale"
    assert [(one.client, one.round) for one in slow.beat({"0": 1}).cancel] == [("0", 1)]


def test_fragments_are_exchanged_while_the_next_round_is_fitted() -> None:
    run = world(clients=2, rounds=6, local_steps=12, streaming=Streaming(fragments=3, overlap=1))
    run.eager = False
    node = run.node("n")
    plans = [node.take() for _ in range(2)]
    assert [(p.round, p.fragment, p.base, p.steps, p.clock) for p in plans if isinstance(p, FitPlan)] == [
        (1, 1, "weights 0", 4, 0)
    ] * 2
    second = node.take()  # the first client's next round, ahead
    assert isinstance(second, FitPlan)
    node.deliver("0", 1)
    assert (second.client, second.round, second.fragment, second.base, second.clock) == ("0", 2, 2, "weights 0", 4)
    node.deliver("1")
    assert sorted(run.coordinator.state.open) == [1, 2]
    node.deliver("0", 2)
    node.take(), node.deliver("1", 2)
    assert [fold.round for fold in run.folds] == [1]  # one after another
    assert isinstance(node.take(), Wait)  # round 3 begins from the weights of round 1
    run.tell(run.committed(run.folds[0]))
    third = node.take()
    assert isinstance(third, FitPlan)
    assert (third.round, third.fragment, third.base, third.clock) == (3, 0, "weights 1", 8)
    assert [fold.round for fold in run.folds] == [1, 2]


def test_other_settings_do_not_go_on_with_a_journal() -> None:
    run = world()
    for change in ({"local_steps": 6}, {"clients": 5}):
        other = Federation(**{"clients": 4, "rounds": 2, "local_steps": 5} | change)  # type: ignore[arg-type]
        with pytest.raises(FederatedError, match="begun with other settings"):
            Coordinator(other, "abcde"[: other.clients], 3, "run").replay(run.journal)
    with pytest.raises(FederatedError, match="of run 'run'"):
        Coordinator(run.settings, run.clients, 3, "other").replay(run.journal)
    longer = Coordinator(Federation(clients=4, rounds=9, local_steps=5), run.clients, 3, "run")
    longer.replay(run.journal)
    assert longer.state.committed == 0
    with pytest.raises(FederatedError, match="begun already"):
        run.begin()
    with pytest.raises(FederatedError, match="nothing to resume"):
        Coordinator(run.settings, run.clients, 3, "run").decide(ev.RunResumed(), 0.0)


@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_a_node_that_was_away_for_rounds_learns_that_its_update_counted(rounds: int) -> None:
    """Its receipt was lost. Told that it came too late, its client would keep residuals that the update has said already."""
    waiting = Waiting(quorum=0.5, lease_s=1.0, join_timeout_s=2.0)
    run = world(clients=["a", "b"], rounds=30, evaluate_every=0, waiting=waiting)
    away, other = run.node("away", "a"), run.node("other", "b")
    away.take()
    assert away.deliver("a").accepted
    while run.coordinator.state.committed < rounds:
        assert run.now < 100, "the rounds do not go on"
        if isinstance(other.take(), FitPlan):
            other.deliver("b")
        other.beat()
        run.pass_(0.5)
    run.restart()
    away.join()
    receipt = away.deliver("a", round=1)
    assert (receipt.accepted, receipt.message) == (True, "it was here already")
    assert away.deliver("a", round=1, digest="another").reason == "duplicate"


def test_a_run_that_is_taken_up_with_another_period_does_not_measure_what_is_over() -> None:
    run = world(clients=["a"], rounds=2, evaluate_every=0)
    run.node("n").run()
    assert run.ended is not None
    run.settings = replace(run.settings, rounds=3, evaluate_every=1)
    run.commands.clear()
    run.restart()
    assert not run.coordinator.state.measuring
    again = run.node("n")
    run.pass_(0.9)
    again.beat()
    run.pass_(0.9)
    again.run()
    assert [one.round for one in run.commands if isinstance(one, ev.EvaluateOnServer)] == [3]


def failed_fold(run: World, *clients: str, why: str = "it cannot be") -> None:
    run.tell(ev.AggregationFailed(round=run.folds[-1].round, why=why, clients=clients))


def test_a_round_that_cannot_be_folded_is_repeated_without_the_client_at_fault() -> None:
    run = world(rounds=1)
    run.eager = False
    node = run.node("n", "abcd")
    for _ in range(4):
        plan = node.take()
        assert isinstance(plan, FitPlan)
        node.deliver(plan.client)
    failed_fold(run, "c")
    open = run.coordinator.state.open[1]
    assert (open.closed, open.drawn, open.discarded, list(open.failed)) == (None, ("a", "b", "d"), 1, ["c"])
    run.restart()  # what is in the journal is enough
    run.pass_(1.0)
    node = run.node("n", "abcd")
    run.eager = True
    assert node.run() == 3
    assert run.closed() == {1: ("a", "b", "d")}
    assert run.ended == ev.RunOver(why="all 1 rounds are done", failed=False)


def test_another_client_replaces_the_client_at_fault() -> None:
    run = world(rounds=1, sampling=Sampling(per_round=2), waiting=Waiting(quorum=1.0))
    run.eager = False
    node = run.node("n", "abcd")
    first = [node.take().client, node.take().client]  # type: ignore[union-attr]
    for client in first:
        node.deliver(client)
    failed_fold(run, first[0])
    drawn = run.coordinator.state.open[1].drawn
    assert drawn[0] == first[1]
    assert len(drawn) == 2
    assert first[0] not in drawn


def test_clients_in_the_next_buffer_are_not_asked_again() -> None:
    """Its update would be taken for the one that is here, and waited for without end."""
    run = world(clients=["a", "b", "c"], rounds=1, buffered=Buffered(size=2), evaluate_every=0)
    run.eager = False
    node = run.node("n", "abc")
    for _ in "abc":
        node.take()
    for client in "abc":
        node.deliver(client)
    assert [list(open.accepted) for open in run.coordinator.state.open.values()] == [["a", "b"], ["c"]]
    failed_fold(run, "a")
    assert node.run() == 0
    assert run.ended is not None
    assert "round 1 has 0 of the 2 updates that its quorum needs; failed: a (" in run.ended.why


def test_replacement_clients_join_a_new_secure_sum() -> None:
    run = world(clients=6, rounds=1, secure=SecureSum(), sampling=Sampling(per_round=3), waiting=Waiting(quorum=1.0))
    node = run.node("n", [str(n) for n in range(6)])
    first = [node.take().client for _ in range(3)]  # type: ignore[union-attr]
    node.beat(dict.fromkeys(first, 1))
    node.deliver(first[0])
    node.fail(first[1])
    open = run.coordinator.state.open[1]
    assert (open.discarded, list(open.failed), open.accepted) == (1, [first[1]], {})
    assert set(open.drawn) >= {first[0], first[2]}
    assert first[1] not in open.drawn
    why = "the sum goes on without it"
    late = Failed(node="n", session=node.session, client=first[2], round=1, error=why, attempt=0)
    told = run.deliver(late, node.session)
    assert (told.accepted, told.reason) == (False, "stale")  # type: ignore[union-attr]
    told = run.validated(update_of(node.session, first[2], 1, attempt=0), "of the old sum")  # it was being checked
    assert (told.accepted, told.reason) == (False, "stale")  # type: ignore[union-attr]
    assert open.accepted == {}
    node.work.clear()
    node.plans.clear()
    plans = [node.take() for _ in range(3)]
    found = {(plan.client, plan.discarded) for plan in plans if isinstance(plan, FitPlan)}
    assert found == {(client, 1) for client in open.drawn}
    for client in open.drawn:
        node.deliver(client)
    assert run.ended == ev.RunOver(why="all 1 rounds are done", failed=False)


@pytest.mark.parametrize("buffered", [None, Buffered(size=2)])
def test_a_round_that_can_never_be_folded_is_given_up_after_its_retries(buffered: Buffered | None) -> None:
    for mode in ("stop", "skip"):
        run = world(rounds=2, buffered=buffered, evaluate_every=0, waiting=Waiting(retries=2, on_failed_round=mode))
        run.eager = False
        node = run.node("n", "abcd")
        for attempt in range(3):
            assert run.ended is None, attempt
            while len(run.folds) == attempt:
                plan = node.take()
                assert isinstance(plan, FitPlan)
                node.deliver(plan.client)
            failed_fold(run)
        if mode == "stop":
            assert run.ended is not None
            assert run.ended.why == "round 1: it cannot be; it was tried 3 times (waiting.retries)"
            run.ended = None
            run.restart()
            assert run.folds == [], "a start does not meet the closed round again"
            run.pass_(1.0)
            node = run.node("n", "abcd")
        else:
            assert run.ended is None
            assert run.folds[-1].updates == ()
            assert run.folds[-1].clock == 0
            run.tell(run.committed(run.folds[-1]))
            assert run.coordinator.state.committed == 1
            assert run.coordinator.state.clock == 0
        run.eager = True
        node.run()
        assert run.ended == ev.RunOver(why="all 2 rounds are done", failed=False)


def test_a_skipped_round_whose_weights_cannot_be_written_ends_the_run() -> None:
    run = world(waiting=Waiting(retries=0, on_failed_round="skip"))
    run.eager = False
    node = run.node("n", "abcd")
    for _ in "abcd":
        node.deliver(node.take().client)  # type: ignore[union-attr]
    failed_fold(run)
    assert run.folds[-1].updates == ()
    failed_fold(run, why="the disk is broken")
    assert run.ended is not None
    assert "the disk is broken" in run.ended.why


def test_a_round_without_a_quorum_may_be_skipped() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(quorum=1.0, on_failed_round="skip"))
    node = run.node("n", "ab")
    node.take()
    node.fail("a", error="no such column: x")
    assert run.coordinator.state.committed == 1
    assert run.closed() == {}
    (said,) = [c.text for c in run.commands if isinstance(c, ev.LogMessage)]
    assert said.startswith("round 1 is skipped, its weights stay those of the round before: round 1 has 0 of the 2")
    assert node.run() == 2
    assert run.closed() == {2: ("a", "b")}


def test_a_client_that_is_away_for_longer_than_its_lease_does_not_end_a_run_with_the_usual_settings() -> None:
    run = world(rounds=3)
    owner, others = run.node("owner", "a"), run.node("others", "bcd")
    owner.take()
    for _ in "bcd":
        others.deliver(others.take().client)  # type: ignore[union-attr]
    while not run.closed():
        run.pass_(1.0)
        others.beat()
        assert run.now < 400
    assert run.now > 290, "it was waited for"
    assert run.closed() == {1: ("b", "c", "d")}
    began = run.now
    others.run()
    assert run.closed() == dict.fromkeys((1, 2, 3), ("b", "c", "d")), "and not again in each round"
    assert run.now == began
    assert [(r.round, r.client, r.lost) for r in run.journal if isinstance(r, ClientFailed)] == [
        (number, "a", True) for number in (1, 2, 3)
    ]


def test_a_client_that_was_away_takes_part_again_in_the_round_that_is_under_way() -> None:
    run = world(waiting=Waiting(lease_s=5.0))
    owner, others = run.node("owner", "a"), run.node("others", "bcd")
    owner.take()
    for _ in "bcd":
        others.deliver(others.take().client)  # type: ignore[union-attr]
    while not run.closed():
        run.pass_(1.0)
        others.beat()
    others.take()
    back = run.node("owner", "a", process="second")
    assert back.run() == 1
    others.deliver("b")
    others.run()
    assert run.closed()[2] == ("a", "b", "c", "d")


def test_a_client_without_which_there_is_no_quorum_is_waited_for_longer_than_its_lease() -> None:
    run = world(clients=["a", "b"], waiting=Waiting(lease_s=5.0, join_timeout_s=200.0))
    owner, other = run.node("owner", "a"), run.node("other", "b")
    owner.take()
    other.run()
    while run.now < 190:
        run.pass_(1.0)
        other.beat()
    assert run.ended is None
    back = run.node("owner", "a", process="second")
    assert back.run() + other.run() > 0
    assert run.closed()[1] == ("a", "b")


def test_a_client_for_which_no_node_has_ever_come_is_waited_for_once() -> None:
    run = world(rounds=3, waiting=Waiting(join_timeout_s=20.0))
    node = run.node("n", "abc")
    for _ in "abc":
        node.deliver(node.take().client)  # type: ignore[union-attr]
    while not run.closed():
        run.pass_(1.0)
        node.beat()
        assert run.now < 30
    began = run.now
    node.run()
    assert run.closed() == dict.fromkeys((1, 2, 3), ("a", "b", "c"))
    assert run.now == began


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_updates_of_a_run_cannot_outweigh_the_others(first: int) -> None:
    run = world(clients=["a", "b", "c"], rounds=1, waiting=Waiting(quorum=0.6))
    node = run.node("n", "abc")
    for _ in "abc":
        node.take()
    order = ["b", "c"]
    order.insert(first, "a")
    for client in order:
        samples = 1 << 50 if client == "a" else 40
        run.validated(update_of(node.session, client, 1, steps=5, samples=samples, tokens=0), client)
    assert run.closed() == {1: ("b", "c")}
    (out,) = [r for r in run.journal if isinstance(r, ClientFailed)]
    assert (out.client, out.lost) == ("a", False)
    assert "it would outweigh them" in out.message
    assert [told[1] for told in run.coordinator.state.recent] == [8.0, 8.0]


def test_a_node_does_not_take_work_of_another_nodes_client_by_saying_that_it_holds_it() -> None:
    for clients in ("b", ""):
        run = world(clients=["a", "b"], waiting=Waiting(nodes=2))
        owner, _ = run.node("owner", "a"), run.node("other", "b")
        other = run.node("other", clients, held=[HeldRound(client="a", round=1, finished=False)])
        plan = owner.take()
        assert isinstance(plan, FitPlan)
        assert plan.client == "a"
        if clients:
            plan = other.take()
            assert isinstance(plan, FitPlan)
            assert plan.client == "b"


def test_negative_steps_do_not_count_as_progress() -> None:
    run = world(clients=["a"])
    node = run.node("n", "a")
    node.take()
    node.beat({"a": -1})
    (task,) = run.coordinator.cluster.nodes["n"].tasks.values()
    assert task.steps == 0


def test_late_heartbeats_of_a_discarded_attempt_are_ignored() -> None:
    """Its beat was on the way while the round was discarded: the new order is given, and not taken for one that it has."""
    run = world(clients=["a"], rounds=1)
    run.eager = False
    node = run.node("n", "a")
    plan = node.take()
    assert isinstance(plan, FitPlan)
    late = ActiveWork(client="a", round=1, steps=5, attempt=plan.discarded)
    node.deliver("a")
    failed_fold(run)
    run.deliver(Heartbeat(node="n", session=node.session, active_work=(late,)), node.session)
    again = run.deliver(WorkRequest(node="n", session=node.session, hold_s=0.0, active_work=(late,)), node.session)
    assert isinstance(again, FitPlan)
    assert again.discarded == 1
