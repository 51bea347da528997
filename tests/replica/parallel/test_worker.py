"""Two ranks in two processes, over gloo and ZeroMQ, act as one replica: same tokens, and both stop together."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from homing.replica.errors import RankLost
from homing.replica.messages import Constraint
from homing.replica.parallel.step_broadcast import RankPlace

from ..clients import PATIENCE_S, Client, served
from ..fakes import generate
from ..toys import with_tokenizer
from .rank_process import SECRET

RANK = Path(__file__).with_name("rank_process.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def rank_process(folder: Path, rank: int, port: int, overlap: str = "off") -> Iterator[subprocess.Popen[str]]:
    """One of two ranks; its process is gone on exit, in every case."""
    command = [sys.executable, str(RANK), str(folder), str(rank), "2", str(port), overlap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


def rank_0(port: int, overlap: str = "off") -> dict[str, object]:
    return {
        "settings": {"tensor_parallel_size": 2, "overlap_steps": overlap},
        "place": RankPlace(rank=0, size=2, host="127.0.0.1", port=port, secret=SECRET),
    }


def test_each_rank_keeps_its_share_of_evicted_blocks_in_host_memory(folder: Path, tmp_path: Path) -> None:
    """The same prompts are answered alike computed, loaded, and after a load that failed on one of the ranks only."""
    port = free_port()
    spread = [list(range(start, start + 50)) for start in (3, 53, 103, 153)]
    options = rank_0(port) | {"kvcache": {"num_kv_blocks": 15, "host_kv_memory": 1 << 20}}
    with rank_process(folder, 1, port) as worker:
        with served(folder, tmp_path, **options) as running:
            client = running.client()
            for number in range(12):
                if number == 8:
                    running.server._engine._executor._runner.host.rows[:, 5] ^= 1
                client.ask(number, spread[number % 4], max_tokens=8)
                client.wait(number)

        assert worker.wait(PATIENCE_S) == 0
    answers = [client.tokens(number) for number in range(12)]
    assert answers[4:] == answers[:4] * 2
    assert [dict(client.outputs[number][0].loaded_tokens).get("CPU", 0) for number in range(12)] == [0] * 4 + [
        48
    ] * 4 + [0] * 4


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_two_ranks_answer_like_one_and_end_together(
    folder: Path, tmp_path: Path, prompts: list[list[int]], reference: Callable[..., list[list[int]]], overlap: str
) -> None:
    """Greedy tokens of two ranks equal `generate`'s, also when only rank 0 draws and both continue from its tokens.

    Each rank holds its own heads' KV, so the plan carries copies of the tokens that prompts share inside a block: one
    that skipped them would change tokens.
    """
    port, count = free_port(), len(prompts)
    branching = [prompts[0], prompts[2], [*prompts[2][:43], 9], prompts[0]]
    with rank_process(folder, 1, port, overlap) as worker:
        with served(folder, tmp_path, **rank_0(port, overlap)) as running:
            client = running.client()
            for number, prompt in enumerate(branching):
                client.ask(number, prompt, max_tokens=8, ignore_eos=False)
                client.wait(number)
            for number, prompt in enumerate(prompts, start=4):
                client.ask(number, prompt, max_tokens=8, ignore_eos=False)
            client.wait(*range(4, 4 + count))
            described = running.description

        assert worker.wait(PATIENCE_S) == 0
    assert [client.outputs[number][0].cached_tokens for number in range(4)] == [0, 21, 43, 24]
    assert [client.tokens(number) for number in range(4)] == reference(folder, branching, 8)
    assert [client.tokens(number) for number in range(4, 4 + count)] == reference(folder, prompts, 8)
    assert (described.tensor_parallel_size, described.pids[1]) == (2, worker.pid)


def test_two_ranks_that_launch_ahead_draw_what_one_rank_draws_step_by_step(
    folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    """Only rank 0 draws; the others get the tokens on the device within the step, without the host.

    Only rank 0 has guides and masks, and a step that waits for masks must keep the other rank in sync.
    """
    port, spelling = free_port(), with_tokenizer(folder, tmp_path_factory.mktemp("model"))
    constraint = Constraint(kind="regex", source="[a-z]{4} [0-9]{3}")

    def drawn(client: Client) -> list[list[int]]:
        for number, prompt in enumerate(prompts):
            client.ask(number, prompt, max_tokens=9, temperature=0.9, top_p=0.95, seed=number)
        client.wait(*range(len(prompts)))
        last = range(len(prompts), len(prompts) + 4)
        for number in last:
            request = generate(number, [5, 6, 7], client.hasher, max_tokens=12, temperature=0.9, seed=number)
            client.send(msgspec.structs.replace(request, constraint=constraint if number % 2 else None))
        client.wait(*last)
        return [client.tokens(number) for number in range(last.stop)]

    with rank_process(spelling, 1, port, "on"), served(spelling, tmp_path, **rank_0(port, "on")) as two:
        ahead = drawn(two.client())
    with served(spelling, tmp_path, settings={"overlap_steps": "off"}) as one:
        plain = drawn(one.client())

    assert ahead == plain


def test_rank_0_ends_with_a_clear_error_when_a_worker_dies(folder: Path, tmp_path: Path) -> None:
    """Its requests are handed back at once; the supervisor rebuilds both ranks."""
    port = free_port()
    with rank_process(folder, 1, port) as worker, served(folder, tmp_path, **rank_0(port)) as running:
        client = running.client()
        client.ask(1, [5, 6, 7], max_tokens=240)
        client.receive()
        worker.kill()
        client.wait(1)
        running.thread.join(PATIENCE_S)

        assert isinstance(running.error, RankLost)
        assert client.refused[1].retry


def test_a_worker_ends_when_rank_0_dies(folder: Path) -> None:
    """Even an idle worker must exit, although no collective fails there: otherwise it would hold its GPU forever."""
    port = free_port()
    with rank_process(folder, 0, port) as first, rank_process(folder, 1, port) as worker:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        first.kill()

        assert worker.wait(PATIENCE_S) == 3
        assert worker.stderr is not None
        assert "rank 0" in worker.stderr.read()
