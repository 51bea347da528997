"""homing on Ray's own autoscaler: a machine is added when a replica needs one. The machines are Ray's fake ones.

The heads of `aws.yaml` and `gcp.yaml` and KubeRay's head pod run the same code with another provider. The test runs in
its own namespaces, because `ray start` takes fixed ports and its helpers outlive it. Only one machine can be shown: Ray
2.60 tells machines' usage apart by their address, which fake machines share.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from homing.cluster.local_ray import NODE_ENVIRONMENT

from .hosts import NAMESPACES, why_not

pytestmark = [pytest.mark.slow, pytest.mark.every_commit, pytest.mark.cluster, pytest.mark.timeout(300)]

NODE = "f" * 56
EMPTY_LISTS = ("initialization_commands", "setup_commands", "rsync_exclude", "rsync_filter", "cluster_synced_files")
EMPTY_LISTS += tuple(f"{who}_{what}" for who in ("head", "worker") for what in ("setup_commands", "start_ray_commands"))
CONFIG = {
    "cluster_name": "fake",
    "max_workers": 1,
    "provider": {"type": "fake_multinode"},
    "available_node_types": {
        "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
    },
    "head_node_type": "head",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 5,
    "file_mounts_sync_continuously": False,
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{name: [] for name in EMPTY_LISTS},
}
#: Runs in the namespaces, which contain nothing else: a head without resources, then a replica that needs some.
SCRIPT = """
set -e
mount --make-rprivate /
ip link set lo up
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm
ray() { "$PYTHON" -P -c 'from ray.scripts.scripts import main; main()' "$@"; }
homing() { "$PYTHON" -P -m homing.cluster.cli.main "$@"; }
ray get-auth-token --generate > /dev/null
start="ray start --head --num-cpus=0 --include-dashboard=false --object-store-memory=80000000"
$start --autoscaling-config="$CONFIG" > /dev/null
timeout 200 "$PYTHON" -P -m homing.cluster.cli.main serve --ray-address auto --port 8000 --replicas 1 --detach
homing status --json > "$HOME/status.json"
homing stop
"""


def test_a_machine_comes_for_a_replica_that_wants_room(tmp_path: Path) -> None:
    """The autoscaler acts on the pending placement group. Also, no setting says that Ray requires a token: Ray finds
    the token file, and homing's commands must find it, too."""
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told = {"HOME": str(tmp_path), "PYTHON": sys.executable, "CONFIG": str(tmp_path / "config.json")}
    fake = {"RAY_FAKE_CLUSTER": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": NODE, "RAY_enable_autoscaler_v2": "0"}
    ours = {"HOMING_STATE_DIR": str(tmp_path / "state"), "HF_HUB_OFFLINE": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOMING_", "RAY_"))}
    done = subprocess.run(
        [*NAMESPACES, "bash", "-c", SCRIPT],
        env=kept | told | fake | ours | NODE_ENVIRONMENT | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "state" / "default.log").read_text()
    assert re.search(r"r0 +no room: 1 × 1 CPU needed on one node; no node has 1 CPU", log)
    (replica,) = json.loads((tmp_path / "status.json").read_text())["replicas"]
    assert (replica["replica_id"], replica["state"]) == ("r0", "serving")
