"""Decides which replicas may join by comparing, field by field, what router and replica must agree on.

Pure apart from reading the tokenizer's files. A replica that tokenizes or hashes differently would have a hit rate
of zero without any visible error, so it is refused with an error that names the field.
"""

from collections.abc import Sequence
from pathlib import Path

from ...kvcache.config import KvCacheSettings
from ...kvcache.hashing import BlockHash, BlockHasher
from ...kvcache.parity import canary_hash, template_digest, tokenizer_digest
from ...replica.messages import Parity, ReplicaDescription
from ..backend import TextDigests, TextSource
from ..errors import ParityMismatch


def text_digests(folder: Path) -> TextDigests:
    return TextDigests(tokenizer_digest(folder), template_digest(folder))


def text_source(folder: Path, model_dir: Path | None = None) -> TextSource:
    """The folder's tokenizer and template with their current digests. `model_dir`: the model's folder, if different."""
    return TextSource(str(folder), text_digests(folder), str(model_dir or folder))


def own_parity(digests: TextDigests, cache: KvCacheSettings, cluster_seed: int, model_root: BlockHash) -> Parity:
    """The router's own parity values. `model_root` is the first replica's: the router has no weights to derive it."""
    hasher = BlockHasher(cache.block_size, cluster_seed, cache.hash_algorithm)
    return Parity(
        tokenizer_digest=digests.tokenizer,
        template_digest=digests.template,
        block_size=cache.block_size,
        hash_algorithm=cache.hash_algorithm,
        model_root=model_root,
        canary=canary_hash(hasher, model_root),
    )


def compare(ours: Parity, theirs: Parity, replica_id: str) -> None:
    """Raise ParityMismatch for the first field that differs."""
    for field in Parity.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            shown = [value.hex() if isinstance(value, bytes) else value for value in (mine, other)]
            raise ParityMismatch(replica_id, field, *shown)


def changes(known: dict[str, int], wanted: Sequence[ReplicaDescription]) -> tuple[list[str], list[ReplicaDescription]]:
    """The known replicas that `wanted` lacks, and those that join. A replica with a new epoch is in both lists."""
    epochs = {replica.replica_id: replica.epoch for replica in wanted}
    lost = [replica for replica, epoch in known.items() if epochs.get(replica) != epoch]
    return lost, [replica for replica in wanted if known.get(replica.replica_id) != replica.epoch]
