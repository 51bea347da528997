"""Digests of this replica's model: what its KV depends on, and what a router must agree on. Only reads files."""

from hashlib import sha256
from pathlib import Path

from ...kvcache.config import KvCacheSettings
from ...kvcache.hashing import BlockHasher, CacheIdentity, canonical, model_root
from ...kvcache.parity import canary_hash, template_digest, tokenizer_digest
from ..messages import Parity

#: Weights are sampled, not read in full (140 GB for 70 B parameters): a fine-tuned model keeps configuration and
#: headers but changes nearly every weight, so a few windows per file distinguish it from its base.
SAMPLE_WINDOWS = 16
SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path, dtype: str) -> bytes:
    """sha256 over configuration, weights index, each weights file's header and samples of its data, and the dtype."""
    named = [folder / "config.json", *sorted(folder.glob("*.index.json"))]
    texts = [field for path in named if path.is_file() for field in (path.name.encode(), path.read_bytes())]
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    samples = [field for path in weights for field in (path.name.encode(), _weights_digest(path))]
    return sha256(canonical(b"model", dtype.encode(), *texts, b"weights", *samples)).digest()


def cache_identity(folder: Path, dtype: str, settings: KvCacheSettings) -> CacheIdentity:
    return CacheIdentity(
        model_fingerprint=model_fingerprint(folder, dtype),
        kv_dtype=dtype,
        block_size=settings.block_size,
        hash_algorithm=settings.hash_algorithm,
    )


def parity(folder: Path, identity: CacheIdentity, hasher: BlockHasher) -> Parity:
    """What a router compares with its own values before it sends requests."""
    root = model_root(identity)
    return Parity(
        tokenizer_digest=tokenizer_digest(folder),
        template_digest=template_digest(folder),
        block_size=identity.block_size,
        hash_algorithm=identity.hash_algorithm,
        model_root=root,
        canary=canary_hash(hasher, root),
    )


def _weights_digest(path: Path) -> bytes:
    """Header (for safetensors: names, shapes, offsets), length and evenly spaced windows of one file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = 0
        if path.suffix == ".safetensors":  # the first 8 bytes are the JSON header's length; the file may be damaged
            header = min(int.from_bytes(file.read(8), "little"), max(0, size - 8))
        digest = sha256(canonical(size.to_bytes(8, "little"), file.read(header)))
        start = file.tell()
        for window in range(SAMPLE_WINDOWS):
            file.seek(start + (size - start) * window // SAMPLE_WINDOWS)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
