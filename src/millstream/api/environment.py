"""``ms.version_report``: versions, devices, compilers, caches and settings of this machine, for a report of a fault."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from millstream.cache import cache_folder

SETTINGS = ("MILLSTREAM_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_LOGS", "TRITON_", "OMP_", "MKL_", "CUDA_")
"""Prefixes of the environment variables that change what is compiled, or how it runs."""
COMPILER_SECONDS = 10.0  # to say its version; one on a dead network share says nothing


def version_report() -> str:
    """Describe this machine in a dozen lines, to be pasted into a report of a fault.

    Compiles nothing; initialises CUDA where there is a GPU. The home folder is written ``~``.
    """
    return "\n".join(f"{name:<12} {value}" for name, value in facts().items()).replace(str(Path.home()), "~")


def facts() -> dict[str, str]:
    """Return what the report says, by name."""
    from millstream import __version__  # which offers this: importing it above would be a circle

    found = {
        "millstream": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()}), {platform.platform()}",
        "PyTorch": f"{torch.__version__}, built for {_built_for()}",
        "Triton": version_of("triton") or version_of("pytorch-triton") or "none",
        "CPU": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for PyTorch, {platform.machine()}",
    }
    for index, name in enumerate(devices()):
        found[f"GPU {index}"] = name
    found["driver"] = _driver()
    found["C++"] = compiler()
    found["cache"] = f"{cache_folder()} ({folder_bytes(cache_folder()) / 2**20:.1f} MiB)"
    found["Inductor's"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"in {tempfile.gettempdir()}"
    names = sorted(name for name in os.environ if name.startswith(SETTINGS))
    found["settings"] = " ".join(f"{name}={os.environ[name]}" for name in names) or "none"
    return found


def version_of(package: str) -> str:
    """Version of an installed package; empty where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def devices() -> list[str]:
    """Each CUDA device in words."""
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            properties = torch.cuda.get_device_properties(index)
        except RuntimeError as error:  # a child forked from a process with CUDA, or a driver that fails
            found.append(f"cannot be looked at ({str(error).splitlines()[0]})")
            continue
        capability = f"{properties.major}.{properties.minor}"
        memory = properties.total_memory / 2**30
        found.append(f"{properties.name}, compute capability {capability}, {memory:.0f} GiB")
    return found


def compiler() -> str:
    """The C++ compiler that is used, and its version."""
    command = shlex.split(os.environ.get("CXX", ""))
    path = command[0] if command else shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not path:
        return "none"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=COMPILER_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} does not run ({type(error).__name__})"
    return f"{path}: {done.stdout.strip().splitlines()[0]}" if done.stdout.strip() else path


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder, those that can be looked at."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(root, name).lstat().st_size
            except OSError:  # another process deletes what it no longer needs
                continue
    return total


def _built_for() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"


def _driver() -> str:
    if sys.platform != "linux":
        return "not looked for"
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return "no NVIDIA driver"
