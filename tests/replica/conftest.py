"""Random checkpoints and transformers' answers, made once per session. Only tests that use them load torch."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("llama", head_dim=32)` returns the folder of such a model."""
    from .toys import save_checkpoint

    made: dict[str, Path] = {}

    def make(model_type: str, **overrides: Any) -> Path:
        key = f"{model_type} {sorted(overrides.items())}"
        if key not in made:
            made[key] = save_checkpoint(tmp_path_factory.mktemp(model_type), model_type, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts for a vocabulary of at least 211 tokens; some share their first blocks."""
    from .toys import make_prompts

    return make_prompts()


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, list[list[int]], int], list[list[int]]]:
    """`reference(folder, prompts, new_tokens)` returns the greedy answers of transformers' `generate`."""
    from .toys import generate

    known: dict[str, list[list[int]]] = {}

    def answers(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        key = f"{folder} {prompts} {new_tokens}"
        if key not in known:
            known[key] = generate(folder, prompts, new_tokens)
        return known[key]

    return answers


@pytest.fixture
def free_port() -> int:
    """A free port where the ranks of a group can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
