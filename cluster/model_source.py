"""Where a model's files lie: the demo in the package, a local folder, or a snapshot from the Hugging Face hub.

Finds, does not load: imports neither torch nor transformers.
"""

from pathlib import Path

from ..replica.config import ReplicaSettings
from ..replica.demo import demo_model_path
from .errors import ModelUnavailable

DEMO = "demo"
#: What serving needs; other formats of the weights stay on the hub.
WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


def find_model(settings: ReplicaSettings) -> Path:
    """Local folder of the model; fetches it from the hub when it is no folder. Raises ModelUnavailable."""
    if settings.model == DEMO:
        return demo_model_path()
    folder = Path(settings.model).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve())
    if _is_path(settings.model):
        raise ModelUnavailable(f"no folder {settings.model}; give a folder with config.json, or a Hugging Face name")
    return _checked(_fetch(settings.model, settings.revision or None))


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"{folder} has no config.json: it is no model folder in the Hugging Face layout")
    return folder


def _fetch(model: str, revision: str | None) -> Path:
    # Imported here: the hub's client takes a while and only this path needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=WANTED_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelUnavailable(
            f"model {model!r} is no local folder and could not be had from the Hugging Face hub: {reason}"
        ) from error
