"""The small language model that ships with homing, so that a first answer needs no download.

Imported by `cluster`, to find the folder. Must not import torch; `tests/demo_model` trains the model.
"""

from pathlib import Path


def demo_model_path() -> Path:
    """The Hugging Face folder of the model (`config.json`, `model.safetensors`, ...). Treat it as read-only."""
    return Path(__file__).resolve().parent / "model"
