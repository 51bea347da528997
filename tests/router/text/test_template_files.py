"""A chat template is found where transformers finds it, and tried before anything starts."""

import json
import shutil
from pathlib import Path

import pytest

from homing.router.errors import TemplateBroken
from homing.router.text.template import PROBES
from homing.router.text.template_files import read_template, try_template

from .conftest import DEMO

PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_the_demo_models_template_takes_every_ordinary_chat() -> None:
    """Users try it first."""
    template = read_template(Path(DEMO))

    assert template is not None
    assert try_template(template) == []


@pytest.mark.parametrize("kind", ["jinja", "json", "config", "named"])
def test_a_template_is_read_from_each_place(tmp_path: Path, kind: str) -> None:
    """Special tokens come along, as text or as an object."""
    config: dict[str, object] = {"bos_token": {"content": "<s>"}}
    match kind:
        case "jinja":
            (tmp_path / "chat_template.jinja").write_text(PLAIN)
            config["chat_template"] = "another, which transformers ignores"
        case "json":
            (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
        case "config":
            config["chat_template"] = PLAIN
        case "named":
            config["chat_template"] = [{"name": "default", "template": PLAIN}, {"name": "rag", "template": "x"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    template = read_template(tmp_path)

    assert template is not None
    assert template.render(PROBES["a user message"]) == "<s>Hello"


def test_a_setting_replaces_the_folders_template(tmp_path: Path) -> None:
    """As in the router."""
    folder, other = shutil.copytree(DEMO, tmp_path / "model"), tmp_path / "other.jinja"
    other.write_text("{% if %}")

    template = read_template(Path(folder), str(other))

    assert template is not None
    with pytest.raises(TemplateBroken, match=r"other\.jinja"):
        try_template(template)


def test_what_a_template_refuses_is_no_fault(tmp_path: Path) -> None:
    """Several families take no system message, and serve chats without one."""
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + PLAIN
    )

    template = read_template(tmp_path)

    assert template is not None
    assert try_template(template) == ["a system message: the chat template rejects these messages: no system message"]


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    """Base models serve completions."""
    assert read_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert read_template(tmp_path) is None
