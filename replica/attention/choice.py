"""Which attention backend serves a device."""

import logging

import torch

from .base import AttentionBackend, KvPool
from .cpu import ScratchAttention
from .reference import ReferenceAttention

logger = logging.getLogger(__name__)

#: Best first. The last one works everywhere.
BACKENDS: tuple[type[AttentionBackend], ...] = (ScratchAttention, ReferenceAttention)


def choose_attention(pool: KvPool, device: torch.device) -> AttentionBackend:
    """The first usable backend; logs why the ones before it are not.

    There is no CUDA backend: none is written until there is a GPU to test it on, and until then a CUDA device gets the
    reference, which is right and slow. A CUDA backend joins `BACKENDS` and needs nothing else.
    """
    for backend in BACKENDS:
        reason = backend.unusable(device)
        if reason is None:
            logger.info("attention_chosen backend=%s device=%s", backend.name, device)
            return backend(pool)
        logger.info("attention_unusable backend=%s reason=%r", backend.name, reason)
    raise AssertionError("the last backend works everywhere")
