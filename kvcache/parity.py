"""Digests that router and replica compare before they rely on equal block hashes. Pure functions of files and bytes.

If a router tokenizes or hashes differently from the replica, requests silently never hit the cache; with these digests,
the replica is refused when it joins. Both sides call the functions here, so the digests cannot diverge.
"""

import json
from hashlib import sha256
from pathlib import Path

from .hashing import BlockHash, BlockHasher, canonical, token_bytes

#: Files that determine how text becomes token ids; a model folder has some of them.
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
#: Number of blocks in the canary prompt; more than one, so that it also detects wrong parents.
CANARY_BLOCKS = 3


def tokenizer_digest(folder: Path) -> str:
    """Return the hex sha256 of the names and contents of the tokenizer files."""
    return _files_digest(b"tokenizer", folder, TOKENIZER_FILES)


def template_digest(folder: Path) -> str:
    """Return the hex sha256 of the chat template: its own files and the one inside `tokenizer_config.json`."""
    own, embedded, path = _files_digest(b"template", folder, TEMPLATE_FILES), b"", folder / "tokenizer_config.json"
    if path.is_file():
        embedded = json.dumps(json.loads(path.read_text()).get("chat_template"), sort_keys=True).encode()
    return sha256(canonical(own.encode(), embedded)).hexdigest()


def canary_hash(hasher: BlockHasher, model_root: BlockHash) -> BlockHash:
    """Return the last hash of a fixed prompt: equal only with the same root, seed, algorithm and block size."""
    return hasher.chain(model_root, token_bytes(range(CANARY_BLOCKS * hasher.block_size)))[-1]


def _files_digest(kind: bytes, folder: Path, names: tuple[str, ...]) -> str:
    present = [folder / name for name in names if (folder / name).is_file()]
    fields = [field for path in present for field in (path.name.encode(), path.read_bytes())]
    return sha256(canonical(kind, *fields)).hexdigest()
