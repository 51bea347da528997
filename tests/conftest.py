"""What all tests share. Set before torch is imported: two intra-op threads on contended cores are ten times slower."""

import os
import signal
from types import FrameType

from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure() -> None:
    """Take clusters down when the run is cut, as by `timeout`: SIGTERM would end this process and nothing below it."""
    signal.signal(signal.SIGTERM, _cut)
    settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
    settings.load_profile("untimed")


def _cut(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
