"""Properties of joining a Ray cluster: what can be told at once is told at once."""

import socket
from pathlib import Path

import pytest

from homing.cluster.config import load_settings
from homing.cluster.errors import ClusterError
from homing.cluster.local_ray import join, sockets_folder


def test_an_address_where_nobody_listens_is_told_at_once_with_the_remedy() -> None:
    """Ray itself tries for over a minute, and then speaks of its control store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

        with pytest.raises(ClusterError, match=f"no Ray cluster answers at {address}.*ray start --head"):
            join(load_settings({"ray_address": address}, environ={}))


def test_the_folder_for_sockets_is_there_before_any_process_uses_it(tmp_path: Path) -> None:
    """Several routers keep a file in it, and are often up before the first replica; a second start finds it."""
    folder = sockets_folder(tmp_path)

    assert folder.stat().st_mode & 0o777 == 0o700
    assert sockets_folder(tmp_path) == folder
