"""C++ extensions of PyTorch: what they do with a tensor's memory, no mode and no operator shows."""

from __future__ import annotations

import functools
import mmap
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

_LIBRARIES = (b"libtorch", b"libc10", b"torch_python.dll")
"""One of them is named in each extension that takes tensors."""

_KNOWN = frozenset({"torch", "functorch", "millstream"})


def takes_tensors(function: Any) -> bool:
    """Return whether a function in C is one of an extension of PyTorch's that is not PyTorch's own."""
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] not in _KNOWN and _is_extension(module)


@functools.cache
def _is_extension(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or not isinstance(spec.loader, ExtensionFileLoader) or not spec.origin:
        return False
    with Path(spec.origin).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(library) >= 0 for library in _LIBRARIES)
