"""The small language model that ships with homing, so that a first answer needs no download.

This face only says where the folder lies. It imports neither torch nor transformers: the router asks it too.
"""

from pathlib import Path

__all__ = ["demo_model_path"]


def demo_model_path() -> Path:
    """The shipped Hugging Face folder (`config.json`, `model.safetensors`, ...), read-only for its users."""
    return Path(__file__).resolve().parent / "model"
