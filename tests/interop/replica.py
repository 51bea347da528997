"""What an indexer follows: the cache and the publisher of a replica, and a network that loses messages. No model."""

import threading
from collections.abc import Sequence
from random import Random

import zmq

from homing.events.config import EventsSettings
from homing.events.publish.publisher import EventPublisher
from homing.kvcache.hashing import BlockHash, BlockHasher, tenant_root, token_bytes
from homing.kvcache.prefix_cache import PrefixCache

BLOCK_SIZE = 4
HASHER = BlockHasher(BLOCK_SIZE, seed=5)
MODEL_ROOT = BlockHash(b"root of a model.")


class Replica:
    """A cache of few blocks that announces what it holds where Dynamo looks for it."""

    def __init__(self, settings: EventsSettings, *, epoch: int, blocks: int) -> None:
        self._publisher = EventPublisher(settings, host="127.0.0.1", block_size=BLOCK_SIZE, epoch=epoch)
        self._cache = PrefixCache(blocks + 1, BLOCK_SIZE, listener=self._publisher, partial_block_reuse=False)
        self.endpoints = self._publisher.start()

    def compute(self, tokens: Sequence[int], salt: str) -> None:
        """Serve a prompt as an engine does, in two chunks."""
        root, data = _root(salt), token_bytes(tokens)
        hashes, stride = HASHER.chain(root, data), BLOCK_SIZE * 4
        match = self._cache.match(root, hashes, data, len(tokens))
        table = self._cache.acquire(match, len(hashes) - len(match.blocks))
        assert table is not None, "the cache is too small for a prompt"
        start = len(match.blocks)
        for end in ((start + len(hashes)) // 2, len(hashes)):
            parent = hashes[start - 1] if start else root
            content = data[start * stride : end * stride]
            self._cache.commit(table[start:end], start, parent, hashes[start:end], content, salt)
            self._publisher.flush()
            start = end
        self._cache.release(table)
        self._publisher.flush()

    def cached_blocks(self, tokens: Sequence[int], salt: str) -> int:
        """The full blocks of a prompt that it would not compute."""
        root, data = _root(salt), token_bytes(tokens)
        return len(self._cache.match(root, HASHER.chain(root, data), data, len(tokens)).blocks)

    def reset(self) -> None:
        assert self._cache.reset()

    def close(self) -> None:
        self._publisher.close()


def _root(salt: str) -> BlockHash:
    return tenant_root(MODEL_ROOT, salt=salt.encode())


class LossyLink:
    """Forwards a publisher's messages unchanged to an address of its own, except for those that it loses."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", source: str, random: Random, loss: float) -> None:
        self._random, self._loss = random, loss
        self.lost = 0
        self._sub, self._pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._sub.subscribe(b"")
        self._sub.connect(source)
        self._sub.rcvtimeo = 50
        self.address = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                frames = self._sub.recv_multipart()
            except zmq.Again:
                continue
            if self._random.random() < self._loss:
                self.lost += 1
            else:
                self._pub.send_multipart(frames)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._sub.close(0)
        self._pub.close(0)
