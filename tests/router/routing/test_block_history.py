"""The recent past of blocks: bounded, and the last event of each block counts."""

from random import Random

from homing.router.routing.block_history import MAX_LOSSES, BlockEvent, BlockHistory, BlockLog


def test_the_last_event_of_each_recent_block_is_found() -> None:
    """Compared with a plain dictionary, over sealed chunks and the newest blocks."""
    rng, log, known = Random(1), BlockLog(capacity=10**6, chunk=50), dict[int, BlockEvent]()
    for number in range(200):
        blocks = [
            rng.randrange(2**64) if rng.random() < 0.5 or not known else rng.choice(list(known)) for _ in range(7)
        ]
        event = BlockEvent("r0", float(number), "")
        log.add(blocks, event)
        known |= dict.fromkeys(blocks, event)

    assert {block: log.find(block) for block in known} == known
    assert log.find(rng.randrange(2**64)) is None


def test_the_log_is_bounded() -> None:
    """Replicas evict millions of blocks a day."""
    log = BlockLog(capacity=100, chunk=10)
    for block in range(1000):
        log.add([block], BlockEvent("r0", 0.0, ""))

    assert len(log) <= 110
    assert log.find(999) is not None
    assert log.find(0) is None


def test_a_loss_is_found_by_its_replica_and_time() -> None:
    """A block computed after the loss is not explained by it."""
    past = BlockHistory()
    for now in range(2 * MAX_LOSSES):
        past.now = float(now)
        past.lost(f"r{now % 2}")

    assert past.loss_of("r1", MAX_LOSSES + 2.0) == MAX_LOSSES + 3.0
    assert past.loss_of("r1", 1e9) is None
    assert past.loss_of("r0", 0.0) == float(MAX_LOSSES)
