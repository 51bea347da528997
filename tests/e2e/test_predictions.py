"""Predicted against delivered cached tokens on a live cluster: what the router believes of caches is what they hold."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .running import KEY, Serving, until

pytestmark = pytest.mark.cluster

#: Of about 300 tokens each.
SYSTEMS = tuple(
    f"You are helper {number}. You answer briefly, kindly and in plain words, and never invent anything. " * 15
    for number in range(3)
)
QUESTIONS = ("Who is the fox?", "Tell me a story about an owl and its friends in the forest.", "Why?", "And then?")
#: A person's or tool's turn. Without it one turn in a hundred overtakes the event of the last answer's last block.
THINKING_S = 0.02
RESULTS = ("exact", "low", "high")


class Mix:
    """Requests as an application sends them: conversations under shared system prompts, and one-off questions."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(self, path: str, body: dict[str, object]) -> dict[str, object]:
        """The answer's first choice."""
        answer = self._http.post(path, json=body | {"max_tokens": 24, "temperature": 0})
        choice: dict[str, object] = answer.raise_for_status().json()["choices"][0]
        return choice

    def conversation(self, number: int) -> None:
        """Four turns, each with all that was said before."""
        messages: list[object] = [{"role": "system", "content": SYSTEMS[number % len(SYSTEMS)]}]
        for turn, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": f"{question} ({number}.{turn})"})
            messages.append(self.ask("/v1/chat/completions", {"messages": messages})["message"])
            time.sleep(THINKING_S)

    def one_off(self, number: int) -> None:
        """A completion that shares its head with others."""
        self.ask("/v1/completions", {"prompt": f"{SYSTEMS[number % len(SYSTEMS)]} Question {number}: why?"})

    def several(self, number: int) -> None:
        """Four answers to one new question: siblings find what the first of them computes."""
        prompt = f"{SYSTEMS[number % len(SYSTEMS)]} Question {number}: which of the many animals in the wood is it?"
        self.ask("/v1/completions", {"prompt": prompt, "n": 4})

    def run(self, numbers: range) -> None:
        """For each number a conversation and two one-off questions, for some another with several answers, in turn."""
        for number in numbers:
            self.conversation(number)
            self.one_off(number)
            self.one_off(number + 1)
            if number % 3 == 0:
                self.several(number)


def predictions(cluster: Serving) -> dict[str, int]:
    """How many came out how, until now."""
    counters = cluster.cluster()["counters"]
    return {result: counters[f"predictions_{result}"] for result in RESULTS}


def test_in_steady_state_the_router_knows_what_replicas_have_cached(cluster: Serving) -> None:
    """Decisions rest on it. Warm, on two replicas: one client first, then four at once."""
    until(lambda: True if cluster.idle() else None, "nothing runs before")
    cluster.serving(2)
    with httpx.Client(
        base_url=cluster.url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False, timeout=60
    ) as http:
        mix = Mix(http)
        mix.run(range(3))
        before = predictions(cluster)
        mix.run(range(3, 28))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(mix.run, [range(start, start + 7) for start in range(28, 56, 7)]))
    after = predictions(cluster)

    counted = {result: after[result] - before[result] for result in RESULTS}
    total = sum(counted.values())
    assert total >= 300
    assert counted["exact"] >= 0.99 * total, counted
