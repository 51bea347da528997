"""Predicted against actual cached tokens on a live cluster: the router's index must match the replicas' caches."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .running import KEY, Serving, until

pytestmark = pytest.mark.cluster

#: System prompts of about 300 tokens each.
SYSTEMS = tuple(
    f"You are helper {number}. You answer briefly, kindly and in plain words, and never invent anything. " * 15
    for number in range(3)
)
QUESTIONS = ("Who is the fox?", "Tell me a story about an owl and its friends in the forest.", "Why?", "And then?")
#: A client's pause between turns. Without it, 1 turn in 100 arrives before the event of the last answer's last block.
THINKING_S = 0.02
RESULTS = ("exact", "low", "high")


class Mix:
    """An application's mix of requests: conversations with shared system prompts, and one-off questions."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(self, path: str, body: dict[str, object]) -> dict[str, object]:
        """Send a request and return the answer's first choice: long enough to end a block."""
        answer = self._http.post(path, json=body | {"max_tokens": 17, "temperature": 0})
        choice: dict[str, object] = answer.raise_for_status().json()["choices"][0]
        return choice

    def conversation(self, number: int) -> None:
        """Four turns, each of which repeats the whole conversation so far."""
        messages: list[object] = [{"role": "system", "content": SYSTEMS[number % len(SYSTEMS)]}]
        for turn, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": f"{question} ({number}.{turn})"})
            messages.append(self.ask("/v1/chat/completions", {"messages": messages})["message"])
            time.sleep(THINKING_S)

    def one_off(self, number: int) -> None:
        """A completion that shares its prefix with others."""
        self.ask("/v1/completions", {"prompt": f"{SYSTEMS[number % len(SYSTEMS)]} Question {number}: why?"})

    def several(self, number: int) -> None:
        """Four answers to one new question: three of them find the prefix that the first computes."""
        prompt = f"{SYSTEMS[number % len(SYSTEMS)]} Question {number}: which of the many animals in the wood is it?"
        self.ask("/v1/completions", {"prompt": prompt, "n": 4})

    def run(self, numbers: range) -> None:
        """A conversation and two one-off questions per number; every third adds a request with four answers."""
        for number in numbers:
            self.conversation(number)
            self.one_off(number)
            self.one_off(number + 1)
            if number % 3 == 0:
                self.several(number)


def predictions(cluster: Serving) -> dict[str, int]:
    """Number of predictions so far, by result."""
    counters = cluster.cluster()["counters"]
    return {result: counters[f"predictions_{result}"] for result in RESULTS}


def test_in_steady_state_the_router_knows_what_replicas_have_cached(cluster: Serving) -> None:
    """Routing relies on the index. Measured warm, on two replicas: first one client, then four at once."""
    until(lambda: True if cluster.idle() else None, "no earlier request is running")
    cluster.serving(2)
    with httpx.Client(
        base_url=cluster.url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False, timeout=60
    ) as http:
        mix = Mix(http)
        mix.run(range(3))
        before = predictions(cluster)
        mix.run(range(3, 18))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(mix.run, [range(start, start + 10) for start in range(18, 58, 10)]))
    after = predictions(cluster)

    counted = {result: after[result] - before[result] for result in RESULTS}
    total = sum(counted.values())
    assert total >= 300
    assert counted["exact"] >= 0.99 * total, counted
