"""Imports vLLM once and quietly. Tests are skipped where vLLM is missing; `make compat` installs it."""

import importlib.util
import logging
import os
import warnings

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test of this folder the marker `compat`, and skip it if vLLM is missing."""
    here = [item for item in items if "/events/compat/" in item.nodeid]
    missing = importlib.util.find_spec("vllm") is None
    for item in here:
        item.add_marker(pytest.mark.compat)
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make compat"))


def _import_quietly() -> None:
    # vLLM warns of a missing GPU and of deprecated dependencies; our tests treat warnings as errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.distributed.kv_events
        import vllm.v1.core.kv_cache_manager  # noqa: F401


if importlib.util.find_spec("vllm") is not None:
    _import_quietly()
    logging.getLogger("vllm").setLevel(logging.ERROR)
