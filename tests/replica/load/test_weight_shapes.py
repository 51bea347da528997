"""Weights that do not fit config.json are found by their headers; whatever fits, or cannot be told, passes."""

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from homing.replica.load.weight_shapes import headers_problem

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
#: Native families, then those that only transformers builds, with other names of sizes and tensors.
FAMILIES = [
    {"model_type": "llama", **SIZES},
    {"model_type": "mistral", **SIZES},
    {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    {"model_type": "qwen3", **SIZES, "head_dim": 16},
    {"model_type": "gemma2", **SIZES, "head_dim": 16},
    {"model_type": "phi", **SIZES},
    {"model_type": "gpt_neox", **SIZES},
    {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    {"model_type": "opt", **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    {"model_type": "falcon", **SIZES},
]


def shapes_of(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the family's tensors, as transformers builds it."""
    values = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(str(config["model_type"]), **values))
    tied = config.get("tie_word_embeddings")
    return {name: tuple(each.shape) for name, each in model.state_dict().items() if not (tied and "lm_head" in name)}


@pytest.fixture(params=FAMILIES, ids=lambda config: config["model_type"])
def config(request: pytest.FixtureRequest) -> dict[str, object]:
    return request.param


def test_what_transformers_builds_from_a_configuration_fits_it(config: dict[str, object]) -> None:
    """A check that refuses a working model is worse than no check."""
    assert headers_problem(config, shapes_of(config)) is None


@pytest.mark.parametrize("names", [("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("vocab_size",)])
@pytest.mark.parametrize("factor", [0.5, 2])
def test_another_size_in_the_configuration_is_named(config, names: tuple[str, ...], factor: float) -> None:
    """Loading would fail on it after the whole cluster has started."""
    shapes = shapes_of(config)
    changed = {name: int(value * factor) if name in names else value for name, value in config.items()}
    if "word_embed_proj_dim" in config and "hidden_size" in names:
        changed["word_embed_proj_dim"] = changed["hidden_size"]

    assert headers_problem(changed, shapes)


@pytest.mark.parametrize("name", ["intermediate_size", "num_key_value_heads", "head_dim"])
def test_native_models_are_compared_in_every_size(name: str) -> None:
    """Their names and shapes are known without building the model."""
    config = {"model_type": "qwen3", **SIZES, "head_dim": 16}
    shapes = shapes_of(config)

    problem = headers_problem({**config, name: config[name] * 2}, shapes)

    assert problem is not None
    assert "instead of" in problem


def test_a_lost_tensor_is_named() -> None:
    """The index may be whole, and a shard of another revision."""
    config = {"model_type": "llama", **SIZES}
    shapes = shapes_of(config)
    del shapes["model.layers.1.mlp.up_proj.weight"]

    assert headers_problem(config, shapes) == "the checkpoint lacks model.layers.*.mlp.up_proj.weight"


@pytest.mark.parametrize("left_out", [*SIZES, "head_dim"])
def test_sizes_that_the_configuration_leaves_to_the_family_are_not_guessed(left_out: str) -> None:
    """transformers has a default for each, which differs between families and versions."""
    config = {"model_type": "qwen3", **SIZES, "head_dim": 16}
    shapes = shapes_of(config)
    del config[left_out]

    assert headers_problem(config, shapes) is None


def test_layers_that_only_predict_ahead_are_no_mismatch() -> None:
    """They are in the checkpoints of DeepSeek and GLM, and not used."""
    config = {"model_type": "glm4_moe", **SIZES, "num_nextn_predict_layers": 1}
    shapes = {f"model.layers.{layer}.mlp.up_proj.weight": (48, 32) for layer in range(3)}

    assert headers_problem(config, shapes) is None
    assert headers_problem({**config, "num_nextn_predict_layers": 0}, shapes)


@pytest.mark.parametrize("value", ["many", [], 1.5, {}])
def test_odd_values_are_left_to_other_checks(value: object) -> None:
    """They report config.json as malformed, or the family's own defaults apply."""
    config = msgspec.json.decode(msgspec.json.encode({"model_type": "llama", **SIZES, "num_hidden_layers": value}))

    assert headers_problem(config, {"model.embed_tokens.weight": (64, 32)}) is None
