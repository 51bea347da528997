"""Parts of a conversation that are not text, or not ours: in each dialect, the session goes on and nothing vanishes."""

from typing import Any

import httpx
import pytest

from homing.kvcache.hashing import token_array
from homing.router.text.tokenizer import TextModel

from ..fakes import FakeBackend

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def document(**source: Any) -> dict[str, Any]:
    return {"messages": [user({"type": "document", "source": source, "title": "Note"})], "max_tokens": 4}


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": PNG}]}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        (CHAT, {"messages": [user({"type": kind, kind: {"url": "x"}})]}, "left out", "messages[0].content[0]")
        for kind in ("image_url", "input_audio", "video_url", "file")
    ),
    (RESPONSES, {"input": [user({"type": "input_image", "image_url": "x"})]}, "image left out", "input[0].content[0]"),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "image left out",
        "input[0].output[0]",
    ),
    *(
        (RESPONSES, {"input": [user({"type": "input_text", "text": "Go"}), item]}, words, ignored)
        for item, words, ignored in (
            ({"type": "local_shell_call_output", "id": "c", "output": "seven lines"}, "seven lines", ""),
            ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "seven lines"}]}, "seven lines", ""),
            ({"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}, "<|im_start|>tool", ""),
            ({"type": "made_up_call_output", "call_id": "c", "output": "seven lines"}, "seven lines", ""),
            ({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}, "local_shell", ""),
            ({"type": "mcp_list_tools", "tools": []}, "Go", "input[1]"),
        )
    ),
    (
        MESSAGES,
        {"messages": [user({"type": "image", "source": PNG})], "max_tokens": 4},
        "left out",
        "messages[0].content[0]",
    ),
    (MESSAGES, {"messages": [user(RESULT)], "max_tokens": 4}, "image left out", "messages[0].content[0].content[0]"),
    (MESSAGES, document(type="text", media_type="text/plain", data="The code is 7."), "Note\nThe code is 7.", ""),
    (MESSAGES, document(type="base64", media_type="text/csv", data="Nyw4"), "7,8", ""),
    (MESSAGES, document(type="content", content=[{"type": "text", "text": "seven"}]), "seven", ""),
    (MESSAGES, document(type="url", url="http://x/a.pdf"), "document left out", ""),
    (
        MESSAGES,
        {
            "max_tokens": 4,
            "messages": [
                user({"type": "text", "text": "Go"}),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rain"}},
                        {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"error_code": "none today"}},
                    ],
                },
                user({"type": "text", "text": "And?"}),
            ],
        },
        "none today",
        "",
    ),
]


@pytest.mark.parametrize(("path", "body", "words", "ignored"), CASES)
async def test_a_part_that_is_not_taken_leaves_a_trace(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    text_model: TextModel,
    path: str,
    body: dict[str, Any],
    words: str,
    ignored: str,
):
    """Clients send the part again with every later turn, so an error would end the session for good."""
    response = await client.post(path, json=body)

    assert response.status_code == 200, response.text
    assert words in text_model.decode(token_array(backend.requests[0].token_ids))
    assert response.headers.get("x-homing-ignored-fields", "") == ignored
