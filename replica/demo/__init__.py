"""The small language model that ships with homing, so that a first answer needs no download. Imports no torch."""

from pathlib import Path


def demo_model_path() -> Path:
    """The shipped Hugging Face folder (`config.json`, `model.safetensors`, ...), read-only for its users."""
    return Path(__file__).resolve().parent / "model"
