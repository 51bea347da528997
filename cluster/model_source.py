"""Finds a model's files: the demo in the package, a local folder, or a snapshot from the Hugging Face hub.

Loads nothing: imports neither torch nor transformers.
"""

from pathlib import Path

from ..replica.config import ReplicaSettings
from ..replica.demo import demo_model_path
from .errors import ModelUnavailable

DEMO = "demo"
#: Files needed for serving; the hub's other weight formats are not downloaded.
WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


def find_model(settings: ReplicaSettings) -> Path:
    """The model's local folder, downloaded from the hub when it is not a folder. Raises ModelUnavailable."""
    model = settings.model
    if model == DEMO:
        return demo_model_path()
    folder = Path(model).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
    elif model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelUnavailable(f"folder {model} does not exist; give a folder with config.json or a Hugging Face name")
    else:
        folder = _download(model, settings.revision or None)
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"{folder} has no config.json: it is not a model folder in the Hugging Face layout")
    return folder


def _download(model: str, revision: str | None) -> Path:
    # Imported here: the hub's client takes a while and only this path needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=WANTED_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelUnavailable(
            f"model {model!r} is not a local folder and could not be downloaded from the Hugging Face hub: {reason}"
        ) from error
