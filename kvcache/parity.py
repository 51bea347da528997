"""Digests that router and replica compare before they trust each other's block hashes. Pure over files and bytes.

A router that tokenizes or hashes in another way than the replica would never hit the cache, silently; these digests
make that a loud refusal at join. Both sides call the functions here, so that they cannot differ.
"""

import json
from hashlib import sha256
from pathlib import Path

from .hashing import BlockHash, BlockHasher, canonical, token_bytes

#: Files that decide how text becomes ids; a folder has some of them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
#: Blocks of the canary prompt: a chain, so that a wrong parent shows as well.
CANARY_BLOCKS = 3


def tokenizer_digest(folder: Path) -> str:
    """sha256 hex over the names and bytes of the tokenizer's files."""
    return _files_digest(b"tokenizer", folder, TOKENIZER_FILES)


def template_digest(folder: Path) -> str:
    """sha256 hex over the chat template: its own files and the one inside `tokenizer_config.json`."""
    own, embedded, path = _files_digest(b"template", folder, TEMPLATE_FILES), b"", folder / "tokenizer_config.json"
    if path.is_file():
        embedded = json.dumps(json.loads(path.read_text()).get("chat_template"), sort_keys=True).encode()
    return sha256(canonical(own.encode(), embedded)).hexdigest()


def canary_hash(hasher: BlockHasher, model_root: BlockHash) -> BlockHash:
    """Last hash of a fixed prompt: equal only with the same root, seed, algorithm and block size."""
    return hasher.chain(model_root, token_bytes(range(CANARY_BLOCKS * hasher.block_size)))[-1]


def _files_digest(kind: bytes, folder: Path, names: tuple[str, ...]) -> str:
    present = [folder / name for name in names if (folder / name).is_file()]
    fields = [field for path in present for field in (path.name.encode(), path.read_bytes())]
    return sha256(canonical(kind, *fields)).hexdigest()
