"""Which model a command means."""

import pytest

from homing.cluster.control import meant
from homing.cluster.errors import NoSuchModel


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
