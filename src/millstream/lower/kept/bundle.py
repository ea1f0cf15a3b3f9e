"""Programs that travel: what this process has compiled, as one file that another machine of the same kind takes in.

The file is a zip. Its ``manifest.json`` says what it was made for and has the digest of every other file in it, each
named after the cache that it belongs to and its place there. It holds machine code and source, which are run: who
writes such a file can run anything on the machines that take it in, as with a wheel. Nothing in it is a pickle; its
names cannot lead out of the caches; nothing is written before all digests, and the signature if there is one, are
checked.

Inductor's compiled C++ and Triton's machine code lie in caches of theirs, and are found there by their sources; of
those goes along what this process has loaded.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from millstream.cache import cache_folder, limit_bytes, list_files, trim, write, write_private
from millstream.errors import ArgumentError
from millstream.lower.kept import used
from millstream.lower.kept.key import describe_machine
from millstream.lower.kept.program_files import read_content, write_content

FORMAT = 1
MANIFEST, SIGNATURE = "manifest.json", "signature"
MOST_BYTES = 16 << 30
"""Of all files of a bundle together."""

_HERE = "@here@"  # where a file of Triton's says in which folder it lies
_PART = r"[\w-][\w.=+-]*"
_NAMES = re.compile(
    rf"millstream/(?:programs/[\w-]+\.program|tuning/{_PART}\.json|(?:plans|costs)-[\w.-]+\.json|\w+_\w+\.so)"
    rf"|inductor/\w+/\w+(?:\.main)?\.so|triton/\d+/{_PART}/{_PART}"
)


@dataclass(frozen=True)
class Taken:
    """The contents of a bundle that was written or taken in.

    Attributes:
        programs: How many programs.
        files: How many files, machine code included.
        num_bytes: Of all of them.
    """

    programs: int
    files: int
    num_bytes: int


def save(path: Path, key: bytes | None = None) -> Taken:
    """Write all programs that this process has compiled or found on disk, and the machine code that they run.

    Args:
        path: Where to; a file that is there is replaced.
        key: Signs the file, so that ``load`` with the same key refuses any other.

    Raises:
        ArgumentError: There is no such program.
        OSError: The file cannot be written.
    """
    files = dict(_files())
    taken = _count(files)
    if not taken.programs:
        raise ArgumentError(
            "There are no programs to save: this process has compiled none, or none that are kept on disk "
            "(MILLSTREAM_WARM_START=0 keeps none). Call the step or model first."
        )
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = json.dumps({"format": FORMAT, "made for": describe_machine(), "files": digests}, indent=1).encode()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bundle:
            bundle.writestr(MANIFEST, manifest)
            if key is not None:
                bundle.writestr(SIGNATURE, hmac.new(key, manifest, "sha256").hexdigest())
            for name, content in files.items():
                bundle.writestr(name, content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return taken


def load(path: Path, key: bytes | None = None) -> Taken:
    """Put the programs of a bundle into this machine's caches, where later compilations find them.

    What is there already stays as it is.

    Args:
        path: What ``save`` has written.
        key: With which it must be signed; ``None`` takes any.

    Raises:
        ArgumentError: It is no bundle, is damaged, was made for another machine or other versions, or is not signed
            with the key. Nothing is written then. Or the caches cannot be written.
        OSError: It cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as bundle:
            if sum(each.file_size for each in bundle.infolist()) > MOST_BYTES:
                raise ArgumentError(f"{path} holds more than {MOST_BYTES >> 30} GiB.")
            manifest = bundle.read(MANIFEST)
            _check_signature(path, bundle, manifest, key)
            said = json.loads(manifest)
            _check_machine(path, said)
            files = {}
            for name, digest in said["files"].items():
                if _NAMES.fullmatch(name) is None:
                    raise ArgumentError(f"{path} holds {name!r}, which has no place in a cache.")
                files[name] = bundle.read(name)
                if hashlib.sha256(files[name]).hexdigest() != digest:
                    raise ArgumentError(f"{path} is damaged: {name} is not what was written.")
    except ArgumentError:
        raise
    except (zipfile.BadZipFile, zlib.error, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ArgumentError(f"{path} is no file that millstream cache export has written, or is damaged.") from error
    for name, content in files.items():
        if not (place := _install(name, content)).exists():
            raise ArgumentError(
                f"{place} cannot be written, or others may write to its folder: make that this user's alone."
            )
    trim(limit_bytes())
    return _count(files)


def _check_signature(path: Path, bundle: zipfile.ZipFile, manifest: bytes, key: bytes | None) -> None:
    if key is None:
        return
    signature = bundle.read(SIGNATURE).decode() if SIGNATURE in bundle.namelist() else ""
    if not hmac.compare_digest(signature, hmac.new(key, manifest, "sha256").hexdigest()):
        raise ArgumentError(f"{path} is not signed with this key.")


def _check_machine(path: Path, said: Mapping[str, Any]) -> None:
    if said["format"] != FORMAT:
        raise ArgumentError(f"{path} is of format {said['format']}, and this version reads {FORMAT}.")
    here = describe_machine()
    for name in here | said["made for"]:
        there, own = said["made for"].get(name, "unknown"), here.get(name, "unknown")
        if there != own:
            raise ArgumentError(f"{path} was made for another machine: {name} was {there}, and is {own} here.")


def _count(files: Mapping[str, bytes]) -> Taken:
    programs = sum(name.endswith(".program") for name in files)
    return Taken(programs, len(files), sum(map(len, files.values())))


# --- where files lie -------------------------------------------------------------------------------------------------


def _files() -> Iterator[tuple[str, bytes]]:
    """Names and contents of all that this process has used."""
    own, inductor = cache_folder(), Path(cache_dir())
    for path in used.programs():
        if (content := read_content(path)) is not None:
            if "tuners" in content:  # pickles; kernels are found by their sources, too
                content["tuners"] = []
            yield f"millstream/programs/{path.name}", write_content(content)
    for file in list_files():
        if file.kind in ("choices", "measurements"):
            yield f"millstream/{file.path.relative_to(own)}", file.path.read_bytes()
    for path in used.libraries(own):
        yield f"millstream/{path.name}", path.read_bytes()
    for path in used.libraries(inductor):
        yield f"inductor/{path.relative_to(inductor.resolve())}", path.read_bytes()
    for device, folder in used.compiled():
        for path in sorted(folder.iterdir()):
            content = path.read_bytes()
            if path.suffix == ".json":
                content = content.replace(str(folder).encode(), _HERE.encode())
            yield f"triton/{device}/{folder.name}/{path.name}", content


def _install(name: str, content: bytes) -> Path:
    """Write a file where its cache looks for it, unless it is there; where that is."""
    root, *parts = name.split("/")
    if root == "triton":
        folder = Path(triton_cache_dir(int(parts.pop(0))))
    else:
        folder = cache_folder() if root == "millstream" else Path(cache_dir())
    path = folder.joinpath(*parts)
    if path.exists():
        return path
    if root == "triton" and path.suffix == ".json":
        content = content.replace(_HERE.encode(), str(path.parent).encode())
    if path.suffix == ".program":
        write_private(path, content)
    else:
        write(path, content, 0o600)
    return path
