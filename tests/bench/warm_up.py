"""Simulate what warming up a new replica gains: replicas join a modelled cluster cold, or with the hottest prefixes.

    python tests/bench/warm_up.py [--trace FILE] [--share 0.25] [--scenes replace,add,lost] [--speeds 2,5,8]

`replace`: four replicas are replaced one after another, as by a rolling update: each new one serves before the old one
drains. `add`: two replicas, at half the speed, get a third. `lost`: one of four dies, and its replacement has loaded 30
s later. *warm* is what production does: warm up for at most 10 s, and only until a request is held or prompts are
queued on all other replicas. *stubborn* ignores queued prompts. Replica model, placement and choice of hot prefixes are
production's; a warm-up takes as long as its prefills. Figures cover the requests answered from the first change until
all those that arrived up to a minute after the last change are done.
"""

from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from homing.cluster.lab.recorded_trace import MOONCAKE_BLOCK_TOKENS, read_trace
from homing.cluster.lab.simulate.replica import ROOT, ReplicaLimits, SimulatedReplica, Work
from homing.cluster.lab.simulate.results import Tally
from homing.cluster.lab.simulate.runs import Setup, replica_of
from homing.cluster.lab.simulate.simulation import Simulation
from homing.cluster.lab.simulate.workload import Arrival, Chats, compress, conversations, from_trace
from homing.kvcache.hashing import wire_hashes
from homing.router.flow.hot_prefixes import HotPrefixes
from homing.router.flow.request_flow import PRESSING_WAIT_S
from homing.router.routing.policy.registry import make_policy

BLOCK_TOKENS = MOONCAKE_BLOCK_TOKENS
LIMITS = ReplicaLimits(blocks=2048, block_tokens=BLOCK_TOKENS)
#: Interval at which the model's controller checks for changes.
LOOK_S = 0.05
START_S = 30.0
#: The default of `warm_up_s`, and `HOT_PREFIX_BYTES`.
LONGEST_S, MEMORY_BYTES = 10.0, 8 << 20
BEGIN_S, APART_S, AFTER_S = 120.0, 60.0, 60.0

Scene = Literal["replace", "add", "lost"]
Rule = Literal["cold", "warm", "stubborn"]


@dataclass(slots=True)
class Newcomer:
    """A loaded replica that is warming up and has not joined the simulation yet."""

    replica: SimulatedReplica
    since: float
    instead_of: str
    busy_until: float
    prefixes: list[tuple[int, ...]] | None = None


class Changing:
    """A simulation whose replicas change."""

    def __init__(self, scene: Scene, rule: Rule, share: float) -> None:
        self._rule, self._share = rule, share
        count = 2 if scene == "add" else 4
        self._setup = setup = Setup(limits=LIMITS, replicas=count)
        self._newcomers: dict[str, Newcomer] = {}
        self._book = HotPrefixes(BLOCK_TOKENS, MEMORY_BYTES)
        self._dies_at = BEGIN_S if scene == "lost" else None
        first = BEGIN_S + START_S if scene == "lost" else BEGIN_S
        replaced = count if scene == "replace" else 1
        #: when a replica has loaded, and which replica it replaces
        self._due = [(first + APART_S * n, f"r{n}" if scene == "replace" else "") for n in range(replaced)]
        self._ends = self._due[-1][0] + AFTER_S
        self._counting = False
        self.warm_s = self.warm_tokens = 0.0
        self.simulation = Simulation(
            self._join,
            lambda: make_policy(setup.policy),
            block_tokens=BLOCK_TOKENS,
            replicas=count,
            channel=setup.channel,
        )
        self.simulation.every(LOOK_S, self._look)

    def run(self, arrivals: Iterable[Arrival]) -> Tally:
        """Run until the last request of the measured window is answered."""
        for _ in self.simulation.run(self._noted(arrivals)):
            pass
        return self.simulation.tally

    def _noted(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        for arrival in arrivals:
            if arrival.at_s > self._ends:
                return
            hashes = b"".join(block.to_bytes(16, "big") for block in arrival.blocks)
            self._book.add(ROOT, bytes(4 * arrival.tokens), hashes)
            yield arrival

    def _look(self, now: float) -> None:
        simulation = self.simulation
        if now >= BEGIN_S and not self._counting:
            self._counting, simulation.tally = True, Tally()
        if self._dies_at is not None and now >= self._dies_at:
            self._dies_at = None
            simulation.kill("r0")
        while self._due and self._due[0][0] <= now:
            instead_of = self._due.pop(0)[1]
            name = f"new{len(self._due)}"
            self._newcomers[name] = Newcomer(replica_of(self._setup, name, 1), now, instead_of, now)
        for name, newcomer in list(self._newcomers.items()):
            if not self._warms_on(newcomer, now):
                self.warm_s += now - newcomer.since
                simulation.join(name)
                if newcomer.instead_of:
                    simulation.drain(newcomer.instead_of)

    def _warms_on(self, newcomer: Newcomer, now: float) -> bool:
        """Start the prefills that are due; False when the warm-up is complete or has to stop."""
        if self._rule == "cold" or now - newcomer.since >= LONGEST_S or self.simulation.waiting:
            return False
        if self._rule == "warm" and self._is_pressed(now):
            return False
        if newcomer.prefixes is None:
            newcomer.prefixes = self._hottest()
        while newcomer.prefixes and newcomer.busy_until <= now:
            self._compute(newcomer, newcomer.prefixes.pop(0))
        return bool(newcomer.prefixes) or newcomer.busy_until > now

    def _is_pressed(self, now: float) -> bool:
        simulation = self.simulation
        staying = [each for name, each in simulation.replicas.items() if name not in simulation.draining]
        return all((each.report(now).queued_prefill_s or 0.0) > PRESSING_WAIT_S for each in staying)

    def _hottest(self) -> list[tuple[int, ...]]:
        (router,) = self.simulation.routers
        room, kept = int(self._share * LIMITS.blocks), router.placement.index.__contains__
        return [wire_hashes(prefix.hashes) for prefix in self._book.hottest(room, held=lambda _: False, kept=kept)]

    def _compute(self, newcomer: Newcomer, blocks: tuple[int, ...]) -> None:
        replica = newcomer.replica
        before = replica.prefilled_tokens
        replica.add(Work(0, "", Arrival(0.0, len(blocks) * BLOCK_TOKENS, 1, blocks), 0.0), newcomer.busy_until)
        while (due := replica.next_at) is not None:
            replica.advance(due)
            newcomer.busy_until = due
        self.warm_tokens += replica.prefilled_tokens - before

    def _join(self, name: str, epoch: int) -> SimulatedReplica:
        newcomer = self._newcomers.pop(name, None)
        return newcomer.replica if newcomer is not None else replica_of(self._setup, name, epoch)


def workload(trace: Path | None, speed: float) -> Iterator[Arrival]:
    """Requests from the trace, or drawn: users of 40 assistants who stay for five turns."""
    if trace is not None:
        return compress(from_trace(read_trace(trace.read_text(encoding="utf-8").splitlines())), speed)
    return conversations(Chats(requests=1_000_000, rate_per_s=4.0 * speed, assistants=40, system_tokens=4096))


def main() -> None:
    """Run all scenes and print the table."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format; default: drawn conversations")
    parser.add_argument("--share", type=float, default=0.25, help="largest share of a new replica's cache to warm up")
    parser.add_argument("--scenes", default=",".join(get_args(Scene)))
    parser.add_argument("--speeds", default="2,5,8", help="factors on the rate; at 1, 4 requests per second are drawn")
    args = parser.parse_args()
    print("| | speed | | TTFT mean | p90 | p99 | hits | warm-up | tokens |")
    print("|---|---|---|---|---|---|---|---|---|")
    for scene in args.scenes.split(","):
        for speed in map(float, args.speeds.split(",")):
            for rule in get_args(Rule):
                run = Changing(scene, rule, args.share)
                tally = run.run(workload(args.trace, speed / 2 if scene == "add" else speed))
                ttft = tally.ttft
                print(
                    f"| {scene} | {speed:g} | {rule} | {ttft.mean:.3f} s | {ttft.quantile(0.9):.2f} s "
                    f"| {ttft.quantile(0.99):.2f} s | {tally.hit_tokens / max(1, tally.prompt_tokens):.1%} "
                    f"| {run.warm_s:.1f} s | {run.warm_tokens:,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
