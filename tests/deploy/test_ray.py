"""`ray up` files: Ray itself accepts them, and they contain what docs/deploy.md says about them."""

import copy
import re
from typing import Any

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from homing.cluster.local_ray import NODE_ENVIRONMENT

from .files import PORT_FLAG, ROOT, pinned, read_yaml

NAMES = ["aws", "gcp", "bare"]


def starts(config: dict[str, Any]) -> list[str]:
    """The commands that start Ray, the head's first."""
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    return [command for command in commands if "ray start" in command]


@pytest.mark.parametrize("name", NAMES)
def test_ray_accepts_the_file(name: str) -> None:
    """Uses Ray's own preparation and schema, the first steps of `ray up`."""
    validate_config(prepare_config(read_yaml(f"ray/{name}.yaml")))


@pytest.mark.parametrize("name", NAMES)
def test_rays_schema_finds_a_key_that_it_does_not_know(name: str) -> None:
    """Shows that the test above can fail: a validation that accepts anything would prove nothing."""
    config = copy.deepcopy(read_yaml(f"ray/{name}.yaml")) | {"worker_setup_comands": []}

    with pytest.raises(Exception, match="worker_setup_comands"):
        validate_config(prepare_config(config))


@pytest.mark.parametrize("name", NAMES)
def test_nobody_takes_part_without_the_token(name: str) -> None:
    """Without authentication Ray runs anybody's code, and `ray start` leaves it off by default."""
    config = read_yaml(f"ray/{name}.yaml")
    told = [*config["setup_commands"], *config.get("docker", {}).get("run_options", [])]

    assert any("RAY_AUTH_MODE=token" in words for words in told)
    assert [path for path in config["file_mounts"] if path.endswith(".ray/auth_token")]


@pytest.mark.parametrize("name", NAMES)
def test_no_memory_monitor_chooses_what_dies(name: str) -> None:
    """Ray's memory monitor would kill the supervisor first, and with it all replicas."""
    config = read_yaml(f"ray/{name}.yaml")
    told = "\n".join([*config["setup_commands"], *config.get("docker", {}).get("run_options", [])])

    assert all(f"{variable}={value}" in told for variable, value in NODE_ENVIRONMENT.items())


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_installs_the_same_pinned_versions(name: str) -> None:
    """Ray rejects nodes of another version, and routers reject replicas with another tokenizer."""
    config = read_yaml(f"ray/{name}.yaml")
    (install,) = [command for command in config["setup_commands"] if "pip install" in command]
    more = [command for command in config.get("head_setup_commands", ()) if "pip install" in command]

    assert all(re.search(r" [\w-]+==[\d.]+$", command) for command in more)
    assert "--constraint ~/homing/dist/constraints.txt" in install
    assert '"$(echo ~/homing/dist/homing-*.whl)[serve]"' in install


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_images_have_the_pinned_ray(name: str) -> None:
    """The image's Ray and the wheel's pin must be the same version, or setup replaces Ray on every start."""
    docker = read_yaml(f"ray/{name}.yaml")["docker"]

    assert docker["head_image"] == f"rayproject/ray:{pinned('ray')}-py311"
    assert docker["worker_image"] == f"rayproject/ray:{pinned('ray')}-py311-gpu"


@pytest.mark.parametrize("name", NAMES)
def test_models_are_kept_where_the_hub_looks_for_them(name: str) -> None:
    """The folder must outlive the container and allow mounting a shared file system there."""
    config = read_yaml(f"ray/{name}.yaml")
    told = "\n".join([*config["setup_commands"], *config.get("docker", {}).get("run_options", [])])

    assert re.search(r"--volume /opt/homing/models:/home/ray/\.cache/huggingface|HF_HOME=\$HOME/homing/models", told)


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_a_cloud_machine_has_the_gpus_that_ray_is_told_of(name: str) -> None:
    """The autoscaler plans with these numbers: wrong ones start machines endlessly, or none."""
    types = read_yaml(f"ray/{name}.yaml")["available_node_types"]
    gpus = {"g6e.2xlarge": 1, "g2-standard-12": 1}
    machine = types["gpu"]["node_config"]

    assert types["head"]["resources"] == {"CPU": 0}
    assert types["gpu"]["resources"]["GPU"] == gpus[machine.get("InstanceType") or machine["machineType"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_lists_the_ports(name: str) -> None:
    """Whoever configures a firewall opens the ports on the page."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    ports = {port for command in starts(read_yaml(f"ray/{name}.yaml")) for _, port in PORT_FLAG.findall(command)}

    assert len(ports) >= 7
    assert [port for port in sorted(ports) if port not in page] == []


def test_all_machines_use_the_same_ports() -> None:
    """One list of ports covers all three files, head and worker."""
    flags = {
        tuple(flag for flag in PORT_FLAG.findall(command) if flag[0] != "port")
        for name in NAMES
        for command in starts(read_yaml(f"ray/{name}.yaml"))
    }

    assert len(flags) == 1
