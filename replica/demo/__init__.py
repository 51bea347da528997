"""The small language model that ships with homing, so that a first answer needs no download. Imports no torch."""

from pathlib import Path


def demo_model_path() -> Path:
    """The Hugging Face folder of the model (`config.json`, `model.safetensors`, ...). Treat it as read-only."""
    return Path(__file__).resolve().parent / "model"
