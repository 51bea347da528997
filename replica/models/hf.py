"""Runs any causal transformers model with its own modelling code and our paged attention.

The model calls our attention through transformers' AttentionInterface: once per layer, with queries and keys already
rotated and without a mask (transformers passes none to an implementation that has no mask function). A model that needs
more is refused with a reason while it loads: a trial step must make exactly one call per layer, and no argument or
configuration may require an operation that is not implemented here.

The step's attention is an attribute of each module, because a few models drop extra keyword arguments.
"""

import copy
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoModelForCausalLM, Mxfp4Config

from ..errors import ModelError, UnsupportedModel, WeightsMismatch
from ..kernels.base import TorchKernels
from ..kernels.choice import choose_kernels
from ..load.quantized import MXFP4, declared
from .base import Attend, AttentionRule
from .checkpoint import Checkpoint, LazyTensor
from .layers import Linear, PackedExperts, packs_experts
from .native import FIXED_KINDS
from .spec import KvShape, ModelSpec
from .tensor_names import mismatch

IMPLEMENTATION = "homing_paged"
_CONTEXT = "homing_attention"
#: Appended to error messages.
NEEDED = "docs/models.md lists what is supported: attention through transformers' AttentionInterface, without a mask"

#: Rope types whose frequencies are fixed at load. longrope and dynamic compute them from the longest position in the
#: whole packed batch, so one long request would change the results of all others.
ROPE_KINDS = (*FIXED_KINDS, "yarn", "proportional")

LAYER_KINDS = ("full_attention", "sliding_attention", "attention", "full", "sliding")

#: Arguments that models pass but that have no effect on causal inference with explicit positions.
HARMLESS = frozenset(("dropout", "is_causal", "position_ids", "cache_position", "logits_to_keep"))

#: The weights of experts that transformers joins in one tensor per projection.
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
#: Greatest relative difference of our experts' results in a trial. Rounding to bfloat16 makes 0.5 %.
TRIAL_ERROR = 0.02


@dataclass(slots=True)
class AttentionContext:
    """The current step's attention, shared by all modules of one model."""

    attend: Attend | None = None
    rules: dict[int, AttentionRule] = field(default_factory=dict)  #: by layer, filled by the trial step


@dataclass(slots=True)
class TrialAttention:
    """An `Attend` for the trial step that returns zeros and records its calls."""

    calls: list[int] = field(default_factory=list)
    shapes: dict[int, KvShape] = field(default_factory=dict)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        assert rule.scale > 0, f"layer {layer}: scale {rule.scale}"
        self.calls.append(layer)
        self.shapes[layer] = KvShape(k.shape[1], k.shape[2], v.shape[2])
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: query [1, heads, T, D], key, value; returns [1, T, heads, D] and None."""
    context: AttentionContext = getattr(module, _CONTEXT)
    assert context.attend is not None, "attention was called outside a step"
    layer: int = module.layer_idx  # type: ignore[assignment]
    rule = context.rules.get(layer)
    if rule is None:
        _refuse_arguments(module, attention_mask, arguments)
        scale = arguments.get("scaling")
        if scale is None:
            scale = getattr(module, "scaling", None)
        rule = context.rules[layer] = AttentionRule(
            scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
            window=arguments.get("sliding_window"),
            softcap=arguments.get("softcap"),
            sinks=arguments.get("s_aux"),
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return context.attend(layer, q, k, v, rule)[None], None


def _refuse_arguments(module: torch.nn.Module, mask: torch.Tensor | None, arguments: dict[str, Any]) -> None:
    """Raise UnsupportedModel if the model passes a mask, asks for non-causal attention or passes unknown arguments."""
    known = HARMLESS | {"scaling", "sliding_window", "softcap", "s_aux"}
    asked = {name for name, value in arguments.items() if value is not None and value is not False}
    unknown = sorted(asked - known)
    what = type(module).__name__
    if mask is not None:
        raise UnsupportedModel(f"{what} passes a mask of its own to attention, which is not supported")
    if unknown:
        raise UnsupportedModel(f"{what} passes {', '.join(unknown)} to attention, which is not supported")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{what} is not causal; only causal language models can be served")


def rope_kinds(parameters: Any) -> set[str]:
    """All rope types in a configuration's `rope_parameters`, which in some models are nested by kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    kinds = {parameters["rope_type"]} if "rope_type" in parameters else set()
    return kinds.union(*(rope_kinds(value) for value in parameters.values()))


def adapter_problem(config: Any) -> str | None:
    """The reason, if the configuration shows one, why a model cannot run here, or None."""
    unfixed = sorted(rope_kinds(getattr(config, "rope_parameters", None)) - set(ROPE_KINDS))
    if unfixed:
        return f"rope type {', '.join(unfixed)} has frequencies that depend on the batch, or is not known"
    kinds = set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk >= config.max_position_embeddings:
        kinds.discard("chunked_attention")  # a single chunk is full attention
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))} need more than causal attention over paged KV"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    return None


def _load(config: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The transformers model with the folder's weights, on the CPU. Raises ModelError."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    try:
        loader, source = _source(config, folder, dtype)
        model, report = loader.from_pretrained(
            **source,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, UnpicklingError) as error:
        raise UnsupportedModel(
            f"transformers cannot load {folder} with paged attention: {error!r}; {NEEDED}"
        ) from error
    unlike = mismatch(report["missing_keys"], report["unexpected_keys"])
    if unlike is not None:
        raise WeightsMismatch(f"{folder}: {unlike}")
    return model


def _source(config: Any, folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The loading class and its arguments: the folder, or for FP8 checkpoints tensors that are dequantized lazily."""
    whole: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    if declared(config.to_dict()).get("quant_method") == MXFP4:
        return AutoModelForCausalLM, whole | {"quantization_config": Mxfp4Config(dequantize=True)}
    if not any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM, whole
    checkpoint = Checkpoint(folder, dtype, torch.device("cpu"))
    if not checkpoint.quantized:
        return AutoModelForCausalLM, whole
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        vars(part).pop("quantization_config", None)
    weights = {name: LazyTensor(checkpoint, name) for name in checkpoint.shapes}
    whole = {"pretrained_model_name_or_path": None, "config": plain, "state_dict": weights}
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], whole


class PackedLinear(torch.nn.Module):
    """Replaces a transformers model's linear layer with our product."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Only its shape and dtype are used, by models and this module; the packed weight is in `_product`.
        self.weight = torch.nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self.bias = linear.bias
        self._product = Linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)


class KernelExperts(torch.nn.Module):
    """Replaces a transformers model's experts with our products; the activation stays theirs."""

    def __init__(self, experts: Any, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self._experts = experts
        biases = (getattr(experts, f"{name}_bias", None) for name in EXPERT_WEIGHTS)
        self._products = PackedExperts(up, down, *biases)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._products(x, weights, chosen, self._experts._apply_gate)


def kernel_experts(module: Any) -> KernelExperts | None:
    """The replacement of experts that transformers joins in one tensor per projection, or None.

    None for other modules, and if the results of a trial differ. The module's own weights are freed.
    """
    if not all(hasattr(module, name) for name in (*EXPERT_WEIGHTS, "is_transposed", "_apply_gate")):
        return None
    up, down = (getattr(module, name).detach() for name in EXPERT_WEIGHTS)
    up, down = (each.transpose(1, 2) if module.is_transposed else each for each in (up, down))
    if not packs_experts(up, down):
        return None
    experts, generator = KernelExperts(module, up, down), torch.Generator().manual_seed(0)
    x = torch.randn(3, up.shape[2], generator=generator).to(up.dtype)
    chosen = torch.tensor([[0, len(up) - 1], [len(up) - 1, 0], [len(up) // 2, 0]])
    weights = torch.tensor([[0.25, 0.75]] * 3).to(up.dtype)
    try:
        wanted, found = (each(x, chosen, weights).float() for each in (module, experts))
    except (RuntimeError, TypeError):  # it needs other arguments
        return None
    if not (found - wanted).norm() <= TRIAL_ERROR * wanted.norm():  # also if any is NaN
        return None
    for name in EXPERT_WEIGHTS:
        empty = torch.empty_like(getattr(module, name), device="meta")
        setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))
    return experts


class KernelNorm(torch.nn.Module):
    """Replaces a transformers model's RMS norm with our kernel."""

    def __init__(self, weight: torch.Tensor, epsilon: float, kernels: TorchKernels) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._epsilon, self._kernels = epsilon, kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._kernels.add_rms_norm(rows, None, self.weight, self._epsilon)[1].view(x.shape)


def use_our_kernels(model: torch.nn.Module, kernels: TorchKernels, *, packs: bool) -> None:
    """Replace norms, and with `packs` linears and experts, one at a time: at most one weight is in memory twice."""
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if packs and type(child) is torch.nn.Linear:  # subclasses may compute something else
                    setattr(parent, name, PackedLinear(child))
                elif packs and (experts := kernel_experts(child)) is not None:
                    setattr(parent, name, experts)
                elif (weight := rms_norm_weight(child)) is not None:
                    setattr(parent, name, KernelNorm(weight, _epsilon(child), kernels))


def _epsilon(module: torch.nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def rms_norm_weight(module: torch.nn.Module) -> torch.Tensor | None:
    """The RMS norm weight with which a module is equivalent to such a norm over the last dimension, or None.

    It is the module's weight, or 1 + the weight as in Gemma. Found by a trial in float32: little else identifies norms.
    """
    parameters, epsilon = dict(module.named_parameters()), _epsilon(module)
    weight = parameters.get("weight")
    if list(parameters) != ["weight"] or weight is None or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0))
    try:
        found = copy.deepcopy(module).float()(x)
        rounds_once = module(x.to(weight.dtype)).dtype == weight.dtype
    except (RuntimeError, TypeError, ValueError):  # it needs other arguments or shapes
        return None
    for factors in (weight.float(), 1 + weight.float()):
        close = torch.allclose(found, F.rms_norm(x, (len(weight),), factors, epsilon), rtol=1e-5, atol=1e-6)
        if close and rounds_once and torch.equal(factors.to(weight.dtype).float(), factors):
            return factors.to(weight.dtype)
    return None


class TransformersModel:
    """A causal transformers model on one rank."""

    #: Not known in advance: only a trial capture can tell.
    capture_problem: str | None = None

    def __init__(
        self, config: Any, folder: Path, eos_token_ids: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Load the model and run a trial step. Raises ModelError that names what our attention lacks for the model."""
        problem = adapter_problem(config)
        if problem:
            raise UnsupportedModel(f"transformers' {config.model_type} cannot run on paged attention: {problem}")
        kernels, on_cpu = choose_kernels(device, dtype), device.type == "cpu"  # fails before the weights are read
        self._model = _load(config, folder, dtype).eval()
        use_our_kernels(self._model, kernels, packs=on_cpu)
        if not on_cpu:
            self._model.to(device)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._context = AttentionContext()
        for module in self._model.modules():
            setattr(module, _CONTEXT, self._context)
        #: The last step's hidden states [1, T, hidden], if a hook was registered for them.
        self._hidden: torch.Tensor | None = None
        hook = self._model.base_model.register_forward_hook(self._keep_hidden)
        trial = self._try_one_step(config, device)
        hook.remove()
        self.rules = [self._context.rules[layer] for layer in range(config.num_hidden_layers)]
        self.spec = ModelSpec(
            kv_shapes=tuple(trial.shapes[layer] for layer in range(config.num_hidden_layers)),
            vocab_size=self._model.get_output_embeddings().weight.shape[0],
            max_positions=config.max_position_embeddings,
            eos_token_ids=eos_token_ids,
            dtype=str(dtype).removeprefix("torch."),
            dtype_bytes=dtype.itemsize,
            hidden_size=self._hidden.shape[-1] if self._hidden is not None else 0,
            query_heads=heads if isinstance(heads := getattr(config, "num_attention_heads", 0), int) else 0,
        )

    def forward_hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_at: torch.Tensor,
        hidden_at: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hook = self._model.base_model.register_forward_hook(self._keep_hidden)
        try:
            logits = self.forward(ids, positions, attend, logits_at)
        finally:
            hook.remove()
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the model shows no hidden states"
        return logits, hidden[0, hidden_at]

    def _keep_hidden(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self._hidden = getattr(output, "last_hidden_state", None)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, logits_at: torch.Tensor | None
    ) -> torch.Tensor:
        keep = {"logits_to_keep": logits_at} if self._keeps_logits and logits_at is not None else {}
        self._context.attend = attend
        try:
            out = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **keep)
        finally:
            self._context.attend = None
        logits: torch.Tensor = out.logits[0]
        return logits if self._keeps_logits or logits_at is None else logits[logits_at]

    def _try_one_step(self, config: Any, device: torch.device) -> TrialAttention:
        """Run two tokens. Raises UnsupportedModel unless attention is called exactly once per layer, in order."""
        trial = TrialAttention()
        ids = torch.tensor([0, 1], device=device)
        try:
            with torch.inference_mode():
                self.forward(ids, ids, trial, ids[1:])
        except ModelError:
            raise
        except Exception as error:
            raise UnsupportedModel(f"a trial step of {config.model_type} failed: {error!r}; {NEEDED}") from error
        if trial.calls != list(range(config.num_hidden_layers)):
            raise UnsupportedModel(
                f"{config.model_type} has {config.num_hidden_layers} layers and called paged attention for layers "
                f"{trial.calls}; only models with one such call per layer can be served; {NEEDED}"
            )
        # A layer that the configuration calls sliding must pass its window, otherwise it would see too many tokens.
        for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
            if kind.startswith("sliding") and self._context.rules[layer].window is None:
                raise UnsupportedModel(f"{config.model_type}: sliding layer {layer} passes no window to attention")
        return trial
