"""The model that a command applies to, the orders of an update, and which failures a command reports."""

import io
from pathlib import Path
from typing import Any

import pytest

from homing.cluster.cli.control import choose_model, failed_since, update_orders, updated
from homing.cluster.cli.main import run
from homing.cluster.config import load_settings
from homing.cluster.control.control_messages import ClusterModel, ClusterStatus, ModelStatus, ReplicaStatus
from homing.cluster.devices import resolve_devices
from homing.cluster.errors import ModelUnavailable, NoSuchModel, NotRunning, SettingsError
from homing.replica.demo import demo_model_path

MODELS = """
cluster: {ray_address: auto}
models:
  - {name: fox, model: org/fox}
  - {name: owl, model: org/owl}
"""


def test_the_only_model_needs_no_name() -> None:
    """`homing scale 4` suffices for most clusters."""
    assert choose_model(["fox"], None) == "fox"
    assert choose_model(["fox"], "fox") == "fox"


def test_with_several_models_one_must_be_named() -> None:
    """Scaling the wrong model would be costly."""
    assert choose_model(["fox", "owl"], "owl") == "owl"
    with pytest.raises(NoSuchModel, match="several models are served: fox, owl; name one with --served-model-name"):
        choose_model(["fox", "owl"], None)


def test_a_wrong_name_is_told_what_runs() -> None:
    """A typo must not scale another model."""
    with pytest.raises(NoSuchModel, match=r"no model 'ox' is served here \(served: fox, owl\)"):
        choose_model(["fox", "owl"], "ox")


def written(folder: Path, text: str = MODELS) -> Path:
    path = folder / "models.yaml"
    path.write_text(text)
    return path


def orders(folder: Path, **changes: Any) -> list[tuple[str, str]]:
    """The orders that an update of fox and owl sends to the controller: (verb, model)."""
    started = load_settings({}, {}, written(folder)).models
    specs = (ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host=None) for settings in started)
    told = update_orders({spec.name: spec for spec in specs}, **changes)
    return [(verb, about if isinstance(about, str) else about.name) for verb, about in told]


def test_an_update_orders_what_a_file_says_otherwise(tmp_path: Path) -> None:
    """Unchanged models are left alone, missing ones must be removed by name, and new ones are started."""
    more = MODELS.replace("org/owl}", "org/owls}") + "  - {name: ox, model: org/ox}\n"

    assert orders(tmp_path, file=written(tmp_path)) == []
    assert orders(tmp_path, restart=True) == [("update", "fox"), ("update", "owl")]
    assert orders(tmp_path, remove=["owl"]) == [("remove", "owl")]
    (tmp_path / "more").mkdir()
    changed = written(tmp_path / "more", more)
    assert orders(tmp_path, file=changed) == [("add", "ox"), ("update", "owl")]
    assert orders(tmp_path, file=changed, remove=["fox"]) == [
        ("remove", "fox"),
        ("add", "fox"),
        ("add", "ox"),
        ("update", "owl"),
    ]


def test_an_update_that_would_leave_something_out_is_refused(tmp_path: Path) -> None:
    """The file omits models, a name is unknown, no model would be left, or settings contradict each other."""
    (tmp_path / "less").mkdir()
    less = written(tmp_path / "less", MODELS.replace("  - {name: owl, model: org/owl}\n", ""))

    with pytest.raises(SettingsError, match="owl not listed; to stop serving them, add --remove owl"):
        orders(tmp_path, file=less)
    with pytest.raises(NoSuchModel, match="no model 'ox' is served here"):
        orders(tmp_path, remove=["ox"])
    with pytest.raises(NoSuchModel, match=r"remove every model \(fox, owl\): stop the cluster with homing stop"):
        orders(tmp_path, remove=["fox", "owl"])
    with pytest.raises(SettingsError, match="model ox: replicas: 2 is outside autoscale 4:5"):
        orders(
            tmp_path,
            file=written(tmp_path / "less", MODELS + '  - {name: ox, model: x, replicas: 2, autoscale: "4:5"}\n'),
        )


def test_an_update_says_what_it_has_done(tmp_path: Path) -> None:
    """A name may stay while its model changes, which nothing else would show."""
    started = load_settings({}, {}, written(tmp_path)).models
    specs = [ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host=None) for settings in started]
    running = {spec.name: spec for spec in specs}
    other = update_orders(running, flags={"served_model_name": "fox", "model": "org/ox"})

    assert updated(running, other) == "updated; fox now runs org/ox"
    assert updated(running, update_orders(running, restart=True)) == "updated"
    assert updated(running, update_orders(running, remove=["owl"])) == "removed owl"


@pytest.mark.parametrize("gpus", [(), (1.0,)])
def test_a_value_that_is_chosen_by_the_machine_is_no_change(gpus: tuple[float, ...]) -> None:
    """Otherwise an update from the file that the cluster was started with would replace every replica."""
    asked = {"device": "auto", "gpus_per_rank": "0", "max_running_requests": "0", "max_batched_tokens": "0"}
    settings = resolve_devices(load_settings(asked | {"served_model_name": "fox"}, {}), gpus)
    running = {"fox": ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host=None)}

    assert update_orders(running, flags=asked, gpus=gpus) == []


def test_an_update_takes_a_tokenizer_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its absolute path is passed to the other processes. A folder without a tokenizer is refused first."""
    (settings,) = load_settings({"model": "demo", "served_model_name": "fox"}, {}, None).each_model
    running = {"fox": ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host=None)}
    monkeypatch.chdir(demo_model_path().parent)

    ((_, spec),) = update_orders(running, flags={"tokenizer": "model"})

    assert isinstance(spec, ClusterModel)
    assert spec.text_dir == spec.settings.replica.tokenizer == str(demo_model_path())
    with pytest.raises(ModelUnavailable, match=r"cannot read a tokenizer from .*none: no such folder"):
        update_orders(running, flags={"tokenizer": str(tmp_path / "none")})
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 4096}}}')
    with pytest.raises(SettingsError, match="has the token id 4,096, but the model has only 4,096 tokens"):
        update_orders(running, flags={"tokenizer": str(tmp_path)})


def test_the_file_of_an_update_also_says_which_cluster(tmp_path: Path) -> None:
    """As for the other commands: it may be the file with which the cluster was started."""
    words = ["update", "--config", str(written(tmp_path, "cluster: {name: blue}")), "--state-dir", str(tmp_path)]

    with pytest.raises(NotRunning, match="no cluster 'blue' is running"):
        run(words, io.StringIO())


def cluster(*, version: int = 1, **failures: int) -> ClusterStatus:
    """A cluster whose replicas have version 1, while new ones get `version`."""
    groups = (
        ReplicaStatus(name, "fox", 1, "starting", "", count, (), 0, "no room") for name, count in failures.items()
    )
    model = ModelStatus("fox", wanted=2, version=version, settled=False, abandoned="")
    return ClusterStatus(tuple(groups), None, (), None, (), (model,))


def test_a_command_fails_by_what_does_not_come_up_after_it() -> None:
    """Replicas that were lost and rebuilt just before the command do not count."""
    before = cluster(r0=1, r1=0)

    assert failed_since(before, cluster(r0=1, r1=0, r2=0)) == ""
    assert failed_since(before, cluster(r0=0, r1=0)) == ""
    assert failed_since(before, cluster(r0=1, r2=1)) == "replica r2 could not start and will be retried: no room"
    assert failed_since(before, cluster(r0=2, r1=0)) == "replica r0 could not start and will be retried: no room"


def test_an_update_does_not_fail_by_the_replicas_that_it_replaces() -> None:
    """They may be the reason for it."""
    assert failed_since(cluster(r0=3), cluster(r0=4, version=2)) == ""
