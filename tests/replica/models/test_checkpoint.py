"""Checkpoints load the saved numbers, and are refused if their tensors do not match the model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from homing.replica.errors import ModelError, UnsupportedModel, WeightsMismatch
from homing.replica.load.quantized import scalings
from homing.replica.load.weight_files import TensorHeader
from homing.replica.models.checkpoint import COLUMNS, ROWS, Checkpoint, dequantized

from ..toys import ToyScheduler, make_runner

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
#: Block sizes that divide neither the rows nor the columns of a toy's linears.
BLOCK = (40, 24)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().max() / 448
    return scale, scale.expand_as(weight)


def by_row(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return scale, scale.expand_as(weight)


def by_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True))
    scale, factors = torch.empty(rows, columns), torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            at = tuple(
                slice(place * step, (place + 1) * step) for place, step in zip((row, column), BLOCK, strict=True)
            )
            scale[row, column] = weight[at].abs().max() / 448
            factors[at] = scale[row, column]
    return scale, factors


KINDS: dict[str, tuple[Callable[..., Any], str, dict[str, Any] | None]] = {
    "fp8 by blocks": (by_block, "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
    "compressed-tensors by rows": (
        by_row,
        "weight_scale",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
        },
    ),
    "ModelOpt without a configuration": (by_tensor, "weight_scale", None),
}


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def quantized(folder: Path, made: Path, kind: str) -> tuple[Path, Path]:
    """Two folders: the model with FP8 linears, and the same values in float32."""
    scales_of, name, method = KINDS[kind]
    packed, plain = (Path(shutil.copytree(folder, made / each)) for each in ("packed", "plain"))
    tensors: Tensors = {}
    exact: Tensors = {}
    for key, weight in load_file(folder / "model.safetensors").items():
        tensors[key] = exact[key] = weight
        if weight.dim() != 2 or "proj" not in key:
            continue
        scale, factors = scales_of(weight)
        tensors[key] = (weight / factors).to(torch.float8_e4m3fn)
        tensors[key.replace("weight", name)] = scale.clone()
        tensors[key.replace("weight", "input_scale")] = torch.ones(())
        exact[key] = tensors[key].float() * factors
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    if method is not None:
        change_config(packed, quantization_config=method)
    return packed, plain


@pytest.mark.parametrize(
    ("model_type", "overrides", "provider"), [("qwen3", {"head_dim": 32}, "native"), ("phi3", {}, "transformers")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_models_answer_as_their_weights_in_float32(
    kind, model_type, overrides, provider, checkpoint, tmp_path, prompts, reference
):
    """Holds for both providers, whether or not the configuration declares FP8."""
    packed, plain = quantized(checkpoint(model_type, **overrides), tmp_path, kind)
    runner = make_runner(packed, provider)

    assert ToyScheduler(runner.forward, chunk=64).generate(prompts, 6) == reference(plain, prompts, 6)


@pytest.mark.parametrize("shape", [(), (3,), (3, 1, 1), (3, 4, 1), (3, 1, 6), (3, 2, 3)], ids=str)
def test_joined_experts_are_multiplied_by_their_own_scales(shape):
    """Scales per tensor, per expert, per row or column of each expert, and per 2 x 2 block."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(3, 4, 6, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=generator) + 0.5
    tensors = {"w": TensorHeader((0, 0), "F8_E4M3", (3, 4, 6)), "w_scale": TensorHeader((0, 0), "F32", shape)}
    (scaling,) = scalings(tensors, [(2, 2)])[0].values()

    found = dequantized(weight, scales, scaling, (0, 0), torch.float32)

    each = scales.reshape(3, *(shape[1:] or (1, 1))) if shape else scales.expand(3, 1, 1)
    whole = each.repeat_interleave(4 // each.shape[1], 1).repeat_interleave(6 // each.shape[2], 2)
    torch.testing.assert_close(found, weight.float() * whole)


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_an_fp8_weight_has_its_own_scales(kind, checkpoint, tmp_path):
    """Ranks may cut a weight anywhere, also within a block."""
    packed, plain = quantized(checkpoint("llama"), tmp_path, kind)
    weights, wanted = Checkpoint(packed, torch.float32, CPU), load_file(plain / "model.safetensors")[Q_PROJ]

    assert torch.equal(weights.whole(Q_PROJ), wanted)
    assert torch.equal(weights.shard(Q_PROJ, ROWS, 3, 4), wanted[48:])
    assert torch.equal(weights.shard(Q_PROJ, COLUMNS, 1, 2), wanted[:, 32:])
    assert torch.equal(weights.span(Q_PROJ, ROWS, 39, 70), wanted[39:])
    assert weights.whole("model.norm.weight").dtype == torch.float32


def test_gpt_oss_is_served_from_mxfp4(checkpoint, tmp_path, prompts, reference):
    """It is published in no other type: E2M1 numbers, 32 of which share a power of two."""
    shape = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    folder = checkpoint("gpt_oss", **shape, rope_parameters=rope)
    packed, plain = (Path(shutil.copytree(folder, tmp_path / each)) for each in ("packed", "plain"))
    numbers = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    tensors: Tensors = {}
    exact: Tensors = {}
    generator = torch.Generator().manual_seed(0)
    for key, weight in load_file(folder / "model.safetensors").items():
        tensors[key] = exact[key] = weight
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = weight.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator, dtype=torch.uint8)
        powers = torch.randint(121, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        del tensors[key]
        tensors[f"{key}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{key}_scales"] = powers
        factors = torch.exp2(powers.float() - 127)[..., None]
        exact[key] = (numbers[codes.long()] * factors).reshape(experts, outputs, inputs).mT.contiguous()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    change_config(packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})

    answers = ToyScheduler(make_runner(packed).forward, chunk=64).generate(prompts, 6)

    assert answers == reference(plain, prompts, 6)


def altered(folder: Path, made: Path, change: Callable[[Tensors], None]) -> Path:
    shutil.copytree(folder, made, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


def lose_and_add(tensors: Tensors) -> None:
    for layer in range(2):
        del tensors[f"model.layers.{layer}.self_attn.q_norm.weight"]
        tensors[f"model.layers.{layer}.self_attn.q_proj.extra"] = torch.ones(1)


@pytest.mark.parametrize("provider", ["native", "transformers"])
def test_tensors_that_lack_or_are_not_used_are_listed(provider, checkpoint, tmp_path):
    """A model with missing norms, or with tensors that it ignores, would silently answer nonsense."""
    folder = altered(checkpoint("qwen3"), tmp_path, lose_and_add)

    with pytest.raises(WeightsMismatch) as caught:
        make_runner(folder, provider)

    said = str(caught.value)
    assert "the checkpoint lacks model.layers.*.self_attn.q_norm.weight (2)" in said
    assert "does not use the checkpoint's model.layers.*.self_attn.q_proj.extra (2)" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda tensors: tensors.update({f"{Q_PROJ[:-6]}bias": torch.ones(64)}), "q_proj.bias"),
        (lambda tensors: tensors.update({f"{Q_PROJ}_scale": torch.ones(())}), "q_proj.weight_scale"),
    ],
)
@pytest.mark.parametrize("provider", ["native", "transformers"])
def test_each_difference_is_an_error(provider, change, said, checkpoint, tmp_path):
    """An untied head, a bias that the configuration denies, and scales of unquantized weights."""
    folder = altered(checkpoint("llama"), tmp_path, change)

    with pytest.raises(WeightsMismatch, match=said):
        make_runner(folder, provider)


def cut(tensors: Tensors) -> None:
    """A projection with half of the heads, and an embedding without the last tokens."""
    tensors[Q_PROJ] = tensors[Q_PROJ][:32].clone()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-5].clone()


def test_wrong_shapes_are_listed(checkpoint, tmp_path):
    """Kernels read embeddings without checking bounds, and would compute half of the heads without an error."""
    with pytest.raises(WeightsMismatch) as caught:
        make_runner(altered(checkpoint("llama"), tmp_path, cut), "native")

    assert f"{Q_PROJ} is [32, 64] instead of [64, 64]" in str(caught.value)
    assert "model.embed_tokens.weight is [206, 64] instead of [211, 64]" in str(caught.value)


def add_harmless(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


@pytest.mark.parametrize("provider", ["native", "transformers"])
def test_harmless_tensors_are_not_refused(provider, checkpoint, tmp_path, prompts, reference):
    """Precomputed tables, a tied head, scales of 8-bit KV, and a second copy in the authors' own format."""
    original = checkpoint("llama", tie_word_embeddings=True)
    folder = altered(original, tmp_path, add_harmless)
    save_file({"layers.0.attention.wq.weight": torch.ones(1)}, folder / "consolidated.safetensors")

    answers = ToyScheduler(make_runner(folder, provider).forward, chunk=64).generate(prompts, 4)

    assert answers == reference(original, prompts, 4)


def test_a_shape_that_is_not_the_models_is_an_error_of_the_model(checkpoint, tmp_path):
    """transformers raises several kinds of errors, which must become one."""
    folder = altered(checkpoint("phi3"), tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(3, 4)}))

    with pytest.raises(ModelError, match="transformers cannot load"):
        make_runner(folder)


def test_weights_in_other_types_are_refused_at_load(checkpoint, tmp_path):
    """The same check as before the start: a replica on another machine may have other files."""
    folder = altered(
        checkpoint("llama"), tmp_path, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)})
    )

    with pytest.raises(UnsupportedModel, match=r"cannot run: model\.layers\.\*\.self_attn\.q_proj\.weight \[I8\]"):
        make_runner(folder, "native")
