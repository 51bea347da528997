"""Every provider gives transformers' own greedy answers, token for token, however the steps are composed."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from homing.kvcache.config import KvCacheSettings
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path
from homing.replica.engine.step_plan import PlanRow, plan_of_rows
from homing.replica.errors import ModelError, UnsupportedModel, WeightsMissing
from homing.replica.execute.runner import ModelRunner
from homing.replica.kernels.cpu.linear.product import pack, product
from homing.replica.load.preflight import check_model
from homing.replica.models import layers
from homing.replica.models.layers import Int8Linear, Linear, few_rows, int8_problem, packing_problem
from homing.replica.models.loading import eos_token_ids
from homing.replica.models.native import NativeModel, inverse_frequencies, layer_windows, native_problem
from homing.replica.models.spec import FAMILIES, KvShape, split_problem

from ..toys import BLOCK_SIZE, ToyScheduler, make_runner

NEW_TOKENS = 10
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_EXPERTS = {"num_experts": 4, **EXPERTS}

NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with an explicit head size": ("llama", {"head_dim": 32}),
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with one KV head per head": ("llama", {"num_key_value_heads": 4}),
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama with linear rope": ("llama", {"rope_parameters": DEFAULT_ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "llama in many files": ("llama", {"seed": 3, "shard": "60KB"}),
    "llama with odd sizes": (
        "llama",
        {"hidden_size": 60, "head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a sliding window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {}),
    "qwen2 with tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with one sliding layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with sliding layers": (
        "qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral with a sliding window": ("mixtral", {"num_local_experts": 4, "sliding_window": 11}),
    "qwen2_moe with a shared expert": ("qwen2_moe", QWEN_EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen2_moe with a layer without experts": (
        "qwen2_moe",
        QWEN_EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN_EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe with a sliding window": (
        "qwen3_moe",
        QWEN_EXPERTS | {"head_dim": 16, "use_sliding_window": True, "sliding_window": 11},
    ),
    "qwen3_moe with a layer without experts": ("qwen3_moe", QWEN_EXPERTS | {"head_dim": 16, "mlp_only_layers": [0]}),
}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2 with windows and softcaps": ("gemma2", {"sliding_window": 11, "head_dim": 16}),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {}),
    "olmo2": ("olmo2", {}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, **EXPERTS}),
    "gpt_oss with sinks": (
        "gpt_oss",
        {"head_dim": 16, "sliding_window": 11, "num_local_experts": 4, "rope_parameters": DEFAULT_ROPE, **EXPERTS},
    ),
}


MIXTURE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    **EXPERTS,
} | {"first_k_dense_replace": 1}
LATENT = {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 32} | {
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
WINDOW = {"sliding_window": 11}
#: Model types that run transformers' code on our attention, as small as their configurations allow.
BREADTH: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": WINDOW,
    "deepseek_v2": MIXTURE | LATENT,
    "deepseek_v3": MIXTURE | LATENT,
    "dots1": MIXTURE | {"n_shared_experts": 1},
    "ernie4_5": {},
    "ernie4_5_moe": MIXTURE | {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": {},
    "gemma": {},
    "gemma2": WINDOW | {"query_pre_attn_scalar": 16},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 16},
    "gemma4_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": MIXTURE,
    "glm4_moe_lite": MIXTURE | LATENT,
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": MIXTURE | WINDOW,
    "granite": {},
    "granitemoe": MIXTURE,
    "helium": {},
    "hunyuan_v1_dense": {},
    "internlm3": {},
    "lfm2": {},
    "llama": {},
    "llama4_text": MIXTURE,
    "minicpm3": LATENT,
    "minimax_m2": MIXTURE,
    "ministral": WINDOW,
    "mistral": WINDOW,
    "mixtral": MIXTURE,
    "nemotron": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": MIXTURE,
    "opt": {},
    "phi": {},
    "phi3": {},
    "phimoe": MIXTURE,
    "qwen2": {},
    "qwen2_moe": MIXTURE | {"shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": MIXTURE,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("variant", NATIVE)
def test_native_decoder_answers_as_transformers(variant, chunk, checkpoint, prompts, reference):
    """Prefix reuse, odd chunk sizes and steps that mix prefill with decode must not change the answers."""
    model_type, overrides = NATIVE[variant]
    folder = checkpoint(model_type, **overrides)
    runner = make_runner(folder, "native")
    scheduler = ToyScheduler(runner.forward, chunk)

    answers = scheduler.generate(prompts, NEW_TOKENS)

    assert answers == reference(folder, prompts, NEW_TOKENS)
    assert scheduler.hit_tokens > 0
    assert scheduler.mixed_steps > 0


@pytest.mark.parametrize("variant", ADAPTED)
def test_adapted_model_answers_as_transformers(variant, checkpoint, prompts, reference):
    """The same property for models that run transformers' code on our attention."""
    model_type, overrides = ADAPTED[variant]
    folder = checkpoint(model_type, **overrides)
    scheduler = ToyScheduler(make_runner(folder, "transformers").forward, chunk=7)

    answers = scheduler.generate(prompts, NEW_TOKENS)

    assert answers == reference(folder, prompts, NEW_TOKENS)
    assert scheduler.hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", BREADTH)
def test_many_other_models_answer_as_transformers(model_type, checkpoint, prompts, reference):
    """The fallback is one generic function, so its coverage has to be tested model by model."""
    folder = checkpoint(model_type, **({"head_dim": 16} | BREADTH[model_type]))

    answers = ToyScheduler(make_runner(folder, "transformers").forward, chunk=7).generate(prompts, NEW_TOKENS)

    assert answers == reference(folder, prompts, NEW_TOKENS)


def test_demo_model_answers_as_transformers(reference):
    """Newcomers judge homing by the shipped model; its bfloat16 weights run in float32 here."""
    prompts = [[5 + i for i in range(length)] for length in (3, 40, 40, 17)]
    scheduler = ToyScheduler(make_runner(demo_model_path(), "native").forward, chunk=16)

    assert scheduler.generate(prompts, 16) == reference(demo_model_path(), prompts, 16)


def test_both_providers_give_the_same_logits(checkpoint, prompts):
    """Greedy answers could agree by luck; logits at all positions cannot."""
    folder = checkpoint("qwen3", head_dim=32)
    both = []
    for provider in ("native", "transformers"):
        logits = []
        runner = make_runner(folder, provider)

        def keep(plan, runner=runner, logits=logits):
            every = msgspec.structs.replace(plan, logits_at=list(range(sum(plan.q_lens))))
            result = runner.forward(every)
            logits.append(result)
            return result[plan.logits_at]

        ToyScheduler(keep, chunk=13).generate(prompts, 4)
        both.append(torch.cat(logits))

    torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-4)


def test_provider_follows_the_configuration(checkpoint):
    """`auto` must not choose the native decoder for a model that it would compute wrongly."""
    native = make_runner(checkpoint("llama"))
    adapted = make_runner(checkpoint("llama", rope_parameters={**DEFAULT_ROPE, "rope_type": "yarn", "factor": 2.0}))

    assert isinstance(native._model, NativeModel)
    assert not isinstance(adapted._model, NativeModel)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"model_type": "phi3"}, "phi3"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5}}, "rotated"),
    ],
)
def test_native_decoder_names_what_it_cannot_run(overrides, reason):
    """A configuration that it would compute wrongly is refused with the reason."""
    config = AutoConfig.for_model(overrides.get("model_type", "llama"))
    for name, value in overrides.items():
        setattr(config, name, value)

    assert reason in (native_problem(config) or "")


def test_native_is_refused_by_name_when_it_was_asked_for(checkpoint):
    """Silently choosing the other provider would hide a tenfold difference in speed."""
    with pytest.raises(UnsupportedModel, match="gpt2"):
        make_runner(checkpoint("gpt2"), "native")


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
STATES = "linear_attention need more than causal attention"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", {}, "one such call per layer"),
    "falcon": ("falcon", {}, "AttentionInterface"),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "AttentionInterface"),
    "xglm": ("xglm", {}, "one such call per layer"),
    "qwen3_next": ("qwen3_next", {"head_dim": 16, **QWEN_EXPERTS, "shared_expert_intermediate_size": 32}, STATES),
    "mamba": ("mamba", {}, STATES),
    "mamba2": ("mamba2", {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16}, STATES),
    "jamba": ("jamba", {"num_experts": 2, "mamba_d_state": 8}, STATES),
    "lfm2 with convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv need more"),
    "llama4 in chunks": ("llama4_text", {**MIXTURE, "attention_chunk_size": 64}, "chunked_attention need more"),
    "dynamic rope": ("llama", {"rope_parameters": DEFAULT_ROPE | {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "longrope": ("phi3", {"rope_parameters": LONG_ROPE}, "longrope"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapter_refuses_what_paged_attention_cannot_give(name, checkpoint):
    """A model that bypasses our attention, or whose rotation depends on the batch, would silently answer wrongly."""
    model_type, overrides, reason = REFUSED[name]

    with pytest.raises(UnsupportedModel, match=reason):
        make_runner(checkpoint(model_type, **overrides), "transformers")


def test_models_that_are_said_to_run_or_not_are_those_that_are_tested():
    """The page lists every tested model, supported or refused, among them fifty types that run transformers' code."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()

    native = page.partition("| `native` |")[2].partition("|")[0]
    assert re.findall(r"`(\w+)`", native) == list(FAMILIES)
    assert len(BREADTH) == 50
    for name in (*BREADTH, *(model_type for model_type, _, _ in REFUSED.values())):
        assert f"`{name}`" in page, name


def test_folder_without_weights_is_named(tmp_path, checkpoint):
    """Interrupted downloads are the usual cause."""
    (tmp_path / "config.json").write_bytes((checkpoint("llama") / "config.json").read_bytes())

    with pytest.raises(WeightsMissing, match="safetensors"):
        make_runner(tmp_path, "native")


def test_weights_without_safetensors_run_in_transformers(tmp_path, checkpoint, prompts, reference):
    """Older models have only pytorch_model.bin. torch reads it without running code from it."""
    folder = checkpoint("llama")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()

    check_model(tmp_path, ReplicaSettings(), KvCacheSettings())
    runner = make_runner(tmp_path)

    assert not isinstance(runner._model, NativeModel)
    assert ToyScheduler(runner.forward, 24).generate(prompts, NEW_TOKENS) == reference(folder, prompts, NEW_TOKENS)
    with pytest.raises(UnsupportedModel, match="reads only safetensors"):
        make_runner(tmp_path, "native")


def test_pickled_code_is_not_executed(tmp_path, checkpoint):
    """A pickle can call any function, so torch must refuse everything but tensors."""
    ran = tmp_path / "ran"
    (tmp_path / "config.json").write_bytes((checkpoint("llama") / "config.json").read_bytes())
    torch.save({"model.norm.weight": Runs(ran)}, tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError):
        make_runner(tmp_path)
    assert not ran.exists()


class Runs:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def test_configuration_with_a_kind_for_more_layers_than_it_has_is_refused(tmp_path, checkpoint):
    """transformers raises its own exception type here, which must not reach the user as a traceback."""
    config = msgspec.json.decode((checkpoint("llama") / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config | {"layer_types": ["full_attention"] * 3}))

    with pytest.raises(UnsupportedModel, match="layer_types"):
        make_runner(tmp_path)


def test_folder_without_configuration_is_named(tmp_path):
    """A wrong path must not end in another library's traceback."""
    with pytest.raises(ModelError, match="configuration"):
        make_runner(tmp_path)


def test_spec_tells_memory_and_limits(checkpoint):
    """The pool is sized by it: 2 layers x (keys + values) x 2 heads x 16 x 4 bytes x 8 tokens."""
    spec = ModelRunner(ReplicaSettings(device="cpu"), checkpoint("llama"), BLOCK_SIZE).spec

    assert spec.bytes_per_block(BLOCK_SIZE) == 2 * 2 * 2 * 16 * 4 * 8
    assert (spec.kv_shapes, spec.vocab_size, spec.max_positions) == ((KvShape(2, 16, 16),) * 2, 211, 256)
    assert (spec.eos_token_ids, spec.dtype) == ((2,), "float32")


def test_end_ids_outside_the_vocabulary_are_left_out(tmp_path):
    """They can never be drawn, and banning them before `min_tokens` would fail the step for all requests."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 211, 128009, 5]}')

    assert eos_token_ids(tmp_path, AutoConfig.for_model("llama", vocab_size=211)) == (2, 5)
    assert eos_token_ids(tmp_path, AutoConfig.for_model("llama", vocab_size=212)) == (2, 211, 5)


@pytest.mark.parametrize("content", ["", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": {}}'])
def test_a_damaged_generation_config_does_not_end_the_start(content, tmp_path, caplog):
    """Routers ignore it as well; the model's own configuration then says which token ends an answer."""
    (tmp_path / "generation_config.json").write_text(content)

    assert eos_token_ids(tmp_path, AutoConfig.for_model("llama", eos_token_id=7)) == (7,)
    assert "generation_config_unusable" in caplog.text


def test_adapter_reports_the_same_spec(checkpoint):
    """The spec found by the adapter's trial step agrees with the native decoder's."""
    native, adapted = (make_runner(checkpoint("llama"), name).spec for name in ("native", "transformers"))

    assert native == adapted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 80])
@pytest.mark.parametrize("features", [47, 48])
def test_a_linear_equals_the_plain_one(dtype, rows, features):
    """torch's packed operators are private and the few-row kernel is ours; both must match F.linear."""
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, features), (40, features), (40,)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)

    with torch.inference_mode():
        y = Linear(weight, bias)(x)

    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias), rtol=1e-2, atol=tolerance)


def test_a_weight_that_the_compiled_kernel_reads_for_all_rows_is_held_once(monkeypatch):
    """Otherwise oneDNN keeps a second, packed copy for more rows than `few_rows`."""
    generator, packs, packing = torch.Generator().manual_seed(1), [], layers._packs(torch.bfloat16)
    monkeypatch.setattr(layers, "_pack", lambda weight: packs.append(1) or weight)
    x, weight = (torch.randn(rows, 768, generator=generator).bfloat16() for rows in (2, 500))

    linear = Linear(weight)

    assert bool(packs) == (packing and few_rows() < math.inf)
    assert torch.equal(linear(x), product(x, pack(weight)))


@pytest.mark.skipif(int8_problem() is not None, reason="no 8-bit linears on this processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_near_and_the_same_alone_as_in_a_batch(dtype):
    """A token must not depend on other rows, or a continued request would diverge."""
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((9, 96), (40, 96), (40,)))
    x[3] = 0

    with torch.inference_mode():
        linear = Int8Linear(weight, bias)
        y, alone = linear(x), torch.cat([linear(row[None]) for row in x])

    exact = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert torch.equal(y, alone)
    assert (y - exact).norm() < 0.02 * exact.norm()


@pytest.mark.skipif(int8_problem() is not None, reason="no 8-bit linears on this processor")
def test_a_model_in_eight_bits_gives_nearly_the_same_logits(checkpoint):
    """Each layer has four linears, each with its own quantization error."""
    folder = checkpoint("llama")
    plan = plan_of_rows(0, [PlanRow(list(range(3, 40)), 0, [1, 2, 3, 4, 5])], logits_at=range(37))

    exact, rounded = (make_runner(folder, quantization=kind).forward(plan) for kind in ("none", "int8"))

    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()


def test_eight_bits_are_refused_where_they_are_not_computed(checkpoint):
    """Serving in another precision than requested would go unnoticed."""
    with pytest.raises(UnsupportedModel, match="quantization"):
        make_runner(checkpoint("gpt2"), quantization="int8")


def test_packing_is_used_here():
    """The pinned torch must take the fast path; without this check, a slow fallback would pass all other tests."""
    assert packing_problem(torch.float32) is None


def test_unknown_dtype_is_reported_not_raised():
    """A dtype that oneDNN does not pack falls back to F.linear."""
    assert packing_problem(torch.float64) is not None


def test_windows_follow_the_family():
    """Mistral uses a window in all layers, Qwen only in those that its layer types name."""
    mistral = AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=9)
    qwen = AutoConfig.for_model(
        "qwen3", num_hidden_layers=2, use_sliding_window=True, sliding_window=9, max_window_layers=1
    )

    assert layer_windows(mistral) == [9, 9]
    assert layer_windows(qwen) == [None, 9]


@pytest.mark.parametrize(("ranks", "possible"), [(1, True), (2, True), (4, True), (8, False), (3, False)])
def test_split_is_judged_before_weights_are_read(ranks, possible):
    """4 heads and 2 KV heads split over 1, 2 or 4 ranks; other sizes are refused at once."""
    config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)

    assert (split_problem(config, ranks) is None) == possible


def test_llama3_rope_keeps_short_waves_and_slows_long_ones():
    """From the released definition: unchanged at high frequencies, divided by the factor at low ones."""
    plain, scaled = (inverse_frequencies(p, 32) for p in (DEFAULT_ROPE, LLAMA3_ROPE))

    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / 8.0)


def test_sharded_checkpoint_really_has_several_files(checkpoint):
    """Guards the sharded variant above against a shard size that no longer splits."""
    _, overrides = NATIVE["llama in many files"]

    assert len(list(checkpoint("llama", **overrides).glob("*.safetensors"))) > 1


@pytest.mark.parametrize("variant", NATIVE)
def test_reference_answers_are_not_trivial(variant, checkpoint, prompts, reference):
    """A model that repeats one token would pass every comparison above."""
    model_type, overrides = NATIVE[variant]

    answers = reference(checkpoint(model_type, **overrides), prompts, NEW_TOKENS)

    assert len({token for answer in answers for token in answer}) > 2 * len(prompts)
