"""Estimate of a request's time to first token on one replica."""

from math import ceil

from ..replica_load import ReplicaLoad

#: Tokens that a request is assumed to generate when the wait for a slot is estimated. Not measured.
TYPICAL_OUTPUT_TOKENS = 128


def expected_ttft_s(load: ReplicaLoad, cached_tokens: int, uncached_tokens: int, new_blocks: int, now: float) -> float:
    """Seconds until the first token, if the request is sent there at `now`.

    The sum of: the rest of the queued prefill work; the prefill of this prompt's uncached tokens, by the replica's
    measured cost; one decode step for each prefill step, if anything decodes there; the wait for a slot and for free
    blocks, by the rate at which running requests end.
    """
    queued = load.queued_prefill_tokens
    prefill = load.prefill_cost.seconds(cached_tokens, uncached_tokens)
    if queued and load.busy_until > now:
        prefill += load.busy_until - now
    if not load.running:
        return prefill
    seconds = prefill + ceil((queued + uncached_tokens) / load.max_batched_tokens) * load.decode_step_s
    if new_blocks <= load.free_blocks and load.running + load.waiting < load.max_running_requests:
        return seconds
    turn_s = TYPICAL_OUTPUT_TOKENS * load.decode_step_s / load.running  # between the ends of two requests
    slots = load.requests + 1 - load.max_running_requests
    used = max(1, load.total_blocks - load.free_blocks)
    missing = new_blocks - load.free_blocks
    return seconds + max(0.0, slots, missing / used * load.running) * turn_s
