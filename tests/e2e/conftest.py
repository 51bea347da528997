"""One cluster of two demo replicas for all tests that can share one."""

from collections.abc import Iterator

import pytest

from .running import Serving, serving


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two CPU replicas of the demo model behind one router."""
    with serving(tmp_path_factory.mktemp("state"), "--replicas", "2") as running:
        yield running
