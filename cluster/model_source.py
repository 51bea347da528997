"""Finds a model's files: the demo in the package, a local folder, or a snapshot from the Hugging Face hub.

Loads no model and imports neither torch nor transformers.
"""

import importlib.util
import json
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..replica.config import ReplicaSettings
from ..replica.demo import demo_model_path
from ..replica.load.quantized import ORIGINAL, method_problem
from ..replica.messages import ModelLimits
from ..replica.models.spec import FAMILIES
from .errors import ModelUnavailable

DEMO = "demo"
#: Time for a connection to the hub, before the model counts as not available there.
CONNECT_S = 5.0
ANOTHER = "choose another model (docs/models.md lists the tested ones)"
#: transformers' table of models that continue text, which is what its loader for them knows.
_CAUSAL = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = (.*?)^\)", re.DOTALL | re.MULTILINE)
#: Files needed for serving; the hub's other weight formats are not downloaded.
TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
WANTED_FILES = [*TEXT_FILES, "*.safetensors"]
#: Downloaded only if there are no safetensors: most models with the one have the other.
PICKLED_FILES = ["pytorch_model*"]
#: Duplicates of the weights in the model authors' own formats.
UNWANTED_FILES = ["consolidated*", "original/*"]


def find_model(settings: ReplicaSettings) -> Path:
    """Return the model's local folder, downloading it from the hub if necessary. Raises ModelUnavailable."""
    return _find(settings, WANTED_FILES, checked=settings.engine == "homing")


def find_text(settings: ReplicaSettings) -> Path:
    """Like `find_model`, but without weights, for a model that other servers run.

    Falls back to the folder in the `tokenizer` setting. Raises ModelUnavailable.
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
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        base = _json(folder / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        raise ModelUnavailable(
            f"{folder} is a LoRA adapter, not a model; merge it into {base} (peft's merge_and_unload), and serve that"
        )
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"{folder} has no config.json: it is not a model folder in the Hugging Face layout")
    return folder


def text_folder(settings: ReplicaSettings, model_dir: Path) -> Path:
    """Return the folder of the tokenizer and chat template: the model's, unless the settings name another one."""
    return Path(settings.tokenizer).expanduser() if settings.tokenizer else model_dir


def model_limits(folder: Path, settings: ReplicaSettings, name: str) -> ModelLimits:
    """Read the limits of an external engine's model from its configuration files. Raises ModelUnavailable."""
    config = _json(folder / "config.json")
    config |= config.get("text_config") or {}  # present in models that also accept images
    eos = _json(folder / "generation_config.json").get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    longest = settings.max_model_len or config.get("max_position_embeddings")
    if not isinstance(longest, int) or not isinstance(config.get("vocab_size"), int):
        raise ModelUnavailable(f"{folder}/config.json lacks vocab_size or the length; give --max-model-len")
    return ModelLimits(
        name=name,
        path=str(folder),
        vocab_size=config["vocab_size"],
        max_model_len=longest,
        eos_token_ids=tuple(ends),
        tokenizer=settings.tokenizer,
    )


def check_runnable(folder: Path) -> None:
    """Raise ModelUnavailable if config.json shows that no replica can run the model."""
    path = folder / "config.json"
    config = _json(path)
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(f"{folder} contains GGUF files, which homing cannot read; {ORIGINAL}")
    problem = method_problem(config)
    if problem:
        raise ModelUnavailable(f"{path}: {problem}")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in FAMILIES:
        return
    tables = _transformers_tables()
    if not re.search(rf'"{re.escape(kind)}",\s*"\w+Config"', tables):
        raise ModelUnavailable(
            f"{path}: model_type {kind!r} is unknown to homing and to the installed transformers; {ANOTHER}"
        )
    causal = _CAUSAL.search(tables)
    if config.get("is_encoder_decoder") or (causal and f'("{kind}",' not in causal[1]):
        raise ModelUnavailable(
            f"{path}: a model of type {kind!r} does not continue text, so it answers no chat; {ANOTHER}"
        )


def _transformers_tables() -> str:
    """The installed transformers' tables of model types, as source text: importing them takes seconds."""
    spec = importlib.util.find_spec("transformers")
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    return "\n".join(path.read_text() for each in folders for path in sorted((each / "models" / "auto").glob("*.py")))


def has_chat_template(folder: Path) -> bool:
    """Return whether the model's files contain a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool(_json(folder / "tokenizer_config.json").get("chat_template"))


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if it cannot be read, which other checks report."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _download(model: str, revision: str | None, files: list[str], *, checked: bool) -> Path:
    """Download a model. `checked`: only if our own engine can run it."""
    # Imported here, because importing the hub's client is slow and only this path needs it.
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # The client would retry for 20 s and print each failure.
    unreachable = None if constants.HF_HUB_OFFLINE else _connection_problem(constants.ENDPOINT)
    source: dict[str, Any] = {"revision": revision, "local_files_only": unreachable is not None}
    try:
        if checked:  # before the weights are downloaded
            check_runnable(Path(hf_hub_download(model, "config.json", **source)).parent)
        folder = Path(snapshot_download(model, allow_patterns=files, ignore_patterns=UNWANTED_FILES, **source))
        if files is WANTED_FILES and not any(folder.glob("*.safetensors")):
            snapshot_download(model, allow_patterns=PICKLED_FILES, **source)
        return folder
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        if unreachable and not isinstance(error, HFValidationError):
            raise ModelUnavailable(
                f"model {model!r} is neither a local folder nor in the hub's cache, and {constants.ENDPOINT} cannot be "
                f"reached ({unreachable}); copy the model's folder here and name it"
            ) from error
        raise ModelUnavailable(
            f"model {model!r} is not a local folder and could not be downloaded from the Hugging Face hub: {reason}"
        ) from error


def _connection_problem(url: str) -> str | None:
    """Why the server of this URL cannot be reached; None if it can, or if a proxy is between."""
    address = urlsplit(url)
    if getproxies().get(address.scheme) or not address.hostname:
        return None
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
