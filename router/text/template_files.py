"""Reads a model's chat template and special tokens from its folder, and tries the template on ordinary chats.

For checks before anything starts, and for error messages: routers serve what transformers reads (`export.py`).
"""

from pathlib import Path
from typing import Any

import msgspec

from ..errors import TemplateBroken, TemplateRefusal, TokenizerUnavailable
from .template import PROBES, ChatTemplate

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def template_file(folder: Path, override: str = "") -> Path:
    """The file that a folder's chat template comes from. `override`: the setting `chat_template`."""
    if override:
        return Path(override)
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return next((folder / name for name in names if (folder / name).is_file()), folder)


def read_template(folder: Path, override: str = "") -> ChatTemplate | None:
    """The chat template of a folder; None if there is none. Raises TokenizerUnavailable."""
    path, config = template_file(folder, override), _json(folder / "tokenizer_config.json")
    if path.suffix == ".json":
        source = _json(path).get("chat_template")
    else:
        try:
            source = path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerUnavailable(f"cannot read the chat template {path}: {error}") from error
    if isinstance(source, list):  # several named ones
        source = {each["name"]: each["template"] for each in source if isinstance(each, dict) and len(each) > 1}
    if not source:
        return None
    tokens = {
        name: each["content"] if isinstance(each, dict) else each for name in _SPECIAL if (each := config.get(name))
    }
    return ChatTemplate(source, tokens, str(path))


def try_template(template: ChatTemplate) -> list[str]:
    """Render ordinary chats; returns what the template refuses or fails on.

    Raises TemplateBroken if it fails on a plain one: then no chat could be answered.
    """
    problems = []
    for name, chat in PROBES.items():
        try:
            template.render(chat)
        except (TemplateBroken, TemplateRefusal) as error:
            if isinstance(error, TemplateBroken) and name == "a user message":
                raise
            problems.append(f"{name}: {error.message}")
    return problems


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if it cannot be read, which other checks report."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
