"""``ms.save_programs`` and ``ms.load_programs``: what one machine has compiled, as a file for others of its kind."""

from __future__ import annotations

import os
from pathlib import Path

from millstream.errors import check_folder
from millstream.lower.kept import bundle


def save_programs(path: str | os.PathLike[str], *, key: bytes | None = None) -> int:
    """Write the programs that this process has compiled, or found on disk, into one file.

    With them goes what they need to run at once: machine code, chosen plans, measured times. ``load_programs`` takes
    the file in on machines with the same processor, GPUs and versions: in a container image, on the other hosts of a
    job, in CI. Captured graphs are found by their contents, so a program that was made for other flags, sizes or code
    is never taken for another.

    Args:
        path: Where to, as ``run.msc``; a file that is there is replaced.
        key: A secret with which the file is signed.

    Returns:
        The number of programs in it.

    Raises:
        ArgumentError: This process has no program that is kept on disk, or there is no such folder.
        OSError: The file cannot be written.
    """
    check_folder(Path(path))
    return bundle.save(Path(path), key).programs


def load_programs(path: str | os.PathLike[str], *, key: bytes | None = None) -> int:
    """Take in the programs of a file, so that what they were made for is not compiled here.

    Call it before the first call of a step or model. The file holds code that is run: take in only files that you would
    install a package from.

    Args:
        path: What ``save_programs`` or ``millstream cache export`` has written.
        key: The secret with which it must be signed; by default it need not be.

    Returns:
        The number of programs in it.

    Raises:
        ArgumentError: It is damaged, is not signed with the key, or was made for another processor, other GPUs or other
            versions, which the message names. Nothing is taken in then.
        OSError: It cannot be read.
    """
    return bundle.load(Path(path), key).programs
