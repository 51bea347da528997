"""Models of real shapes with random weights, created on the device: no download, no disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from homing.replica.config import ReplicaSettings
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.models.native import NativeModel

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    # A quarter of the layers: all of them would leave no space for KV on 78 GiB.
    "Qwen3-30B-A3B/4": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    "tiny-experts": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 211,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 211,
        "tie_word_embeddings": False,
    },
}
MAX_POSITIONS = 40_960
_NOWHERE = Path("none")


class RandomWeights:
    """A `Checkpoint` (models/checkpoint.py) of random numbers: normal, keeping activations near 1, and norms of 1."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._dtype, self._device = dtype, device

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def _shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape by its name in a checkpoint. There each expert has its own tensor; the model joins them."""
        if ".experts." not in name:
            return self._shapes[name]
        prefix, _, _, projection, _ = name.rsplit(".", 4)
        if projection == "down_proj":
            return self._shapes[f"{prefix}.experts.down_proj"][1:]
        features, hidden = self._shapes[f"{prefix}.experts.gate_up_proj"][1:]
        return features // 2, hidden

    def whole(self, name: str) -> torch.Tensor:
        shape = self._shape(name)
        tensor = torch.ones(shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(0, 1.0 if "embed" in name else shape[-1] ** -0.5) if len(shape) > 1 else tensor

    def shard(self, name: str, dim: int, index: int, parts: int) -> torch.Tensor:
        return self.whole(name).chunk(parts, dim)[index]

    def span(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        return self.whole(name).narrow(dim, start, min(stop, self._shape(name)[dim]) - start)


@dataclass(slots=True, frozen=True)
class Sizes:
    """The work of one shape, as in the roofline of the design notes."""

    body: int  #: parameters of all layers
    head: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int

    @property
    def weight_bytes(self) -> int:
        """Bytes in bfloat16; the embedding counts in addition to the head."""
        return 2 * (self.body + 2 * self.head)

    def decode_bytes(self, context_tokens: int) -> int:
        """Bytes that a decode step has to read."""
        return 2 * (self.body + self.head) + context_tokens * self.kv_bytes_per_token

    def prefill_flops(self, tokens: int) -> float:
        """FLOPs of one prompt; only its last token passes the head."""
        return 2 * self.body * tokens + self.attention_flops_per_pair * tokens**2 / 2


def sizes(name: str) -> Sizes:
    shape = SHAPES[name]
    hidden, layers, dim = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim + 3 * hidden * shape["intermediate_size"]
    return Sizes(layers * layer, shape["vocab_size"] * hidden, 4 * layers * kv_heads * dim, 4 * layers * heads * dim)


def config_of(name: str) -> Any:
    return AutoConfig.for_model(**{"model_type": "qwen3", "max_position_embeddings": MAX_POSITIONS} | SHAPES[name])


def random_runner(name: str, device: torch.device, blocks: int, block_size: int, **limits: Any) -> GpuRunner:
    """A GpuRunner of this shape; bfloat16 on CUDA, float32 on CPU."""
    config = config_of(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.inference_mode():
        model = NativeModel(config, RandomWeights(config, dtype, device), (), dtype, device)
    settings = ReplicaSettings(device="cuda" if device.type == "cuda" else "cpu", **limits)
    runner = GpuRunner(settings, _NOWHERE, block_size, model=model)
    runner.allocate_kv(blocks)
    return runner
