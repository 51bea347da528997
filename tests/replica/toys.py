"""Small random checkpoints, transformers' answers to them, and a toy scheduler that drives a runner with plans."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import PlanRow, StepPlan, plan_of_rows
from homing.replica.execute.runner import ModelRunner

torch.set_num_threads(1)

BLOCK_SIZE = 8
NUM_BLOCKS = 160

#: The vocabulary is odd, so that ranks cannot split it evenly.
BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_checkpoint(folder: Path, model_type: str, seed: int = 0, shard: str = "5GB", **overrides: Any) -> Path:
    """Save a random model with well-spread logits, so that greedy choices do not tie."""
    config = AutoConfig.for_model(model_type, **(BASE | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                deviation = 1.0 if "embed" in name and not config.tie_word_embeddings else parameter.shape[-1] ** -0.5
                parameter.normal_(0, deviation)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def without_numbers(folder: Path, token: int, made: Path) -> Path:
    """The same model, but with a NaN embedding for one token, as with damaged weights or overflow."""
    shutil.copytree(folder, made, dirs_exist_ok=True)
    file = made / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][token] = math.nan
    save_file(tensors, file, {"format": "pt"})
    return made


def with_tokenizer(folder: Path, made: Path) -> Path:
    """The same model with a tokenizer: ASCII's printable characters from id 3 on, then pairs of letters."""
    shutil.copytree(folder, made, dirs_exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    signs = [chr(code) for code in range(33, 127)] + ["Ġ"]
    words = ["<pad>", "<s>", "</s>", *signs, *(a + b for a in letters for b in letters)][: BASE["vocab_size"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def make_prompts() -> list[list[int]]:
    """Some share 21 tokens (two blocks and part of a third), some fit into less than a block."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(3, BASE["vocab_size"], (count,), generator=generator).tolist()

    shared = ids(21)
    return [shared + ids(4), ids(3), shared + ids(30), ids(40), shared[:16] + ids(1)]


def make_runner(folder: Path, provider: str = "auto", **settings: Any) -> ModelRunner:
    """A float32 runner with allocated KV memory."""
    chosen = ReplicaSettings(dtype="float32", device="cpu", model_provider=provider, **settings)
    runner = ModelRunner(chosen, folder, BLOCK_SIZE)
    runner.allocate_kv(NUM_BLOCKS)
    return runner


def generate(folder: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy answers of transformers' `generate`, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        outputs = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            for prompt in prompts
        ]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


@dataclass(slots=True)
class Progress:
    index: int
    tokens: list[int]
    prompt_tokens: int
    done: int = 0
    blocks: list[int] = field(default_factory=list)


class ToyScheduler:
    """Runs prompts greedily: one joins per step, prefills are chunked, and full blocks of equal prefixes are shared."""

    def __init__(self, forward: Callable[[StepPlan], torch.Tensor | None], chunk: int, reuse: bool = True) -> None:
        self._forward = forward
        self._chunk = chunk
        self._reuse = reuse
        self._free = list(range(NUM_BLOCKS - 1, 0, -1))
        self._prefixes: dict[tuple[int, ...], int] = {}
        self.hit_tokens = 0
        self.mixed_steps = 0

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        waiting = [Progress(index, list(prompt), len(prompt)) for index, prompt in enumerate(prompts)]
        running: list[Progress] = []
        answers: list[list[int]] = [[] for _ in prompts]
        step = 0
        while waiting or running:
            if waiting:
                running.append(self._admit(waiting.pop(0)))
            self._step(step, running)
            for sequence in [s for s in running if len(s.tokens) - s.prompt_tokens == new_tokens]:
                answers[sequence.index] = sequence.tokens[sequence.prompt_tokens :]
                running.remove(sequence)
            step += 1
        return answers

    def _admit(self, sequence: Progress) -> Progress:
        full = 0
        while self._reuse and (full + BLOCK_SIZE) < len(sequence.tokens):
            block = self._prefixes.get(tuple(sequence.tokens[: full + BLOCK_SIZE]))
            if block is None:
                break
            sequence.blocks.append(block)
            full += BLOCK_SIZE
        sequence.done = full
        self.hit_tokens += full
        return sequence

    def _step(self, step: int, running: list[Progress]) -> None:
        rows = [self._row(sequence) for sequence in running]
        complete = [s.done + len(r.token_ids) == len(s.tokens) for s, r in zip(running, rows, strict=True)]
        ends = torch.tensor([len(row.token_ids) for row in rows]).cumsum(0) - 1
        wanted = [int(end) for end, done in zip(ends, complete, strict=True) if done]
        self.mixed_steps += len({len(row.token_ids) == 1 for row in rows}) == 2
        logits = self._forward(plan_of_rows(step, rows, wanted))
        assert logits is not None
        assert logits.shape[0] == len(wanted)
        chosen = iter(logits.argmax(-1).tolist())
        for sequence, row, ready in zip(running, rows, complete, strict=True):
            sequence.done += len(row.token_ids)
            self._remember(sequence)
            if ready:
                sequence.tokens.append(next(chosen))

    def _row(self, sequence: Progress) -> PlanRow:
        ids = sequence.tokens[sequence.done : sequence.done + self._chunk]
        while len(sequence.blocks) * BLOCK_SIZE < sequence.done + len(ids):
            sequence.blocks.append(self._free.pop())
        return PlanRow(ids, sequence.done, sequence.blocks)

    def _remember(self, sequence: Progress) -> None:
        for index in range(sequence.done // BLOCK_SIZE):
            self._prefixes.setdefault(tuple(sequence.tokens[: (index + 1) * BLOCK_SIZE]), sequence.blocks[index])
