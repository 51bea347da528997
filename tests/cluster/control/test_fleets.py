"""Fleets of several models decide separately, but share names and publish one membership to routers."""

import pickle

import pytest

from homing.cluster.config import ClusterSettings
from homing.cluster.control.fleets import Fleets, replica_prefix
from homing.cluster.control.planner import (
    Action,
    Drain,
    GroupPhase,
    KillRankGroup,
    Publish,
    StartRankGroup,
)

from ..fakes import check_fleet, describe_replica


def replicas(count: int) -> ClusterSettings:
    """Settings with this many replicas and without warm-ups."""
    return ClusterSettings(replicas=count, warm_up_s=0)


def fleets(**wanted: int) -> Fleets:
    return Fleets.of([(model, replicas(count)) for model, count in wanted.items()])


def check(fleets: Fleets) -> None:
    """Invariants after `reconcile`."""
    for fleet in fleets.by_model.values():
        assert fleet.names is fleets.names, "a fleet has its own name allocator"
        check_fleet(fleet)
    names = [group.replica_id for _, group in fleets.groups()]
    assert len(names) == len(set(names)), f"shared names: {names}"
    generations = [group.generation for _, group in fleets.groups()]
    assert len(generations) == len(set(generations)), f"shared generations: {generations}"


def serve(made: Fleets, now: float = 0.0) -> list[Action]:
    """Bring up all requested replicas; return the actions of the last reconcile."""
    said = made.reconcile(now)
    while started := [action for action in said if isinstance(action, StartRankGroup)]:
        for action in started:
            fleet = made.fleet_of(action.replica_id)
            assert fleet is not None
            fleet.placed(action.replica_id, action.generation, now)
            fleet.ready(action.replica_id, action.generation, describe_replica(action.replica_id, 1), now)
        said = made.reconcile(now)
    check(made)
    return said


def test_one_models_replicas_have_short_names_several_are_called_after_theirs() -> None:
    """People type the names, and across models a name must show its model."""
    alone, both = fleets(fox=2), fleets(fox=1, owl=2)
    serve(alone)
    serve(both)

    assert [group.replica_id for _, group in alone.groups()] == ["r0", "r1"]
    assert [(model, group.replica_id) for model, group in both.groups()] == [
        ("fox", "fox-r0"),
        ("owl", "owl-r0"),
        ("owl", "owl-r1"),
    ]


@pytest.mark.parametrize(
    ("model", "prefix"),
    [("fox", "fox-"), ("org/Fox-3.1", "org-Fox-3-1-"), ("ein Fuchs!", "ein-Fuchs-"), ("狐", "model-")],
)
def test_a_replicas_name_fits_files_headers_and_labels(model: str, prefix: str) -> None:
    """Model names contain slashes and may contain any character."""
    assert replica_prefix(model) == prefix


def test_models_that_sound_alike_still_get_names_of_their_own() -> None:
    """`a/b` and `a-b` are two models."""
    made = fleets(**{"a/b": 1, "a-b": 1})
    serve(made)

    assert [group.replica_id for _, group in made.groups()] == ["a-b-r0", "a-b-r1"]


def test_routers_are_told_of_all_models_whenever_one_changes() -> None:
    """A membership with only the changed model would remove the others."""
    made = fleets(fox=1, owl=1)
    (published,) = [action for action in serve(made) if isinstance(action, Publish)]
    assert [each.description.replica_id for each in published.members] == ["fox-r0", "owl-r0"]
    owl = made.by_model["owl"].groups["owl-r0"]

    made.by_model["owl"].failed("owl-r0", owl.generation, "it died", 1.0)
    first, *others = made.reconcile(1.0)

    assert isinstance(first, Publish)
    assert [each.description.replica_id for each in first.members] == ["fox-r0"]
    assert [type(action) for action in others] == [KillRankGroup, StartRankGroup]
    check(made)


def test_what_one_model_wants_is_nothing_to_the_others() -> None:
    """Scaling or updating a model affects only its own replicas."""
    made = fleets(fox=2, owl=1)
    serve(made)
    before = {group.replica_id: group.generation for model, group in made.groups() if model == "owl"}

    made.by_model["fox"].scale(0)
    made.by_model["fox"].update(9)
    made.reconcile(1.0)

    assert {group.replica_id: group.generation for model, group in made.groups() if model == "owl"} == before
    assert made.by_model["owl"].settled
    assert {group.phase for model, group in made.groups() if model == "fox"} == {GroupPhase.DRAINING}


def test_a_model_that_is_added_gets_replicas_and_routers_hear_of_it_before_they_come() -> None:
    """Until its replicas are ready, requests get 503 instead of 404."""
    made = fleets(fox=1)
    serve(made)

    made.add("owl", replicas(1), 2)
    first, *_ = made.reconcile(1.0)
    serve(made, 1.0)

    assert isinstance(first, Publish)
    assert [each.description.replica_id for each in first.members] == ["r0"]
    assert [(model, group.replica_id, group.version) for model, group in made.groups()] == [
        ("fox", "r0", 1),
        ("owl", "owl-r0", 2),
    ]


def test_a_model_that_leaves_drains_and_is_scaled_up_by_nobody() -> None:
    """Routers learn of it at once, even if the model has no replica; a late decision of the autoscaler is ignored."""
    made = fleets(fox=1, owl=1, ox=0)
    serve(made)

    made.by_model["owl"].remove()
    made.by_model["ox"].remove()
    made.by_model["owl"].scale(3)
    first, *others = made.reconcile(1.0)
    check(made)

    assert isinstance(first, Publish)
    assert [type(action) for action in others] == [Drain]
    assert list(made.served) == ["fox"]
    group = made.by_model["owl"].groups["owl-r0"]
    made.by_model["owl"].drained("owl-r0", group.generation)
    made.reconcile(2.0)
    assert made.by_model["owl"].settled
    assert not made.by_model["owl"].failed("owl-r0", group.generation, "killed", 3.0)


def test_a_model_may_come_back_while_its_last_replica_drains() -> None:
    """With its new settings, and next to the replica that still drains, as in an update."""
    made = fleets(fox=1, owl=1)
    serve(made)
    made.by_model["owl"].remove()
    made.reconcile(1.0)

    owl = made.by_model["owl"]
    made.add("owl", replicas(1), 9)
    serve(made, 2.0)
    draining = list(owl.groups.values())
    owl.drained("owl-r0", draining[0].generation)
    serve(made, 3.0)

    assert [(group.phase, group.version) for group in draining] == [(GroupPhase.DRAINING, 2)]
    assert [(group.phase, group.version) for group in owl.groups.values()] == [(GroupPhase.READY, 9)]
    assert owl.settled


def test_the_next_deadline_is_the_nearest_of_all() -> None:
    """A deadline of any model must wake the planner."""
    made = fleets(fox=1, owl=1)
    assert made.next_deadline(0.0) is None

    serve(made)
    made.by_model["owl"].scale(2)
    made.reconcile(5.0)

    assert made.next_deadline(15.0) == replicas(1).start_timeout_s - 10.0


def test_fleets_that_go_on_know_what_was_wanted_and_what_runs() -> None:
    """After a controller's death, no name or generation may be assigned twice."""
    made = fleets(fox=2, owl=1)
    serve(made)
    made.by_model["owl"].scale(2)
    made.by_model["owl"].settings = ClusterSettings(drain_timeout_s=5.0, warm_up_s=0)
    made.add("ox", replicas(0), 3)
    made.by_model["ox"].remove()
    serve(made)

    running = {group.generation: group.description for _, group in made.groups() if group.description is not None}

    again: Fleets = pickle.loads(pickle.dumps(made))
    again.resume(running, 1.0)
    actions = again.reconcile(1.0)

    assert [type(action) for action in actions] == [Publish]
    check(again)
    assert list(again.served) == ["fox", "owl"]
    assert again.by_model["owl"].wanted == 2
    assert again.by_model["owl"].settings.drain_timeout_s == 5.0
    again.by_model["fox"].scale(3)
    (started,) = again.reconcile(2.0)
    assert isinstance(started, StartRankGroup)
    assert (started.replica_id, started.generation) == ("fox-r2", made.names.generation + 1)
