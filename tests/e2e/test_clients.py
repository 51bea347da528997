"""Unmodified clients that people use: the server accepts what they send, and they can read its answers."""

from typing import Any

import httpx
import pytest

from homing.replica.demo import demo_model_path

from .running import Serving

pytestmark = pytest.mark.cluster
MODEL = "demo"
GREEDY = {"temperature": 0}
QUESTION = "Tell me a story about a fox."
MESSAGES = [{"role": "user", "content": QUESTION}]


def story(cluster: Serving) -> str:
    """The answer's text as OpenAI's client reads it."""
    with cluster.client() as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=20)
    text = answer.choices[0].message.content
    assert text
    return text


def test_langchain_reads_the_same_answer(cluster: Serving) -> None:
    """LangChain's chat model sends nulls and extra fields."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=20,
        stream_usage=True,
    )

    whole = model.invoke(QUESTION)
    streamed = list(model.stream(QUESTION))

    assert whole.content == story(cluster)
    assert "".join(chunk.text for chunk in streamed) == story(cluster)
    assert whole.usage_metadata["input_tokens"] > 0


def test_langchains_completion_model_sends_several_prompts(cluster: Serving) -> None:
    """One request with a list of prompts, whose answers come in the same order."""
    from langchain_openai import OpenAI

    model = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=5)

    answers = model.generate(["The fox", "The sea"])

    assert [len(batch) for batch in answers.generations] == [1, 1]
    assert answers.generations[0][0].text == model.invoke("The fox")


def test_anthropics_client_and_openais_responses_read_the_same_answer(cluster: Serving) -> None:
    """Three APIs for one model: the same prompt must give the same answer."""
    from anthropic import Anthropic

    with Anthropic(base_url=cluster.url, api_key="none") as claude:
        message = claude.messages.create(model=MODEL, messages=MESSAGES, max_tokens=20, extra_body=GREEDY)
        with claude.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=20, extra_body=GREEDY) as stream:
            streamed = "".join(stream.text_stream)
        counted = claude.messages.count_tokens(model=MODEL, messages=MESSAGES)
    with cluster.client() as client:
        response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=20)

    assert message.content[0].text == streamed == response.output_text == story(cluster)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens == response.usage.input_tokens


def test_fields_of_vllm_reach_the_engine(cluster: Serving) -> None:
    """Allowed token ids, bad words, selected logprobs and prompt logprobs are all applied by the engine."""
    prompt = "Once upon a time, there was a"
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    with httpx.Client(base_url=cluster.url, timeout=60) as http:

        def choice(**fields: object) -> Any:
            return http.post("/v1/completions", json=asked | fields).raise_for_status().json()["choices"][0]

        plain = choice(prompt_logprobs=1)
        allowed = choice(allowed_token_ids=[300, 301], ignore_eos=True, logprobs=0, logprob_token_ids=[300, 301, 302])
        other = choice(bad_words=[plain["text"].split()[0]])

    assert len(plain["prompt_logprobs"]) == len(plain["prompt_token_ids"])
    assert set(allowed["token_ids"]) <= {300, 301}
    assert all(len(each) == 3 for each in allowed["logprobs"]["top_logprobs"])
    assert plain["text"].split()[0] not in other["text"]


def test_embeddings_are_those_of_transformers(cluster: Serving) -> None:
    """Embeddings as read by OpenAI's client, which requests Base64, and by LangChain's."""
    import torch
    from langchain_openai import OpenAIEmbeddings
    from transformers import AutoModel, AutoTokenizer

    texts = [QUESTION, "The sea", QUESTION * 20]
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    model = AutoModel.from_pretrained(demo_model_path(), dtype=torch.float32)
    with torch.inference_mode():
        hidden = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    pooled = {"last": [each[-1] for each in hidden], "mean": [each.mean(0) for each in hidden]}
    with cluster.client() as client:
        for pooling, vectors in pooled.items():
            answer = client.embeddings.create(model=MODEL, input=texts, extra_body={"pooling": pooling})
            short = client.embeddings.create(
                model=MODEL, input=texts[0], dimensions=16, extra_body={"pooling": pooling}
            )

            for vector, found in zip(vectors, answer.data, strict=True):
                assert found.embedding == pytest.approx((vector / vector.norm()).tolist(), abs=1e-4)
            cut = vectors[0][:16]
            assert short.data[0].embedding == pytest.approx((cut / cut.norm()).tolist(), abs=1e-4)

    langchain = OpenAIEmbeddings(
        base_url=f"{cluster.url}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    assert langchain.embed_query(texts[1]) == pytest.approx(
        (pooled["last"][1] / pooled["last"][1].norm()).tolist(), abs=1e-4
    )
