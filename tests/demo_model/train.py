"""Train the demo model: tokenizer, weights, Hugging Face folder. `python -m tests.demo_model.train --out DIR`.

The result is determined by `--seed` and `--steps` (and, in the last bits of the floats, by the machine). Needs a CPU
core and three quarters of an hour; see `replica/demo/model/MODEL_CARD.md` for the run that made the shipped weights.
"""

import argparse
import copy
import math
import random
import re
import resource
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from . import corpus, tokenizer
from .corpus import Chat, Document, Plain
from .tokenizer import SPACE

MAX_POSITIONS = 8192

#: Which part of a text is learnt.
Learnt = Literal["nothing", "all", "values"]
_VALUE = re.compile(r'": (?:"([^"]*)"|([0-9]+))')
_WHOLE_VALUE = re.compile(r'": ("[^"]*"|[0-9]+.)')


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings that determine a training run.

    Muon was chosen in runs of 240 steps, by the mean loss of the last 40: AdamW alone at 0.003 gave 1.07, Muon at 0.01
    with AdamW at 0.01 gave 0.45. The rates lie between those of two complete runs on other data: with 0.004 and 0.002
    two numbers were copied badly, with 0.002 and 0.001 well.
    """

    seed: int = 0
    steps: int = 4300
    #: Tokens per batch, in `batch_tokens / row_tokens` rows.
    batch_tokens: int = 2048
    row_tokens: int = 512
    #: Every n-th batch is one row of `long_row_tokens` with long documents, so that late positions are trained, too.
    long_every: int = 8
    long_row_tokens: int = 2048
    #: After every n-th document comes a sequence of tokens to copy, so that copying is not unlearnt.
    copy_every: int = 6
    #: Whether the ends of values are learnt, too, in answers guided by a schema. They depend on the following keys.
    value_ends: bool = False
    #: Learning rates: for the matrices (Muon), and for embeddings and norms (AdamW).
    matrix_lr: float = 0.003
    other_lr: float = 0.0015
    warmup: int = 50
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 640


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document, or a row of several, as tokens.

    `learn[i]` says whether the model should learn to predict `ids[i]`; `positions[i]` restarts at 0 with each document.
    """

    ids: list[int]
    learn: list[bool]
    positions: list[int]

    def extend(self, ids: list[int], learn: list[bool], positions: list[int]) -> None:
        """Append tokens."""
        self.ids.extend(ids)
        self.learn.extend(learn)
        self.positions.extend(positions)


def encode(bpe: Tokenizer, document: Document, value_ends: bool = False) -> Encoded:
    """A document's tokens, as the chat template gives them. Answers and plain text are learnt, each with its end."""
    value = _WHOLE_VALUE if value_ends else _VALUE
    pieces: list[tuple[str, Learnt]] = [(tokenizer.BEGIN, "nothing")]
    match document:
        case Plain(text):
            pieces.append((text + tokenizer.END, "all"))
        case Chat(turns):
            for turn in turns:
                answer: Learnt = "values" if turn.guided else "all"
                pieces.append((f"{tokenizer.TURN_START}{turn.role}\n", "nothing"))
                pieces.append((turn.content + tokenizer.TURN_END, answer if turn.role == "assistant" else "nothing"))
                pieces.append(("\n", "nothing"))
    encoded = Encoded([], [], [])
    for text, learnt in pieces:
        encoding = bpe.encode(text, add_special_tokens=False)
        first, tokens = len(encoded.ids), len(encoding.ids)
        learn = [learnt == "all"] * tokens
        if learnt == "values":
            spans = [each.span(each.lastindex or 0) for each in value.finditer(text)]
            learn = [any(start < after and before < end for before, after in spans) for start, end in encoding.offsets]
        encoded.extend(encoding.ids, learn, list(range(first, first + tokens)))
    return encoded


def pack(documents: Iterator[Encoded], row_tokens: int, open_rows: int = 8) -> Iterator[Encoded]:
    """Rows of exactly `row_tokens` tokens, made of whole documents and padding (id 0). Longer documents are skipped.

    First fit over a few open rows: 4 % padding over the first 80 batches of seed 0.
    """
    rows = [Encoded([], [], []) for _ in range(open_rows)]
    for document in documents:
        if len(document.ids) > row_tokens:
            continue
        row = next((row for row in rows if len(row.ids) + len(document.ids) <= row_tokens), None)
        if row is None:
            full = max(rows, key=lambda row: len(row.ids))
            rest = row_tokens - len(full.ids)
            full.extend([0] * rest, [False] * rest, [0] * rest)
            yield full
            row = Encoded([], [], [])
            rows[rows.index(full)] = row
        row.extend(document.ids, document.learn, document.positions)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """`ids`, `learn` and `positions`, each [rows, tokens]."""

    ids: Tensor
    learn: Tensor
    positions: Tensor


def copying(bpe: Tokenizer, seed: int) -> Iterator[Encoded]:
    """Random tokens, repeated two or three times; all repetitions are learnt, except for their first token."""
    rng = random.Random(f"homing-demo-copying-{seed}")
    while True:
        tokens = [
            rng.randrange(len(tokenizer.SPECIAL_TOKENS), bpe.get_vocab_size()) for _ in range(rng.randrange(3, 24))
        ]
        ids = [bpe.token_to_id(tokenizer.BEGIN), *tokens * rng.randrange(2, 4)]
        first = len(tokens) + 2
        yield Encoded(ids, [False] * first + [True] * (len(ids) - first), list(range(len(ids))))


def stacked(rows: list[Encoded]) -> TrainingBatch:
    """A batch of rows of equal length."""
    return TrainingBatch(
        *(torch.tensor([getattr(row, part) for row in rows]) for part in ("ids", "learn", "positions"))
    )


def copying_batches(bpe: Tokenizer, recipe: Recipe) -> Iterator[TrainingBatch]:
    """Batches that contain only copying."""
    rows = pack(copying(bpe, recipe.seed), recipe.row_tokens)
    while True:
        yield stacked([next(rows) for _ in range(recipe.batch_tokens // recipe.row_tokens)])


def _mixed(bpe: Tokenizer, recipe: Recipe, documents: Iterator[Document]) -> Iterator[Encoded]:
    copied = copying(bpe, recipe.seed + 1)
    for index, document in enumerate(documents):
        yield encode(bpe, document, recipe.value_ends)
        if index % recipe.copy_every == 0:
            yield next(copied)


def batches(bpe: Tokenizer, recipe: Recipe, documents: Iterator[Document]) -> Iterator[TrainingBatch]:
    """The endless stream of training batches from short `documents`, with batches of long documents in between."""
    short = pack(_mixed(bpe, recipe, documents), recipe.row_tokens)
    made = (encode(bpe, each, recipe.value_ends) for each in corpus.long_documents(recipe.seed))
    long = pack(made, recipe.long_row_tokens, open_rows=3)
    step = 0
    while True:
        step += 1
        is_long = step % recipe.long_every == 0
        rows, tokens = (long, recipe.long_row_tokens) if is_long else (short, recipe.row_tokens)
        yield stacked([next(rows) for _ in range(recipe.batch_tokens // tokens)])


def build_model(recipe: Recipe, bpe: Tokenizer) -> LlamaForCausalLM:
    """The untrained model for `bpe`."""
    begin, end, turn_end, pad = (
        bpe.token_to_id(each) for each in (tokenizer.BEGIN, tokenizer.END, tokenizer.TURN_END, tokenizer.PAD)
    )
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=begin,
        eos_token_id=[turn_end, end],
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=begin, eos_token_id=[turn_end, end], pad_token_id=pad, do_sample=False
    )
    return model


class SharedEmbeddings(torch.nn.Module):
    """Embeddings in which tokens and their twins with a leading space differ by one learnt vector, equal for all twins.

    A token that is copied from the prompt is therefore as likely with its space as without: the context decides.
    """

    def __init__(self, bpe: Tokenizer, weight: Tensor) -> None:
        """Initialise from `weight`, [vocabulary, hidden]; the difference between twins is averaged over all of them."""
        super().__init__()
        vocab = bpe.get_vocab()
        own = torch.empty(len(vocab), dtype=torch.long)
        for token, index in vocab.items():
            own[index] = vocab.get(token.removeprefix(SPACE), index)
        spaced = own != torch.arange(len(vocab))
        kept, rows = own.unique(return_inverse=True)
        self.rows, self.spaced = rows, spaced[:, None].float()
        self.words = torch.nn.Parameter(weight.detach()[kept])
        self.space = torch.nn.Parameter((weight.detach() - weight.detach()[own])[spaced].mean(dim=0))

    def forward(self) -> Tensor:
        """The embedding of each token, [vocabulary, hidden]."""
        return embedding(self.rows, self.words) + self.spaced * self.space


@torch.no_grad()
def plant_copying(model: LlamaForCausalLM) -> None:
    """Plant copying: one head attends to the previous token, two of the next layer to what followed the same token.

    A small model learns these two steps late: not within 1,500 steps of this corpus (loss of repeated words 6.0, as
    good as chance). Everything planted may change in training. The first coordinate of all embeddings starts equal, as
    the bias that a query for "the previous token" needs; weights that add noise to the two steps start small.
    """
    const, spread, sharpness, fast, slow = 0.16, 0.02, 4.0, 0.25, 0.0101
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    embeddings = model.model.embed_tokens.weight
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    turns = [10_000.0 ** (-2 * i / size) for i in range(size // 2)]  # angle per position of the coordinates i, i + half
    for layer in model.model.layers:
        layer.mlp.down_proj.weight *= 0.2
        layer.self_attn.o_proj.weight *= 0.2
    first.o_proj.weight[:, :size] *= 5.0
    embeddings[:, 0] = const
    normed = const * math.sqrt(config.hidden_size) / math.hypot(const, spread * math.sqrt(config.hidden_size - 1))
    query, key = first.q_proj.weight, first.k_proj.weight
    query[:size] *= 0.1
    key[:size] *= 0.1
    for i, turn in enumerate(turns):
        if turn > fast:
            key[i, 0], key[i + size // 2, 0] = 7.0 / normed, 0.0
            query[i, 0], query[i + size // 2, 0] = 7.0 / normed * math.cos(turn), -7.0 / normed * math.sin(turn)
    told, seen = first.v_proj.weight[:size], first.o_proj.weight[:, :size]
    told[:, 0] = 0.0
    still = [i for i, turn in enumerate(turns) if turn <= slow]
    rows = [*still, *(i + size // 2 for i in still)]
    for part, shared in enumerate((1, 2)):
        hashed = slice(part * len(rows), (part + 1) * len(rows))
        head = shared * group
        own, other = told[hashed], seen[:, hashed].T.clone()
        other[:, 0] = 0.0
        queries = second.q_proj.weight[head * size : (head + 1) * size]
        keys = second.k_proj.weight[shared * size : (shared + 1) * size]
        values = second.v_proj.weight[shared * size : (shared + 1) * size]
        queries *= 0.1
        keys *= 0.1
        queries[rows] = sharpness * own / own.norm(dim=1, keepdim=True)
        keys[rows] = sharpness * other / other.norm(dim=1, keepdim=True)
        values[:, 0] = 0.0
        second.o_proj.weight[:, head * size : (head + 1) * size] = 3.0 * values.T


def document_mask(positions: Tensor) -> Tensor:
    """Attention mask, [rows, 1, tokens, tokens]: a token sees itself and earlier tokens of the same document.

    Without it the model has to find its own prompt among those of its neighbours. Compared once, 500 steps with it
    against 1,000 without (and a learning rate of 0.006): answers to facts cost 2.8 and 2.1 nats, sums 3.9 and 5.2.
    """
    document = (positions == 0).cumsum(dim=1)
    return torch.tril(document[:, None, :, None] == document[:, None, None, :])


def batch_loss(model: LlamaForCausalLM, embeddings: SharedEmbeddings, batch: TrainingBatch) -> Tensor:
    """Mean cross entropy over the tokens to learn. Only their logits are computed."""
    weight = embeddings()
    states = model.model(
        inputs_embeds=embedding(batch.ids, weight),
        attention_mask=document_mask(batch.positions),
        position_ids=batch.positions,
        use_cache=False,
    )
    hidden = states.last_hidden_state[:, :-1]
    learn = batch.learn[:, 1:]
    return cross_entropy(linear(hidden[learn], weight).float(), batch.ids[:, 1:][learn])


def build_optimizers(
    model: LlamaForCausalLM, embeddings: SharedEmbeddings, recipe: Recipe
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, norms and the weights that `plant_copying` changed."""
    attention = [layer.self_attn for layer in model.model.layers[:2]]
    planted = [each.weight for a in attention for each in (a.q_proj, a.k_proj, a.v_proj, a.o_proj)]
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2 and all(p is not each for each in planted)]
    others = [*embeddings.parameters(), *(p for p in model.parameters() if p.ndim == 1)]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.AdamW(planted, lr=0.2 * recipe.matrix_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to 2 %."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def train_steps(
    model: LlamaForCausalLM, embeddings: SharedEmbeddings, stream: Iterator[TrainingBatch], recipe: Recipe
) -> Iterator[float]:
    """Run `recipe.steps` steps and yield each one's loss. Forward in bfloat16, weights and optimizer in float32."""
    optimizers = build_optimizers(model, embeddings, recipe)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: learning_rate_factor(step, recipe)) for each in optimizers
    ]
    trained = [*model.model.layers.parameters(), *model.model.norm.parameters(), *embeddings.parameters()]
    model.train()
    for _, batch in zip(range(recipe.steps), stream, strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = batch_loss(model, embeddings, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def save(model: LlamaForCausalLM, embeddings: SharedEmbeddings, bpe: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder: weights in bfloat16, to be run in float32; the model in memory is not rounded."""
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings())
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.save_pretrained(out)
    rounded.config.dtype = torch.float32  # the same answers on every processor
    rounded.config.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it readable only by its owner
    tokenizer.save(bpe, MAX_POSITIONS, out)


def run(
    model: LlamaForCausalLM,
    embeddings: SharedEmbeddings,
    bpe: Tokenizer,
    recipe: Recipe,
    stream: Iterator[TrainingBatch],
    out: Path,
) -> float:
    """Train and save; return the mean loss of the last 50 steps. The folder is also saved every 250 steps."""
    start, recent = time.perf_counter(), deque[float](maxlen=50)
    for step, loss in enumerate(train_steps(model, embeddings, stream, recipe), start=1):
        recent.append(loss)
        if step % 50 == 0:
            wall_s = time.perf_counter() - start
            rate = step * recipe.batch_tokens / wall_s
            print(f"step {step} loss {fmean(recent):.4f} tokens/s {rate:.0f} wall {wall_s:.0f} s", flush=True)
        if step % 250 == 0:
            save(model, embeddings, bpe, out)
    save(model, embeddings, bpe, out)
    return fmean(recent)


def train(recipe: Recipe, out: Path) -> float:
    """The first stage: train tokenizer and model from scratch."""
    bpe = tokenizer.train_bpe(recipe.seed)
    model = build_model(recipe, bpe)
    plant_copying(model)
    embeddings = SharedEmbeddings(bpe, model.model.embed_tokens.weight)
    print(f"vocabulary {bpe.get_vocab_size()}, parameters {model.num_parameters():,}", flush=True)
    copying_recipe = replace(recipe, steps=220, matrix_lr=0.003, other_lr=0.003, warmup=30)
    run(model, embeddings, bpe, copying_recipe, copying_batches(bpe, recipe), out)
    return run(model, embeddings, bpe, recipe, batches(bpe, recipe, corpus.documents(recipe.seed)), out)


def drill(recipe: Recipe, out: Path) -> float:
    """The second stage: continue from the folder `out` (its bfloat16 weights) with `corpus.drill_documents`."""
    bpe = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    embeddings = SharedEmbeddings(bpe, model.model.embed_tokens.weight)
    return run(model, embeddings, bpe, recipe, batches(bpe, recipe, corpus.drill_documents(recipe.seed)), out)


def drill_recipe(seed: int) -> Recipe:
    """The second stage's shorter run at lower rates; not tuned. Its long documents come from another seed."""
    return Recipe(seed=seed + 1, steps=1200, matrix_lr=0.002, other_lr=0.001, value_ends=True)


def main() -> None:
    """Run the chosen stages and print their cost and loss."""
    parser = argparse.ArgumentParser(description="Train homing's demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=Recipe().seed)
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="steps of the first stage")
    parser.add_argument("--stage", choices=("both", "first", "drill"), default="both", help="drill resumes from --out")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more than the free cores is far slower")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    start, loss = time.perf_counter(), math.nan
    if arguments.stage != "drill":
        loss = train(Recipe(seed=arguments.seed, steps=arguments.steps), arguments.out)
    if arguments.stage != "first":
        loss = drill(drill_recipe(arguments.seed), arguments.out)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    print(f"done: wall {time.perf_counter() - start:.0f} s, CPU {cpu_s:.0f} s, loss {loss:.4f}")


if __name__ == "__main__":
    main()
