"""Properties of joining a Ray cluster: what can be told at once is told at once."""

import socket

import pytest

from homing.cluster.config import load_settings
from homing.cluster.errors import ClusterError
from homing.cluster.local_ray import join


def test_an_address_where_nobody_listens_is_told_at_once_with_the_remedy() -> None:
    """Ray itself tries for over a minute, and then speaks of its control store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"

        with pytest.raises(ClusterError, match=f"no Ray cluster answers at {address}.*ray start --head"):
            join(load_settings({"ray_address": address}, environ={}))
