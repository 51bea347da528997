"""Models that are refused by their configuration alone, and the files that are fetched from a repository."""

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from homing.cluster.cli.doctor import examine_settings
from homing.cluster.config import load_settings
from homing.cluster.errors import ModelUnavailable, SettingsError
from homing.cluster.model_source import check_runnable, find_model, has_chat_template, model_limits
from homing.cluster.preflight import check_folder
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(demo_model_path(), tmp_path / "model"))


def change(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes"])
def test_a_quantized_checkpoint_is_refused_with_the_reason(folder: Path, method: str) -> None:
    """Otherwise it would fail after 45 s with useless advice to install a package; doctor reports the same reason."""
    change(folder, quantization_config={"quant_method": method, "bits": 4})
    settings = load_settings({"model": str(folder), "port": "0"}, {})

    with pytest.raises(ModelUnavailable, match=rf"config.json: the weights are quantized \({method}\).*original model"):
        check_folder(folder, settings)
    (finding,) = [each for each in examine_settings(settings, None) if each.check == "model"]
    assert (finding.level, f"({method})" in finding.message) == ("error", True)


def test_what_transformers_converts_is_not_refused(folder: Path) -> None:
    """gpt-oss is published only in mxfp4."""
    change(folder, quantization_config={"quant_method": "mxfp4"})

    check_runnable(folder)


def test_packed_weights_are_refused_whatever_the_configuration_says(folder: Path) -> None:
    """Old AutoGPTQ and AWQ folders describe their weights in a separate file; doctor reports the same reason."""
    import torch  # takes seconds, so not at import for every process that collects tests
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name.replace("weight", "qweight")] = tensors.pop(name).to(torch.int32)
    save_file(tensors, folder / "model.safetensors")
    settings = load_settings({"model": str(folder), "port": "0"}, {})

    with pytest.raises(ModelUnavailable, match=r"homing cannot run: model\.layers.*q_proj\.qweight \[I32\]; choose"):
        check_folder(folder, settings)
    (finding,) = [each for each in examine_settings(settings, None) if each.check == "model"]
    assert (finding.level, "qweight" in finding.message) == ("error", True)


def test_gguf_files_are_refused_by_their_name(folder: Path) -> None:
    """Such a folder holds a complete model, so "missing files" would mislead the user."""
    (folder / "model.safetensors").rename(folder / "model.Q4_K_M.gguf")

    with pytest.raises(ModelUnavailable, match="contains GGUF files"):
        check_folder(folder, load_settings({}, {}))
    with pytest.raises(ModelUnavailable, match=r"model\.Q4_K_M\.gguf is a GGUF file"):
        find_model(ReplicaSettings(model=str(folder / "model.Q4_K_M.gguf")))


@pytest.mark.parametrize(
    ("kind", "known"), [("no-such-family", False), ("llama", True), ("phi3", True), ("bloom", True)]
)
def test_an_unknown_model_type_is_refused_before_ray_starts(folder: Path, kind: str, known: bool) -> None:
    """Whether a model type known to transformers can be served is decided when it is loaded."""
    change(folder, model_type=kind)

    if known:
        check_runnable(folder)
    else:
        with pytest.raises(ModelUnavailable, match=r"config.json: model_type 'no-such-family' is unknown"):
            check_runnable(folder)


def test_a_chat_template_is_found_wherever_it_is_kept(folder: Path) -> None:
    """In a separate file or in the tokenizer's settings; without one, the banner shows a completion request."""
    assert has_chat_template(folder)
    (folder / "chat_template.jinja").unlink()
    assert not has_chat_template(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    assert has_chat_template(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A hub with one repository; returns the list of fetched file names."""
    fetched: list[str] = []

    def serve(folder: Path) -> list[str]:
        from huggingface_hub.utils import filter_repo_objects

        def one(_: str, name: str, **__: object) -> str:
            fetched.append(name)
            return str(folder / name)

        def many(_: str, *, allow_patterns: list[str], ignore_patterns: list[str] | None = None, **__: object) -> str:
            names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            fetched.extend(filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
            return str(folder)

        monkeypatch.setattr("huggingface_hub.hf_hub_download", one)
        monkeypatch.setattr("huggingface_hub.snapshot_download", many)
        return fetched

    return serve


def test_weights_are_fetched_once(folder: Path, hub: Callable[..., list[str]]) -> None:
    """Repositories that also hold the authors' own format would take twice the time and disk space."""
    (folder / "consolidated.safetensors").touch()
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.safetensors").touch()
    fetched = hub(folder)

    assert find_model(ReplicaSettings(model="org/fox")) == folder
    assert [name for name in fetched if name.endswith("safetensors")] == ["model.safetensors"]


def test_the_older_format_is_fetched_only_if_there_is_no_other(folder: Path, hub: Callable[..., list[str]]) -> None:
    """Many repositories have both, of equal size."""
    (folder / "pytorch_model.bin").touch()
    fetched = hub(folder)

    find_model(ReplicaSettings(model="org/fox"))
    assert "pytorch_model.bin" not in fetched

    (folder / "model.safetensors").unlink()
    find_model(ReplicaSettings(model="org/fox"))
    assert "pytorch_model.bin" in fetched


def test_a_model_that_cannot_run_is_not_fetched(folder: Path, hub: Callable[..., list[str]]) -> None:
    """Its first file already shows the problem, before gigabytes are fetched."""
    change(folder, quantization_config={"quant_method": "awq"})
    fetched = hub(folder)

    with pytest.raises(ModelUnavailable, match=r"\(awq\)"):
        find_model(ReplicaSettings(model="org/fox"))
    assert fetched == ["config.json"]


def test_limits_come_from_the_models_configuration(tmp_path: Path) -> None:
    """No weights are read. Models that accept images nest these settings one level deeper."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 2}))
    plain = model_limits(tmp_path, ReplicaSettings(), "fox")
    nested = {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": [2, 3]}
    config.write_text(json.dumps({"text_config": nested}))
    below = model_limits(tmp_path, ReplicaSettings(max_model_len=32), "fox")

    assert (plain.name, plain.vocab_size, plain.max_model_len, plain.eos_token_ids) == ("fox", 9, 64, (2,))
    assert (below.max_model_len, below.eos_token_ids) == (32, (2, 3))


@pytest.mark.parametrize(("general", "ends"), [({}, (0,)), ({"eos_token_id": None}, (0,)), ({"eos_token_id": 5}, (5,))])
def test_a_token_that_ends_answers_may_be_number_zero(
    tmp_path: Path, general: dict[str, object], ends: tuple[int, ...]
) -> None:
    """As in SmolLM. The generation configuration takes precedence only if it names one."""
    config = {"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(general))

    assert model_limits(tmp_path, ReplicaSettings(), "fox").eos_token_ids == ends


def test_a_configuration_that_tells_nothing_is_refused(tmp_path: Path) -> None:
    """An error is better than an invented limit."""
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')

    with pytest.raises(ModelUnavailable, match="--max-model-len"):
        model_limits(tmp_path, ReplicaSettings(), "fox")


def test_an_external_engine_may_run_what_ours_cannot(folder: Path) -> None:
    """Quantized weights are a reason to choose one. Its environment must exist."""
    change(folder, quantization_config={"quant_method": "awq"})
    settings = load_settings({"engine": "vllm", "engine_python": sys.executable}, {})

    check_folder(folder, settings)
    with pytest.raises(SettingsError, match="engine_python: /nowhere is not executable"):
        check_folder(folder, load_settings({"engine": "vllm", "engine_python": "/nowhere"}, {}))
    with pytest.raises(SettingsError, match="vllm is not installed in homing's environment"):
        check_folder(folder, load_settings({"engine": "vllm"}, {}))


@pytest.mark.parametrize(
    "config", [{"model_type": "t5"}, {"model_type": "bart", "is_encoder_decoder": True}, {"model_type": "vit"}]
)
def test_a_model_that_continues_no_text_is_refused_by_its_configuration(
    tmp_path: Path, config: dict[str, object]
) -> None:
    """transformers knows these types, and loading them failed only after the cluster had started."""
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelUnavailable, match="does not continue text"):
        check_runnable(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "gpt_oss", "bloom"])
def test_models_that_continue_text_pass(tmp_path: Path, kind: str) -> None:
    """Whether they come from our families or from transformers."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))

    check_runnable(tmp_path)


def test_an_adapter_is_called_what_it_is(tmp_path: Path) -> None:
    """Its folder has no config.json either, and fetching it again would not help."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')

    with pytest.raises(ModelUnavailable, match=r"LoRA adapter.*merge it into org/base"):
        find_model(ReplicaSettings(model=str(tmp_path)))


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its client retried for 23 s; the cache is still used, so that a model fetched earlier can be served."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)

        with pytest.raises(
            ModelUnavailable, match=r"nor in the hub's cache, and http://127.0.0.1:\d+ cannot be reached"
        ):
            find_model(ReplicaSettings(model="org/never-fetched"))
