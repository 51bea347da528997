"""Two models on one cluster: one address, but separate replicas, tokenizers and caches."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from homing.replica.demo import demo_model_path

from ..replica.toys import save_checkpoint
from .running import KEY, Serving, ends_with, homing, restarted, serving, until

pytestmark = pytest.mark.cluster

FOX, OWL = "fox", "forest/owl"
PROMPT = "A long prompt that is sent again and again. " * 20
CONFIG = """
models:
  - name: {fox}
    model: demo
    replicas: 1
  - name: {owl}
    model: {folder}
    tokenizer: {tokenizer}
    replicas: 1
    block_size: 32
    tensor_parallel_size: 2
"""


def tiny_llama(folder: Path) -> Path:
    """A random model without a tokenizer."""
    return save_checkpoint(folder, "llama", vocab_size=4096, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file for the demo model and a tiny random model with two ranks."""
    path = tmp_path_factory.mktemp("config") / "two.yaml"
    path.write_text(
        CONFIG.format(fox=FOX, owl=OWL, folder=tiny_llama(path.parent / "tiny"), tokenizer=demo_model_path())
    )
    return path


@pytest.fixture(scope="module")
def own(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Serving]]:
    """A cluster that serves both models."""
    flags = ("--config", str(config))
    with restarted(lambda: serving(tmp_path_factory.mktemp("state"), *flags, patience_s=300.0)) as start:
        yield start


@pytest.fixture
def both(own: Callable[[], Serving]) -> Serving:
    return own()


def ask(running: Serving, model: str | None, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "model": model} | more
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


def only_replica(running: Serving, model: str) -> dict[str, Any]:
    """The entry of /cluster for the model's only replica."""
    name = model.replace("/", "-")
    (found,) = [each for each in running.replicas().values() if each["replica_id"].rpartition("-")[0] == name]
    return found


def answered(response: httpx.Response) -> tuple[str, str, int]:
    """The answer's text, the replica that gave it, and the number of cached prompt tokens."""
    answer = response.raise_for_status().json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], response.headers["x-homing-replica"], cached


def test_both_models_answer_each_from_its_own_cache(both: Serving) -> None:
    """Both models get the same prompt, so that a shared index or tokenizer would be noticed."""
    with both.client() as client:
        listed = sorted(model.id for model in client.models.list())

    prompt = "Nobody else asks this. " + PROMPT
    first = {name: answered(ask(both, name, prompt=prompt)) for name in (FOX, OWL)}
    again = {name: answered(ask(both, name, prompt=prompt)) for name in (FOX, OWL)}

    assert listed == sorted([FOX, OWL])
    assert first[FOX][0] != first[OWL][0]
    assert {name: text for name, (text, _, _) in first.items()} == {name: text for name, (text, _, _) in again.items()}
    assert [who.split("-r")[0] for _, who, _ in first.values()] == ["fox", "forest-owl"]
    assert all(cached <= 1 for _, _, cached in first.values())  # prompts may share their first token
    assert all(cached > 100 for _, _, cached in again.values())


def test_a_request_must_say_which_model_it_means(both: Serving) -> None:
    """Otherwise the request is refused; the error for an unknown model lists the served models."""
    unknown, unnamed = ask(both, "ox"), ask(both, None)

    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == f"model 'ox' does not exist; served models: '{FOX}', '{OWL}'"
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")


def test_a_model_is_scaled_by_its_name_and_the_other_one_stays(both: Serving) -> None:
    """Commands that could refer to either model refuse to run without a name; status shows both."""
    before, owl = only_replica(both, FOX), only_replica(both, OWL)

    refused = homing(both.state, "scale", "2")
    scaled = homing(both.state, "scale", FOX, "2")
    status = homing(both.state, "status").stdout
    back = homing(both.state, "drain", before["replica_id"])

    assert refused.returncode == 2
    assert f"several models are served: {FOX}, {OWL}" in refused.stderr
    assert scaled.returncode == 0, scaled.stdout + scaled.stderr
    assert f"{FOX}: 2 serving" in status
    assert f"{OWL}: 1 serving" in status
    assert back.returncode == 0, back.stdout + back.stderr
    both.serving(2)
    assert only_replica(both, FOX)["replica_id"] != before["replica_id"]
    assert only_replica(both, OWL)["epoch"] == owl["epoch"]


def test_one_model_streams_on_while_the_others_replica_dies_and_is_rebuilt(both: Serving) -> None:
    """One model loses its only replica; the other model's requests must not wait for it."""
    whole = ask(both, FOX, max_tokens=200).json()["choices"][0]["text"]
    owl = only_replica(both, OWL)

    with both.client() as client:
        stream = client.completions.create(
            model=FOX, prompt=PROMPT, max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(stream)]
        psutil.Process(owl["pids"][1]).send_signal(signal.SIGKILL)
        until(lambda: True if owl["replica_id"] not in both.replicas() else None, "the killed replica has left routing")
        meanwhile = answered(ask(both, FOX))
        chunks += list(stream)

    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert meanwhile[1] == only_replica(both, FOX)["replica_id"]
    assert both.serving(2)[owl["replica_id"]]["epoch"] != owl["epoch"]
    assert answered(ask(both, OWL))[1] == owl["replica_id"]


def test_an_update_replaces_the_replicas_of_one_model(both: Serving) -> None:
    """Only the named model is updated; without a name, the command is refused."""
    before, owl = only_replica(both, FOX), only_replica(both, OWL)

    refused = homing(both.state, "update", "--block-size", "16")
    updated = homing(both.state, "update", "--served-model-name", FOX, "--block-size", "64")

    assert refused.returncode == 2
    assert "--served-model-name" in refused.stderr
    assert updated.returncode == 0, updated.stdout + updated.stderr
    both.serving(2)
    after = only_replica(both, FOX)
    assert only_replica(both, OWL)["epoch"] == owl["epoch"]
    assert after["epoch"] != before["epoch"]
    assert answered(ask(both, FOX))[1] == after["replica_id"]


def test_a_model_is_added_and_taken_away_while_the_others_serve(both: Serving, config: Path) -> None:
    """Running streams finish before the removed model leaves; afterwards the model is unknown."""
    owl = only_replica(both, OWL)
    third = config.with_name("three.yaml")
    wolf = "  - name: wolf\n    model: demo\n    replicas: 1\n"
    third.write_text(config.read_text().replace("model: demo", "model: demo\n    block_size: 32") + wolf)

    added = homing(both.state, "update", "--config", str(third))
    assert added.returncode == 0, added.stdout + added.stderr
    whole = ask(both, "wolf", max_tokens=300).json()["choices"][0]["text"]
    with both.client() as client:
        stream = client.completions.create(
            model="wolf", prompt=PROMPT, max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(stream)]
        refused = homing(both.state, "update", "--config", str(config))
        removed = homing(both.state, "update", "--remove", "wolf")
        chunks += list(stream)

    assert refused.returncode == 2
    assert "to stop serving them, add --remove wolf" in refused.stderr
    assert removed.returncode == 0, removed.stdout + removed.stderr
    assert "replica_drained replica=wolf-r0" in removed.stdout
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert ask(both, "wolf").status_code == 404
    replicas = both.serving(2)
    assert only_replica(both, OWL)["epoch"] == owl["epoch"]
    assert answered(ask(both, FOX))[1] == only_replica(both, FOX)["replica_id"]
    assert not any(name.startswith("wolf") for name in replicas)


def test_a_raylet_that_dies_ends_everything_at_once_with_the_reason(both: Serving) -> None:
    """Replicas of two models and the ranks of one end, too. The last test, because it ends the cluster."""
    ends_with(both, "raylet", FOX)
