"""Digests of a replica's model: what its KV depends on, and what a router must agree on. Only reads files."""

from hashlib import sha256
from pathlib import Path

from ...kvcache.config import KvCacheSettings
from ...kvcache.hashing import BlockHasher, CacheIdentity, canonical, model_root
from ...kvcache.parity import canary_hash, template_digest, tokenizer_digest
from ..messages import Parity

#: Weights are sampled, not read in full (140 GB for 70 B parameters). A fine-tuned model has the same configuration and
#: headers as its base, but nearly every weight differs, so a few windows per file tell them apart.
SAMPLE_WINDOWS = 16
SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path, dtype: str) -> bytes:
    """sha256 of the configuration, the weights index, each weight file's header and data samples, and the dtype."""
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
    """The values that a router compares with its own before it sends requests."""
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
    """Digest of one file's length, header (for safetensors: names, shapes, offsets) and evenly spaced windows."""
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
