"""Lets SGLang's wheel from PyPI run on a CPU: the `sitecustomize` module of `.venv-sglang`.

The wheel requires CUDA's builds of torch and of its kernels. On a CPU without AMX it computes with torch alone, but
still imports `sgl_kernel`, and torchvision and torchaudio for images and sound, which text does not need. These get
empty stand-ins; calling one of their functions would raise TypeError.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ABSENT = {"sgl_kernel", "torchvision", "torchaudio", "timm"}


class _Names(type):
    """A class whose every attribute is its name, such as a member of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(ModuleType):
    """A module whose every attribute is a class without content."""

    __path__: Sequence[str] = ()
    __version__ = "0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        root = fullname.partition(".")[0]
        return None if root not in ABSENT or self._asks_transformers() else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""

    def _asks_transformers(self) -> bool:
        """Whether transformers checks which packages there are: it must use none of these."""
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:
            if frame.f_code.co_filename.endswith("transformers/utils/import_utils.py"):
                return True
        return False


sys.meta_path.insert(0, _Finder())
