"""What `homing serve --backend` settles before it serves."""

import json
from pathlib import Path

import msgspec
import pytest

from homing.cluster.cli.attach import model_limits, model_names
from homing.cluster.cli.main import parse
from homing.cluster.config import Settings
from homing.cluster.errors import ModelUnavailable
from homing.replica.config import ReplicaSettings
from homing.router.config import RouterSettings


def settings_for(model: str = "org/m", *, max_model_len: int = 0, **router: str) -> Settings:
    replica = ReplicaSettings(model=model, max_model_len=max_model_len)
    return msgspec.structs.replace(Settings(), replica=replica, router=RouterSettings(**router))


def folder(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_flags_may_be_given_again() -> None:
    """One pair for each server reads better than two lists."""
    words = ["serve", "m", "--backend", "http://a", "--events", "tcp://a:1", "--backend", "http://b,http://c"]

    settings = parse(words).settings

    assert settings.router.backend == "http://a,http://b,http://c"
    assert settings.router.events == "tcp://a:1"


def test_limits_come_from_the_models_configuration(tmp_path: Path) -> None:
    """No weights are read; models that take images keep theirs one level below."""
    plain = model_limits(folder(tmp_path, vocab_size=9, max_position_embeddings=64, eos_token_id=2), settings_for())
    nested = {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": [2, 3]}
    below = model_limits(folder(tmp_path, text_config=nested), settings_for(max_model_len=32))

    assert (plain.vocab_size, plain.max_model_len, plain.eos_token_ids) == (9, 64, (2,))
    assert (below.max_model_len, below.eos_token_ids) == (32, (2, 3))


def test_a_configuration_that_tells_nothing_is_refused(tmp_path: Path) -> None:
    """Better than a limit that is made up."""
    with pytest.raises(ModelUnavailable, match="--max-model-len"):
        model_limits(folder(tmp_path, vocab_size=9), settings_for())


def test_the_model_goes_by_the_name_that_was_given_or_set() -> None:
    """A server may call it by its whole name or its last part."""
    assert model_names(settings_for("org/m", served_model_name="fox")) == ("org/m", "fox", "m")
    assert model_names(settings_for("org/m", backend_model="other")) == ("other",)
