"""Which model a command means, and what it holds for its failure."""

import pytest

from homing.cluster.control import failed_since, meant
from homing.cluster.errors import NoSuchModel
from homing.cluster.spec import ClusterStatus, GangStatus


def test_the_only_model_needs_no_name() -> None:
    """`homing scale 4` is what most clusters need."""
    assert meant(["fox"], None) == "fox"
    assert meant(["fox"], "fox") == "fox"


def test_with_several_models_one_must_be_named() -> None:
    """Whoever scales the wrong one pays for it."""
    assert meant(["fox", "owl"], "owl") == "owl"
    with pytest.raises(NoSuchModel, match="several models run here: fox, owl; say which"):
        meant(["fox", "owl"], None)


def test_a_wrong_name_is_told_what_runs() -> None:
    """A typo must not scale something else."""
    with pytest.raises(NoSuchModel, match=r"no model 'ox' runs here \(there are: fox, owl\)"):
        meant(["fox", "owl"], "ox")


def cluster(**failures: int) -> ClusterStatus:
    gangs = (GangStatus(name, "fox", 1, "starting", "", count, (), 0, "no room") for name, count in failures.items())
    return ClusterStatus(tuple(gangs), None, (), None, ())


def test_a_command_fails_by_what_does_not_come_up_after_it() -> None:
    """A replica that was lost and rebuilt just before has nothing to do with it."""
    before = cluster(r0=1, r1=0)

    assert failed_since(before, cluster(r0=1, r1=0, r2=0)) == ""
    assert failed_since(before, cluster(r0=0, r1=0)) == ""
    assert failed_since(before, cluster(r0=1, r2=1)) == "replica r2 could not start, and is tried again: no room"
    assert failed_since(before, cluster(r0=2, r1=0)) == "replica r0 could not start, and is tried again: no room"
