"""Why a gang finds no place: one line names the resource and how much of it is missing."""

import pytest

from homing.cluster.control.placement_diagnosis import NodeRoom, why_no_room


def node(address: str, *, cpus: float = 8, gpus: float = 0, free_cpus: float | None = None, free_gpus: float = 0):
    total = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return NodeRoom(address, total, {"CPU": cpus if free_cpus is None else free_cpus, "GPU": free_gpus})


@pytest.mark.parametrize(
    ("bundle", "world", "nodes", "expected"),
    [
        (
            {"CPU": 1, "GPU": 1},
            4,
            [node("a", gpus=2, free_gpus=2), node("b", gpus=2, free_gpus=2)],
            "no room: 4 × 1 CPU, 1 GPU wanted on one node; no node has 4 GPU, the most on one is 2 GPU",
        ),
        ({"CPU": 1, "GPU": 0.5}, 1, [node("a")], "no node has 0.5 GPU, the most on one is 0 GPU"),
        ({"CPU": 1, "GPU": 0.5}, 1, [node("a", gpus=1, free_gpus=0.25)], "a is nearest and lacks 0.25 GPU"),
        ({"CPU": 4}, 1, [node("a", free_cpus=1), node("b", cpus=2)], "a is nearest and lacks 3 CPU"),
        ({"CPU": 0.001, "GPU": 1}, 1, [node("a", cpus=0)], "wanted on one node; no node has 1 GPU"),
        (
            {"CPU": 4, "GPU": 1},
            1,
            [node("a", cpus=2, gpus=1), node("b", cpus=8)],
            "a has 2 CPU, 1 GPU; b has 8 CPU, 0 GPU",
        ),
        ({"CPU": 1}, 1, [], "no node has 1 CPU, the most on one is 0 CPU"),
    ],
)
def test_the_missing_resource_is_named(
    bundle: dict[str, float], world: int, nodes: list[NodeRoom], expected: str
) -> None:
    """STRICT_PACK wants all ranks on one node: what the cluster has in sum does not matter."""
    assert expected in why_no_room(bundle, world, nodes)
