"""Dockerfiles and compose: linted and checked against the compose specification. Nothing is built here."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from homing import __version__
from homing.cluster.cli.main import parse
from homing.cluster.local_ray import NODE_ENVIRONMENT

from .files import DEPLOY, pinned, read_yaml, serve_commands

DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("name", [*DOCKERFILES, "Dockerfile.router"])
def test_hadolint_finds_nothing(name: str) -> None:
    """Except for findings that the file itself declares intended."""
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: its wheel has no build for this system")

    found = subprocess.run([hadolint, "--no-color", DEPLOY / "docker" / name], capture_output=True, text=True)

    assert found.stdout + found.stderr == ""


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_serves_with_the_token_on_and_holds_none(name: str) -> None:
    """Images are copied around, so a secret in one is public."""
    text = (DEPLOY / "docker" / name).read_text()
    command = json.loads(text.split("\nCMD ")[1])

    assert "RAY_AUTH_MODE=token" in text
    assert all(f"{name}={value}" in text for name, value in NODE_ENVIRONMENT.items())
    assert "RAY_AUTH_TOKEN=" not in text
    assert parse(command[1:]).settings.router.host == "0.0.0.0"


def test_the_router_s_image_installs_no_engine_and_routes() -> None:
    """Its users run engines elsewhere: torch and Ray would be 1.4 GB of it."""
    text = (DEPLOY / "docker" / "Dockerfile.router").read_text()
    command = json.loads(text.split("\nENTRYPOINT ")[1])

    assert "homing-*.whl" in text
    assert "[serve" not in text
    assert parse([*command[1:], "--backend", "http://e:1"]).settings.router.host == "0.0.0.0"


def test_the_cuda_image_has_what_triton_builds_its_launcher_with() -> None:
    """A slim Python image has no compiler, without which Triton cannot launch; the build itself checks the headers."""
    text = (DEPLOY / "docker" / "Dockerfile.cuda").read_text()
    (packages,) = re.findall(r"--no-install-recommends (.*?) \\", text)

    assert {"gcc", "libc6-dev"} <= set(packages.split())
    assert "-include Python.h" in text


def test_the_cuda_image_has_the_preferred_attention_in_the_version_that_was_compiled() -> None:
    """flash-attn-4 accepts any newer compiler (nvidia-cutlass-dsl), of which some could not compile it."""
    text = (DEPLOY / "docker" / "Dockerfile.cuda").read_text()
    extra = [Requirement(word) for word in requires("homing") or [] if 'extra == "flash-attn"' in word]

    assert '"$(echo /tmp/dist/homing-*.whl)[serve,flash-attn]"' in text
    assert [f"=={pinned(each.name)}" for each in extra] == [str(each.specifier) for each in extra]
    assert all(map(pinned, ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "quack-kernels")))


def test_everything_that_an_image_installs_is_pinned() -> None:
    """`ray[default]` installs more than `ray`: if that were unpinned, two builds of one commit would differ."""
    extras = [Requirement(word) for word in requires("ray") or [] if 'extra == "default"' in word]
    names = [each.name for each in extras if each.marker is None or each.marker.evaluate({"extra": "default"})]

    assert len(names) > 5
    assert all(pinned(re.sub("[-_]", "[-_]", name)) for name in names)


def valid_compose(file: str) -> Any:
    """The parsed file; raises if it violates the compose specification."""
    import compose_spec  # imported here because every test process collects this file, but only one runs it

    read = compose_spec.PyCompose.from_yaml(yaml.safe_dump(read_yaml(file)))
    read.validate()
    return read


def test_the_compose_file_fits_the_specification() -> None:
    """The specification is what `docker compose config` checks."""
    read = valid_compose("docker/compose.yaml")

    assert {"head", "replica", "prometheus", "grafana"} == set(read.service_names())


def test_the_compose_file_for_vllm_serves_with_it_on_gpus() -> None:
    """It overrides the other file, and must name the environment that its image contains."""
    read = read_yaml("docker/compose-vllm.yaml")
    services, image = read["services"], (DEPLOY / "docker" / "Dockerfile.cuda").read_text()
    (serve,) = serve_commands(services["head"]["command"][-1])
    settings = parse(serve.split()).settings

    valid_compose("docker/compose-vllm.yaml")
    assert services.keys() <= read_yaml("docker/compose.yaml")["services"].keys()
    assert (settings.replica.engine, settings.replica.engine_python) == ("vllm", "/opt/vllm/bin/python")
    assert "/opt/vllm/bin/pip install" in image
    assert services["head"]["build"]["args"].keys() <= set(re.findall(r"^ARG (\w+)=", image, re.MULTILINE))
    assert "--num-gpus=1" in services["replica"]["command"]


def test_the_compose_file_serves_two_cpu_replicas_on_two_containers() -> None:
    """Each replica container has resources for one rank, the head for none."""
    services = read_yaml("docker/compose.yaml")["services"]
    (serve,) = serve_commands(services["head"]["command"][-1])
    settings = parse(serve.split()).settings

    assert settings.cluster.replicas == services["replica"]["deploy"]["replicas"] == 2
    assert "--num-cpus=0" in services["head"]["command"][-1]
    assert "--num-cpus=1" in services["replica"]["command"]
    assert services["replica"]["image"] == services["head"]["image"] == f"homing:{__version__}-cpu"


def test_what_compose_opens_is_bound_to_loopback() -> None:
    """A published port bypasses the host's firewall."""
    services = read_yaml("docker/compose.yaml")["services"].values()
    ports = [port for service in services for port in service.get("ports", [])]

    assert len(ports) == 3
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_what_compose_mounts_is_there() -> None:
    """Docker creates an empty folder for a missing mount source."""
    folder = DEPLOY / "docker"
    services = read_yaml("docker/compose.yaml")["services"].values()
    sources = [volume.split(":")[0] for service in services for volume in service.get("volumes", [])]
    paths = [source for source in sources if source.startswith(".")]

    assert len(paths) == 3
    assert [path for path in paths if not (folder / path).is_dir()] == []
