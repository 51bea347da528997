"""Measure a routing decision: from token ids to the message for the chosen replica, by the router's request flow.

    python tests/bench/decision.py [--out FILE] [--repeats N]

Figures are thread CPU time, the median of N. "All" covers the whole work for a prompt: hash, match, expect, score,
choose, reserve. The index also holds 200,000 other blocks; replicas are idle. Memory is what the interpreter allocated
(tracemalloc); the worst case is when no block is held by two replicas.
"""

import tracemalloc
from collections.abc import Callable
from random import Random
from statistics import median
from time import thread_time_ns

from report import Row, arguments, publish

from homing.events.follow.subscription import FeedStatus
from homing.events.wire.messages import CacheCounters, EventEndpoints, LoadReport
from homing.kvcache.hashing import BlockHash, BlockHasher, join_hashes, tenant_root, token_bytes, wire_hashes
from homing.kvcache.parity import canary_hash
from homing.replica.messages import ModelLimits, Parity, ReplicaDescription, SamplingParams
from homing.router.backend import GenerationRequest, RouterCounters
from homing.router.config import RouterSettings
from homing.router.flow.dispatcher import ServedModel
from homing.router.flow.request_flow import RequestFlow
from homing.router.routing.placement import Placement
from homing.router.routing.policy.registry import make_policy
from homing.router.routing.prefix_index import PrefixIndex

BLOCK_SIZE = 16
TOKENS = 32_768
BLOCKS = TOKENS // BLOCK_SIZE
CAPACITY = 1_000_000
ROOT = BlockHash(bytes(16))
HASHER = BlockHasher(BLOCK_SIZE, seed=7)
LIMITS = ModelLimits(name="bench", path="", vocab_size=TOKENS, max_model_len=2 * TOKENS, eos_token_ids=(0,))
NOWHERE = EventEndpoints(events="", replay="", state="", snapshot="")
#: How many of the prompt's blocks a replica holds, by its number.
Held = Callable[[Random, int], int]
SPREADS: dict[str, Held] = {
    "none holds any": lambda _rng, _replica: 0,
    "all hold all": lambda _rng, _replica: BLOCKS,
    "all share 10 blocks, one holds all": lambda _rng, replica: 10 if replica else BLOCKS,
    "each holds another part": lambda rng, _replica: rng.randrange(BLOCKS + 1),
}


def main() -> None:
    """Measure and print."""
    parser = arguments("Measure the cost of a routing decision")
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    few = max(10, options.repeats // 10)
    rows = [match_row(8, 50.0, name, options.repeats) for name in SPREADS]
    rows += [match_row(512, 100.0, name, options.repeats) for name in SPREADS]
    rows += [decision_row(8, 128, None, options.repeats), decision_row(8, 2_000, None, options.repeats)]
    rows += [decision_row(8, TOKENS, 600.0, options.repeats), decision_row(512, TOKENS, None, few)]
    rows += [crowded_row(512, short, options.repeats) for short in (0, 1, 40)]
    rows += [memory_row(8, 1, 60.0), memory_row(512, 1, 60.0), memory_row(8, 2, None), memory_row(512, 512, None)]
    publish(rows, options.out, ["msgspec", "xxhash"])


def match_row(replicas: int, goal: float, name: str, repeats: int) -> Row:
    """The index alone."""
    rng = Random(1)
    held = SPREADS[name]
    index = PrefixIndex()
    chain = [rng.getrandbits(64) for _ in range(BLOCKS)]
    for replica in range(replicas):
        index.join(f"r{replica}", CAPACITY, closed=True)
        index.add(f"r{replica}", chain[: held(rng, replica)])
    index.add("r0", [rng.getrandbits(64) for _ in range(200_000)])
    cost = median_us(lambda: index.lengths(chain), repeats)
    return Row(f"match {BLOCKS:,} blocks, {replicas} replicas: {name}", "us", cost, goal)


def decision_row(replicas: int, tokens: int, goal: float | None, repeats: int) -> Row:
    """The whole request flow; half of the replicas hold the whole prompt."""
    flow = idle_cluster(replicas)
    prompt = token_bytes(range(tokens))
    keys = keys_of(prompt)
    for replica in range(0, replicas, 2):
        flow.placement.stored(f"r{replica}", keys)
    return Row(f"all for {tokens:,} tokens, {replicas} replicas", "us", submit_us(flow, prompt, repeats), goal)


def crowded_row(replicas: int, short: int, repeats: int) -> Row:
    """The whole request flow while `short` replicas are short of memory.

    All run requests that share a system prompt of eight blocks with the new one, and differ in 20 more.
    """
    flow, running = idle_cluster(replicas), 26
    system, tail = list(range(8 * BLOCK_SIZE)), 20 * BLOCK_SIZE
    for replica in range(replicas):
        flow.placement.stored(f"r{replica}", keys_of(token_bytes(system)))
    for number in range(running * replicas):
        flow.submit(request_of(token_bytes([*system, *range(number, number + tail)])), 0.0)
    for replica in range(replicas):
        free = 50_000 if replica < short else 900_000
        flow.report(f"r{replica}", report_of(running, free, running * replicas), 0.0)
    prompt = token_bytes([*system, *range(TOKENS - tail, TOKENS)])
    cost = submit_us(flow, prompt, repeats)
    return Row(f"all for 448 tokens, {replicas} replicas, {short} of them short of memory", "us", cost, None)


def submit_us(flow: RequestFlow, prompt: bytes, repeats: int) -> float:
    """Median thread CPU time of a request's submission; each request is cancelled afterwards."""
    costs = []
    for _ in range(repeats):
        begin = thread_time_ns()
        request_id, _ = flow.submit(request_of(prompt), 0.0)
        costs.append(thread_time_ns() - begin)
        flow.cancel(request_id, 0.0)
    return median(costs) / 1000


def keys_of(prompt: bytes) -> tuple[int, ...]:
    """The wire hashes of a prompt's blocks."""
    return wire_hashes(join_hashes(HASHER.chain(tenant_root(ROOT), prompt)))


def request_of(prompt: bytes) -> GenerationRequest:
    """A request for one token."""
    return GenerationRequest(trace_id="bench", token_ids=prompt, sampling=SamplingParams(max_tokens=1, seed=1))


def report_of(running: int, free: int, accepted: int) -> LoadReport:
    """A replica's load report."""
    return LoadReport(
        epoch=1,
        step=1,
        ts=0.0,
        running=running,
        waiting=0,
        queued_prefill_tokens=0,
        decode_context_tokens=0,
        free_blocks=free,
        cached_free_blocks=0,
        total_blocks=CAPACITY,
        prefill_tokens_per_s=10_000.0,
        decode_step_s=0.01,
        counters=CacheCounters(),
        accepted={"bench": accepted},
    )


def idle_cluster(replicas: int) -> RequestFlow:
    """A request flow with this many replicas, all live and idle."""
    placement = Placement(
        make_policy("expected-ttft"),
        router_id="bench",
        silence_s=1e9,
        rng=Random(1),
    )
    settings = RouterSettings(max_waiting_requests=100, warm_up_share=0.0)
    flow = RequestFlow(placement, settings, block_size=BLOCK_SIZE, counters=RouterCounters())
    flow.adopt(ServedModel(HASHER, ROOT, LIMITS))
    for replica in range(replicas):
        flow.join(description(f"r{replica}"), 0.0)
        placement.set_feed(f"r{replica}", FeedStatus.LIVE)
    return flow


def description(name: str) -> ReplicaDescription:
    """A replica's description of itself."""
    parity = Parity(
        tokenizer_digest="",
        template_digest="",
        block_size=BLOCK_SIZE,
        hash_algorithm="xxh3_128",
        model_root=ROOT,
        canary=canary_hash(HASHER, ROOT),
    )
    return ReplicaDescription(
        replica_id=name,
        epoch=1,
        request_endpoint="",
        event_endpoints=NOWHERE,
        parity=parity,
        model=LIMITS,
        num_blocks=CAPACITY,
        max_running_requests=256,
        max_batched_tokens=8192,
        tensor_parallel_size=1,
        prefill_tokens_per_s=10_000.0,
        decode_step_s=0.01,
    )


def memory_row(replicas: int, holders: int, goal: float | None) -> Row:
    """Memory per held block, for 800,000 of them, each on `holders` replicas and stored 8 at a time."""
    rng, held = Random(1), 800_000
    tracemalloc.start()
    index = PrefixIndex()
    for replica in range(replicas):
        index.join(f"r{replica}", CAPACITY, closed=True)
    for batch in range(held // holders // 8):
        blocks = [rng.getrandbits(64) for _ in range(8)]
        for replica in range(holders):
            index.add(f"r{(batch + replica) % replicas}", blocks)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sharing = f"each block on {holders}" if holders > 1 else "none shared"
    return Row(f"index memory per replica-block, {replicas} replicas, {sharing}", "bytes", used / held, goal)


def median_us(work: Callable[[], object], repeats: int) -> float:
    """Median thread CPU time of one call."""
    costs = []
    for _ in range(repeats):
        begin = thread_time_ns()
        work()
        costs.append(thread_time_ns() - begin)
    return median(costs) / 1000


if __name__ == "__main__":
    main()
