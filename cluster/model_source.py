"""Finds a model's files: the demo in the package, a local folder, or a snapshot from the Hugging Face hub.

Loads nothing: imports neither torch nor transformers.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from ..replica.config import ReplicaSettings
from ..replica.demo import demo_model_path
from ..replica.load.quantized import ORIGINAL, method_problem
from ..replica.messages import ModelLimits
from ..replica.models.spec import FAMILIES
from .errors import ModelUnavailable

DEMO = "demo"
#: Files needed for serving; the hub's other weight formats are not downloaded.
TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
WANTED_FILES = [*TEXT_FILES, "*.safetensors"]
#: The same weights again, in the format of the model's authors.
UNWANTED_FILES = ["consolidated*", "original/*"]


def find_model(settings: ReplicaSettings) -> Path:
    """The model's local folder, downloaded from the hub when it is not a folder. Raises ModelUnavailable."""
    return _find(settings, WANTED_FILES, checked=settings.engine == "homing")


def find_text(settings: ReplicaSettings) -> Path:
    """The same without weights, for a model that others serve. Where that fails: the folder of the tokenizer, if given.

    Raises ModelUnavailable.
    """
    try:
        return _find(settings, TEXT_FILES, checked=False)
    except ModelUnavailable as error:
        folder = Path(settings.tokenizer).expanduser()
        if settings.tokenizer and (folder / "config.json").is_file():
            return folder
        raise ModelUnavailable(f"{error}; name a folder with config.json and tokenizer with --tokenizer") from error


def _find(settings: ReplicaSettings, files: list[str], *, checked: bool) -> Path:
    model = settings.model
    if model == DEMO:
        return demo_model_path()
    folder = Path(model).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
    elif model.endswith(".gguf"):
        raise ModelUnavailable(f"{model} is a GGUF file, which homing cannot read; {ORIGINAL}")
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelUnavailable(f"folder {model} does not exist; give a folder with config.json or a Hugging Face name")
    else:
        folder = _download(model, settings.revision or None, files, checked=checked)
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"{folder} has no config.json: it is not a model folder in the Hugging Face layout")
    return folder


def text_folder(settings: ReplicaSettings, model_dir: Path) -> Path:
    """The folder of tokenizer and chat template: the model's, unless the settings name another one."""
    return Path(settings.tokenizer).expanduser() if settings.tokenizer else model_dir


def model_limits(folder: Path, settings: ReplicaSettings, name: str) -> ModelLimits:
    """The limits of a model that an external engine serves, from its configuration files. Raises ModelUnavailable."""
    config = _json(folder / "config.json")
    config |= config.get("text_config") or {}  # of models that also accept images
    eos = _json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id")) or ()
    longest = settings.max_model_len or config.get("max_position_embeddings")
    if not isinstance(longest, int) or not isinstance(config.get("vocab_size"), int):
        raise ModelUnavailable(f"{folder}/config.json has no vocab_size or no length: give --max-model-len")
    return ModelLimits(
        name=name,
        path=str(folder),
        vocab_size=config["vocab_size"],
        max_model_len=longest,
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        tokenizer=settings.tokenizer,
    )


def check_runnable(folder: Path) -> None:
    """Raise ModelUnavailable for a model whose config.json already says that no replica can run it."""
    path = folder / "config.json"
    config = _json(path)
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(f"{folder} holds GGUF files, which homing cannot read; {ORIGINAL}")
    problem = method_problem(config)
    if problem:
        raise ModelUnavailable(f"{path}: {problem}")
    kind = config.get("model_type")
    if isinstance(kind, str) and kind not in FAMILIES and kind not in _transformers_types():
        raise ModelUnavailable(
            f"{path}: model_type {kind!r} is unknown to homing and to the installed transformers; "
            "choose another model (docs/models.md lists those that were tested)"
        )


def _transformers_types() -> frozenset[str]:
    """The model types of the installed transformers; read from its tables, as importing them takes seconds."""
    spec = importlib.util.find_spec("transformers")
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    tables = [path.read_text() for each in folders for path in (each / "models" / "auto").glob("*.py")]
    return frozenset(found for table in tables for found in re.findall(r'"([\w.-]+)",\s*"\w+Config"', table))


def has_chat_template(folder: Path) -> bool:
    """Whether the model's files hold a template for chats."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool(_json(folder / "tokenizer_config.json").get("chat_template"))


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where it cannot be read, which others report."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _download(model: str, revision: str | None, files: list[str], *, checked: bool) -> Path:
    """`checked`: only a model that our own engine can run."""
    # Imported here: the hub's client takes a while and only this path needs it.
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if checked:  # before the weights
            check_runnable(Path(hf_hub_download(model, "config.json", revision=revision)).parent)
        return Path(snapshot_download(model, revision=revision, allow_patterns=files, ignore_patterns=UNWANTED_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelUnavailable(
            f"model {model!r} is not a local folder and could not be downloaded from the Hugging Face hub: {reason}"
        ) from error
