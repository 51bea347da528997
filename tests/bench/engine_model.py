"""Make bench-engine's model: a Llama of 125 M parameters, random bfloat16 weights and a tokenizer of 32,000 tokens.

    python tests/bench/engine_model.py FOLDER [--gguf]

The tokenizer is a byte-level BPE trained on this Python's standard library, so that tokenizing costs what it does for
real text. No logit of a special token can win, so greedy answers have the requested length even on servers without
`ignore_eos`. `--gguf` writes the same model for llama.cpp (needs the package `gguf`).
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<|begin|>", "<|end|>", "<|pad|>")
BEGIN, END, PAD = range(len(SPECIALS))
VOCABULARY = 32_000
SEED = 20251121
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
SHAPE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
}
ROPE_THETA = 500_000.0


def make_model(folder: Path) -> Path:
    """Write the model unless the folder has it."""
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(folder)
        random_model().save_pretrained(folder)
        spell_twice(folder / "config.json")
    return folder


def library_texts() -> Iterator[str]:
    """The source of every module of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")


def save_tokenizer(folder: Path) -> None:
    """Train the tokenizer and save it as transformers does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIALS[BEGIN], eos_token=SPECIALS[END], pad_token=SPECIALS[PAD]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def random_model() -> Any:
    """Spread the weights: with transformers' default deviation of 0.02, greedy choices would tie in bfloat16."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=PAD,
        **SHAPE,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
        model.lm_head.weight[: len(SPECIALS)] = 0
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD, do_sample=False)
    return model


def spell_twice(path: Path) -> None:
    """Add the field names of transformers 4, which other servers read."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def make_gguf(folder: Path) -> Path:
    """Write the same model for llama.cpp unless the folder has it; return the file."""
    path = folder / "model.gguf"
    if not path.exists():
        _write_gguf(folder, path)
    return path


def _write_gguf(folder: Path, path: Path) -> None:
    import gguf  # installed only next to llama.cpp
    from safetensors.torch import load_file

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_rope_dimension_count(SHAPE["head_dim"])
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(SHAPE["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(VOCABULARY)
    _add_vocabulary(writer, folder, gguf)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(SHAPE["num_hidden_layers"]))
    for name, weight in load_file(folder / "model.safetensors").items():
        _add_weight(writer, names.get_name(name, try_suffixes=(".weight",)), name, weight, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, folder: Path, gguf: Any) -> None:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIALS else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _add_weight(writer: Any, target: str, name: str, weight: torch.Tensor, gguf: Any) -> None:
    """Norms are float32, others bfloat16. llama.cpp rotates neighbouring pairs, Hugging Face the halves of a head."""
    heads = {"q_proj": SHAPE["num_attention_heads"], "k_proj": SHAPE["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name:
            weight = weight.view(int(count), 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    if weight.dim() == 1:
        writer.add_tensor(target, weight.float().numpy())
        return
    data = weight.contiguous().view(torch.uint8).numpy()
    writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", action="store_true", help="also write it for llama.cpp, as model.gguf")
    options = parser.parse_args()
    make_model(options.folder)
    if options.gguf:
        make_gguf(options.folder)


if __name__ == "__main__":
    main()
