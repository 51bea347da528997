"""Manifests: plain objects and pods against Kubernetes' published schemas, the rest against the code that reads it.

KubeRay's own definitions are in no package index. Instead: Ray's own reading of a RayCluster (its autoscaler turns one
into a configuration and validates that), Kubernetes' schemas for the pods inside, and the names of the fields used
here, taken from KubeRay 1.6's API reference.
"""

import copy
from typing import Any

import kubernetes_validate
import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from homing.cluster.cli.main import parse

from .files import pinned, read_all

SCHEMAS = kubernetes_validate.latest_version()
CLUSTER_FIELDS = {
    "rayVersion",
    "authOptions",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "headGroupSpec",
    "workerGroupSpecs",
}
HEAD_FIELDS = {"rayStartParams", "template"}
WORKER_FIELDS = HEAD_FIELDS | {"groupName", "replicas", "minReplicas", "maxReplicas"}
JOB_FIELDS = {"clusterSelector", "entrypoint", "submissionMode"}


def manifests() -> dict[str, dict[str, Any]]:
    """All objects by kind."""
    return {found["kind"]: found for name in ("raycluster", "rayjob") for found in read_all(f"kubernetes/{name}.yaml")}


def groups() -> list[dict[str, Any]]:
    spec = manifests()["RayCluster"]["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "Service"])
def test_a_plain_object_fits_kubernetes_schema(kind: str) -> None:
    """Strict validation: an unknown field is a mistake."""
    kubernetes_validate.validate(manifests()[kind], SCHEMAS, strict=True)


@pytest.mark.parametrize("group", groups(), ids=["head", "gpu"])
def test_a_pod_of_the_cluster_fits_kubernetes_schema(group: dict[str, Any]) -> None:
    """KubeRay passes the template on unchanged."""
    pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}

    kubernetes_validate.validate(pod, SCHEMAS, strict=True)


def test_the_schema_finds_a_misspelt_field() -> None:
    """Shows that the tests above can fail."""
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(groups()[0]["template"])}
    pod["spec"]["tolerationz"] = []

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, SCHEMAS, strict=True)


def test_rays_autoscaler_reads_the_cluster() -> None:
    """This code runs in the head's pod: it derives the number of workers and the resources of each."""
    cluster = copy.deepcopy(manifests()["RayCluster"])
    cluster["metadata"]["namespace"] = "default"

    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]

    assert types["headgroup"]["resources"]["CPU"] == 0
    assert types["gpu"]["resources"]["GPU"] == 1
    assert (types["gpu"]["min_workers"], types["gpu"]["max_workers"]) == (1, 4)


def test_only_fields_that_kuberay_knows_are_used() -> None:
    """Kubernetes silently drops fields that a definition does not name."""
    cluster, job = manifests()["RayCluster"]["spec"], manifests()["RayJob"]["spec"]

    assert set(cluster) == CLUSTER_FIELDS
    assert set(cluster["headGroupSpec"]) == HEAD_FIELDS
    assert [set(group) for group in cluster["workerGroupSpecs"]] == [WORKER_FIELDS]
    assert set(job) == JOB_FIELDS


def test_the_cluster_asks_for_the_token_and_the_pinned_ray() -> None:
    """From Ray 2.52 on KubeRay creates and distributes the token, so it must know the version."""
    spec = manifests()["RayCluster"]["spec"]

    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == pinned("ray")


def test_the_service_and_the_job_find_the_cluster() -> None:
    """The three objects refer to each other only by labels."""
    name = manifests()["RayCluster"]["metadata"]["name"]
    service, job = manifests()["Service"]["spec"], manifests()["RayJob"]["spec"]
    ports = {port["name"] for port in groups()[0]["template"]["spec"]["containers"][0]["ports"]}

    assert service["selector"] == {"ray.io/cluster": name, "ray.io/node-type": "head"}
    assert job["clusterSelector"] == {"ray.io/cluster": name}
    assert service["ports"][0]["targetPort"] in ports


def test_the_job_for_vllm_differs_by_its_engine_alone() -> None:
    """The checks of the other job therefore hold for this one, too."""
    job, other = read_all("kubernetes/rayjob-vllm.yaml")[0], copy.deepcopy(manifests()["RayJob"])
    words = job["spec"].pop("entrypoint").split()
    common = other["spec"].pop("entrypoint").split()

    assert job == other
    assert words == [*common, "--engine", "vllm", "--engine-python", "/opt/vllm/bin/python"]
    assert parse(words[1:]).settings.replica.engine == "vllm"


def test_the_jobs_command_is_one_that_homing_understands() -> None:
    """Its replicas must also fit into a worker: all ranks of a replica are on one pod."""
    words = manifests()["RayJob"]["spec"]["entrypoint"].split()
    settings = parse(words[1:]).settings
    gpus = int(groups()[1]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])

    assert words[0] == "homing"
    assert settings.cluster.ray_address == "auto"
    assert settings.cluster.autoscale == "{minReplicas}:{maxReplicas}".format(**groups()[1])
    assert settings.replica.tensor_parallel_size * settings.cluster.gpus_per_rank <= gpus


def test_pods_keep_compiled_kernels_on_a_volume_that_they_may_write() -> None:
    """A pod has a new file system: without a volume, its first requests wait for kernels again."""
    for group in groups():
        (container,) = group["template"]["spec"]["containers"]
        (cache,) = [each["value"] for each in container["env"] if each["name"] == "XDG_CACHE_HOME"]
        mounts = [each for each in container["volumeMounts"] if cache.startswith(f"{each['mountPath']}/")]
        assert [mount["name"] for mount in mounts if not mount.get("readOnly")] == ["models"]
