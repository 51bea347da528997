"""Our own decoder for the `FAMILIES` in `spec.py`, loaded from Hugging Face folders.

It works on flat [T, hidden] activations with fused q|k|v and gate|up projections, and holds one rank's share of heads
and features. Tests compare it with transformers' models. Models that it cannot run (`native_problem`) are left to the
transformers provider.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from ..errors import TensorParallelUnsupported
from ..kernels.base import TorchKernels
from ..kernels.choice import choose_kernels
from ..parallel.rank_group import RankGroup
from .base import AttentionRule, QkvAttend, Rotary
from .checkpoint import COLUMNS, ROWS, Checkpoint
from .fp8 import ScaledLinear, ScaledLinears, ScaledProduct
from .layers import Int8Linear, Linear, PackedExperts, packs_experts
from .spec import FAMILIES, KvShape, ModelSpec, split_problem
from .tensor_names import is_mixture

AnyLinear = Linear | Int8Linear | ScaledLinear

#: Rope types with frequencies fixed at load. Those of longrope and dynamic depend on the batch's longest position.
FIXED_KINDS = ("default", "linear", "llama3")


def native_problem(config: Any) -> str | None:
    """The reason why this decoder cannot run a model of this (transformers) configuration, or None."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in FIXED_KINDS:
        return f"rope type {rope['rope_type']!r} is not one of {', '.join(FIXED_KINDS)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "only part of each head is rotated"
    return None


def layer_windows(config: Any) -> list[int | None]:
    """Each layer's sliding window in tokens, as transformers' model of the family applies it; None: no window."""
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None) or None
    if config.model_type in ("mistral", "mixtral", "qwen3_moe"):
        return [window] * count
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    return [window if kind == "sliding_attention" else None for kind in kinds]


def inverse_frequencies(parameters: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Rotary frequencies [head_dim / 2] float32 from Hugging Face `rope_parameters` with a type in FIXED_KINDS."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies: torch.Tensor = 1.0 / (parameters["rope_theta"] ** exponents)
    kind = parameters["rope_type"]
    assert kind in FIXED_KINDS, kind
    if kind == "linear":
        return torch.div(frequencies, parameters["factor"])
    if kind == "llama3":
        # Long wavelengths are slowed by `factor`, short ones kept, those in between blended (as in Llama 3.1).
        low, high, factor = (parameters[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
        wavelengths = 2 * math.pi / frequencies
        keep = ((parameters["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - keep) * frequencies / factor + keep * frequencies
    return frequencies


@dataclass(slots=True, frozen=True)
class RankShard:
    """The part of the weights that one rank holds. With fewer KV heads than ranks, neighbouring ranks share a head."""

    rank: int
    ranks: int
    kv_heads: int
    kv_index: int  #: index of its part among the `kv_parts` equal parts of the KV heads
    kv_parts: int

    @classmethod
    def of(cls, config: Any, group: RankGroup | None) -> "RankShard":
        rank, ranks = (group.rank, group.size) if group else (0, 1)
        problem = split_problem(config, ranks)
        if problem:
            raise TensorParallelUnsupported(f"{problem}; choose another --tensor-parallel-size")
        parts = min(ranks, config.num_key_value_heads)
        kv_heads = config.num_key_value_heads // parts
        return cls(rank, ranks, kv_heads, rank * parts // ranks, parts)


@dataclass(slots=True, frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)) for one rank's share of the features; results must be summed over ranks."""

    gate_up: AnyLinear
    down: AnyLinear

    def __call__(self, x: torch.Tensor, kernels: TorchKernels) -> torch.Tensor:
        return self.down(kernels.silu_mul(self.gate_up(x)))


@dataclass(slots=True, frozen=True)
class SeparateExperts:
    """Runs each expert on its own tokens. Reads their number back to the host, so a CUDA graph cannot capture it."""

    experts: list[GatedMlp]

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, kernels: TorchKernels
    ) -> torch.Tensor:
        total, per_token = torch.zeros_like(x), chosen.shape[1]
        # Indices of the flat choices, sorted by expert.
        order = chosen.flatten().argsort(stable=True)
        tokens, shares = order // per_token, weights.flatten()[order, None]
        first = 0
        counts: list[int] = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                mine = slice(first, first + count)
                found = expert(x[tokens[mine]], kernels) * shares[mine]
                total.index_add_(0, tokens[mine], found.to(x.dtype))
                first += count
        return total


@dataclass(slots=True, frozen=True)
class JoinedExperts:
    """Runs all experts in three launches whose shapes do not depend on the data, so a CUDA graph can capture them."""

    gate_up: torch.Tensor  #: [experts, 2 * features, hidden]
    down: torch.Tensor  #: [experts, hidden, features]

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, kernels: TorchKernels
    ) -> torch.Tensor:
        tokens, per_token = chosen.shape
        ordered, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(len(self.gate_up) + 1, device=x.device)
        firsts = torch.searchsorted(ordered, experts, out_int32=True)
        features = kernels.silu_mul(kernels.expert_products(x, self.gate_up, firsts, order // per_token))
        found = kernels.expert_products(features, self.down, firsts)
        # Restore the order of the choices, so that their sum does not depend on which product finishes first.
        choices = torch.empty_like(found).index_copy_(0, order, found).view(tokens, per_token, -1)
        return torch.einsum("tkh,tk->th", choices.float(), weights).to(x.dtype)


Experts = SeparateExperts | JoinedExperts | PackedExperts


@dataclass(slots=True, frozen=True)
class Mixture:
    """The weighted sum of each token's likeliest experts plus, in some families, an expert shared by all tokens."""

    router: torch.Tensor  #: [experts, hidden]
    experts: Experts
    per_token: int
    normalized: bool  #: whether the weights of a token's experts are scaled to sum to 1
    shared: GatedMlp | None
    shared_gate: torch.Tensor | None  #: [1, hidden]

    def __call__(self, x: torch.Tensor, kernels: TorchKernels) -> torch.Tensor:
        weights, chosen = F.linear(x, self.router).float().softmax(-1).topk(self.per_token, -1)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        if isinstance(self.experts, PackedExperts):
            total = self.experts(x, weights, chosen, kernels.silu_mul)
        else:
            total = self.experts(x, weights, chosen, kernels)
        if self.shared is None:
            return total
        shared = self.shared(x, kernels)
        return total + (shared if self.shared_gate is None else F.linear(x, self.shared_gate).sigmoid() * shared)


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    input_norm: torch.Tensor
    qkv: AnyLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: AnyLinear
    mlp_norm: torch.Tensor
    feedforward: GatedMlp | Mixture
    rule: AttentionRule


class _LayerReader:
    def __init__(
        self,
        config: Any,
        checkpoint: Checkpoint,
        shard: RankShard,
        index: int,
        linear: type[Linear | Int8Linear],
        joins_experts: bool,
        scaled: ScaledLinears | None,
    ) -> None:
        self._config, self._checkpoint, self._shard, self._index = config, checkpoint, shard, index
        self._linear, self._joins_experts, self._scaled = linear, joins_experts, scaled
        self._prefix = f"model.layers.{index}."

    def read(self, rule: AttentionRule) -> DecoderLayer:
        shard = self._shard
        own, kv = (shard.rank, shard.ranks), (shard.kv_index, shard.kv_parts)
        return DecoderLayer(
            input_norm=self._norm("input_layernorm"),
            qkv=self._by_outputs([("self_attn.q_proj", own), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]),
            q_norm=self._norm_if_any("self_attn.q_norm"),
            k_norm=self._norm_if_any("self_attn.k_norm"),
            out=self._by_inputs("self_attn.o_proj"),
            mlp_norm=self._norm("post_attention_layernorm"),
            feedforward=self._mixture() if is_mixture(self._config, self._index) else self._mlp("mlp."),
            rule=rule,
        )

    def _mlp(self, prefix: str) -> GatedMlp:
        own = (self._shard.rank, self._shard.ranks)
        gate_up = self._by_outputs([(f"{prefix}gate_proj", own), (f"{prefix}up_proj", own)])
        return GatedMlp(gate_up, self._by_inputs(f"{prefix}down_proj"))

    def _mixture(self) -> Mixture:
        config = self._config
        if config.model_type == "mixtral":
            prefix, names, count = "block_sparse_moe.", ("w1", "w3", "w2"), config.num_local_experts
        else:
            prefix, names, count = "mlp.", ("gate_proj", "up_proj", "down_proj"), config.num_experts
        shared = config.model_type == "qwen2_moe"
        return Mixture(
            router=self._checkpoint.whole(f"{self._prefix}{prefix}gate.weight"),
            experts=self._experts([f"{prefix}experts.{expert}." for expert in range(count)], *names),
            per_token=config.num_experts_per_tok,
            normalized=config.model_type == "mixtral" or config.norm_topk_prob,
            shared=self._mlp(f"{prefix}shared_expert.") if shared else None,
            shared_gate=self._checkpoint.whole(f"{self._prefix}{prefix}shared_expert_gate.weight") if shared else None,
        )

    def _experts(self, prefixes: list[str], gate: str, up: str, down: str) -> Experts:
        if self._scaled is not None:
            self._scaled.refuse("there is no FP8 product for experts")
        own = (self._shard.rank, self._shard.ranks)
        gate_up = torch.stack([self._joined([(p + gate, own), (p + up, own)], "weight") for p in prefixes])
        names = [f"{self._prefix}{p}{down}.weight" for p in prefixes]
        downs = torch.stack([self._checkpoint.shard(name, COLUMNS, *own) for name in names])
        if self._joins_experts:
            return JoinedExperts(gate_up, downs)
        if self._linear is Linear and packs_experts(gate_up, downs):
            return PackedExperts(gate_up, downs)
        linears = ((self._linear(weight) for weight in each) for each in (gate_up, downs))
        return SeparateExperts([GatedMlp(*pair) for pair in zip(*linears, strict=True)])

    def _norm(self, name: str) -> torch.Tensor:
        return self._checkpoint.whole(f"{self._prefix}{name}.weight")

    def _norm_if_any(self, name: str) -> torch.Tensor | None:
        return self._norm(name) if f"{self._prefix}{name}.weight" in self._checkpoint else None

    def _by_outputs(self, parts: list[tuple[str, tuple[int, int]]]) -> AnyLinear:
        """Linears with the same input fused into one; each is cut to this rank's share first."""
        biased = f"{self._prefix}{parts[0][0]}.bias" in self._checkpoint
        bias = self._joined(parts, "bias") if biased else None
        scaled = self._in_8_bits([(f"{self._prefix}{n}.weight", ROWS, *part) for n, part in parts], bias)
        return scaled or self._linear(self._joined(parts, "weight"), bias)

    def _joined(self, parts: list[tuple[str, tuple[int, int]]], kind: str) -> torch.Tensor:
        return torch.cat([self._checkpoint.shard(f"{self._prefix}{n}.{kind}", ROWS, *part) for n, part in parts])

    def _by_inputs(self, name: str) -> AnyLinear:
        """A linear whose partial results are summed over ranks; only rank 0 adds the bias."""
        name = self._prefix + name
        biased = self._shard.rank == 0 and f"{name}.bias" in self._checkpoint
        bias = self._checkpoint.whole(f"{name}.bias") if biased else None
        part = (f"{name}.weight", COLUMNS, self._shard.rank, self._shard.ranks)
        return self._in_8_bits([part], bias) or self._linear(self._checkpoint.shard(*part), bias)

    def _in_8_bits(self, parts: Sequence[tuple[str, int, int, int]], bias: torch.Tensor | None) -> ScaledLinear | None:
        """An FP8 linear of these weight shares, or None if the checkpoint or the product does not allow it."""
        if self._scaled is None:
            return None
        return self._scaled.linear([self._checkpoint.scaled(*part) for part in parts], bias)


class NativeModel:
    """A decoder, or one rank's share of it. Each rank holds the whole embedding and its part of the output head."""

    def __init__(
        self,
        config: Any,
        checkpoint: Checkpoint,
        eos_token_ids: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
        linear: type[Linear | Int8Linear] = Linear,
        product: ScaledProduct | None = None,
    ) -> None:
        """`config`: as transformers reads it, with `native_problem(config) is None`; `checkpoint` has its tensors.

        `product`: multiplies the checkpoint's FP8 weights; None: they are dequantized.
        Raises TensorParallelUnsupported.
        """
        self._group = group
        self._kernels = choose_kernels(device, dtype)
        shard = RankShard.of(config, group)
        self._rank = shard.rank
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._epsilon = config.rms_norm_eps
        self._frequencies = inverse_frequencies(config.rope_parameters, head_dim).to(device)
        self._embedding = checkpoint.whole("model.embed_tokens.weight")
        self._norm = checkpoint.whole("model.norm.weight")
        # This rank's part of the vocabulary. All parts are equally long; the last ones are padded with zeros.
        width = -(-len(self._embedding) // shard.ranks)
        start = shard.rank * width
        if config.tie_word_embeddings:
            head = self._embedding[start : start + width]
        else:
            head = checkpoint.span("lm_head.weight", ROWS, start, start + width)
        # A tied head is the embedding itself and shares its memory unless the linear packs its weight.
        self._head = Linear(F.pad(head, (0, 0, 0, width - len(head))) if len(head) < width else head)
        scaled = ScaledLinears(self._kernels, dtype, product) if product is not None else None
        joins_experts = device.type != "cpu"  # on CPUs, weights are packed
        self._layers = [
            _LayerReader(config, checkpoint, shard, index, linear, joins_experts, scaled).read(
                AttentionRule(head_dim**-0.5, window)
            )
            for index, window in enumerate(layer_windows(config))
        ]
        self.rules = [layer.rule for layer in self._layers]
        mixtures = [layer.feedforward for layer in self._layers if isinstance(layer.feedforward, Mixture)]
        separate = any(isinstance(mixture.experts, SeparateExperts) for mixture in mixtures)
        self.capture_problem = "the number of tokens per expert is read back" if separate else None
        self.spec = ModelSpec(
            kv_shapes=(KvShape(shard.kv_heads, head_dim, head_dim),) * len(self._layers),
            vocab_size=len(self._embedding),
            max_positions=config.max_position_embeddings,
            eos_token_ids=eos_token_ids,
            dtype=str(dtype).removeprefix("torch."),
            dtype_bytes=dtype.itemsize,
            hidden_size=config.hidden_size,
            query_heads=config.num_attention_heads // shard.ranks,
        )

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: QkvAttend, logits_at: torch.Tensor | None
    ) -> torch.Tensor | None:
        return self._logits(self._hidden(ids, positions, attend, logits_at))

    def forward_hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: QkvAttend,
        logits_at: torch.Tensor,
        hidden_at: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        hidden = self._hidden(ids, positions, attend, torch.cat((logits_at, hidden_at)))
        return self._logits(hidden[: len(logits_at)]), hidden[len(logits_at) :]

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: QkvAttend, at: torch.Tensor | None
    ) -> torch.Tensor:
        """The normalized last hidden states [len(at), hidden], the same on every rank; `at` None: of all tokens."""
        x, cos, sin = self._kernels.embed(self._embedding, ids, positions, self._frequencies)
        delta = None
        for index, layer in enumerate(self._layers):
            x, normed = self._kernels.add_rms_norm(x, delta, layer.input_norm, self._epsilon)
            rotary = Rotary(cos, sin, layer.q_norm, layer.k_norm, self._epsilon)
            heads = attend.from_qkv(index, layer.qkv(normed), rotary, layer.rule)
            delta = self._summed(layer.out(heads.flatten(1)))
            x, normed = self._kernels.add_rms_norm(x, delta, layer.mlp_norm, self._epsilon)
            delta = self._summed(layer.feedforward(normed, self._kernels))
        assert delta is not None, "a model without layers"
        if at is not None:
            x, delta = (self._kernels.take(each, at) for each in (x, delta))
        return self._kernels.add_rms_norm(x, delta, self._norm, self._epsilon)[1]

    def _logits(self, normed: torch.Tensor) -> torch.Tensor | None:
        if not len(normed):
            return normed.new_empty(0, len(self._embedding)) if self._rank == 0 else None
        logits = self._head(normed)
        if self._group is None:
            return logits
        parts = self._group.gather(logits)
        return torch.cat(parts, -1)[:, : len(self._embedding)] if parts else None

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(x) if self._group else x
