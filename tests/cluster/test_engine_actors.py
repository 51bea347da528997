"""Engines found by the label of their Ray actors."""

import os
import tempfile
from collections.abc import Iterator

import psutil
import pytest

from homing.cluster.engine_actors import EngineActors, engine_addresses
from homing.cluster.local_ray import NODE_ENVIRONMENT
from homing.router.errors import BackendsInvalid
from homing.router.replicas.external.discovery import EngineAddress

from ..e2e.running import until


def test_a_label_names_an_engines_ports() -> None:
    """Labels hold no colons, so the ports are separated by dots."""
    assert engine_addresses([("fd00::1", "8000"), ("10.0.0.1", "8000.5557.5558")]) == [
        EngineAddress("http://10.0.0.1:8000", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        EngineAddress("http://[fd00::1]:8000"),
    ]


@pytest.mark.parametrize("value", ["", "vllm", "8000.5557", "8000.a.b"])
def test_another_label_is_refused(value: str) -> None:
    """A mistake must not look like a fleet without engines."""
    with pytest.raises(BackendsInvalid, match="PORT"):
        engine_addresses([("10.0.0.1", value)])


@pytest.mark.parametrize(
    "url",
    [
        *("ray://", "ray://10.0.0.1/engine", "ray://10.0.0.1:6379", "ray://10.0.0.1:6379/"),
        *("ray://10.0.0.1:gcs/engine", "ray://10.0.0.1:99999/engine", "ray://[::1/engine"),
    ],
)
def test_an_incomplete_url_is_refused(url: str) -> None:
    """The form is in the error."""
    with pytest.raises(BackendsInvalid, match="ray://HOST:PORT/LABEL"):
        EngineActors(url)


@pytest.mark.timeout(10)
def test_the_list_of_an_unreachable_cluster_is_closed_at_once() -> None:
    """Ray's client tries to connect for 17 s and does not notice that its input was closed; the router must end."""
    before = set(psutil.Process().children())
    source = EngineActors("ray://127.0.0.1:9/engine")

    assert source.read() is None
    source.close()

    assert set(psutil.Process().children()) <= before


@pytest.fixture
def gcs() -> Iterator[str]:
    """The address of a running Ray's control store."""
    before = dict(os.environ)
    os.environ.update(NODE_ENVIRONMENT, RAY_AUTH_MODE="disabled")
    import ray

    try:
        with tempfile.TemporaryDirectory(
            prefix="ray", dir="/tmp", ignore_cleanup_errors=True
        ) as folder:  # a short path
            ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 1024 * 1024, _temp_dir=folder)
            yield ray.get_runtime_context().gcs_address
            ray.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.cluster
@pytest.mark.slow
def test_engines_are_listed_while_their_actor_lives(gcs: str) -> None:
    """Actors without the label are not engines."""
    import ray

    class Engine:
        def host(self) -> str:
            return ray.util.get_node_ip_address()

    engine = ray.remote(num_cpus=0)(Engine)
    actors = [engine.options(_labels=labels).remote() for labels in ({"homing/engine": "8000"}, {"app": "other"})]
    hosts = ray.get([actor.host.remote() for actor in actors])
    source = EngineActors(f"ray://{gcs}/homing/engine")
    try:
        found = until(source.read, "the engine is listed")
        ray.kill(actors[0])
        left = until(lambda: None if (read := source.read()) is None else (read,), "the list changes")
    finally:
        source.close()

    assert found == [EngineAddress(f"http://{hosts[0]}:8000")]
    assert left == ([],)
