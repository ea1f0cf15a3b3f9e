"""The command ``doctor``: what works on this machine, what would fall back and why, and the proof of it.

**Contract**
- It changes nothing but caches.
- A line begins with ``ok``, ``note`` (works, otherwise than one may expect) or ``broken``; what is broken has a remedy.
- The exit code is 1 exactly when something is broken.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import millstream as ms
from millstream import _native
from millstream.api import executables
from millstream.api.environment import compiler, version_of
from millstream.cache import cache_folder
from millstream.cli.exits import EXIT_BROKEN, EXIT_OK
from millstream.device.cuda_graphs.conditional_nodes import why_not_conditional

OLDEST_CAPABILITY = (7, 0)  # Triton's own limit
TOLERANCE = 1e-3  # relative to values of about 1; PyTorch leaves TF32 off for matrix products
NUM_STEPS = 5


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: Whether it works.
        subject: What was looked at.
        detail: What was found.
        remedy: What to do about it.
    """

    status: Literal["ok", "note", "broken"]
    subject: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n{'':9}{self.remedy}" if self.remedy else ""
        return f"{self.status:<8} {self.subject}: {self.detail}{remedy}"


def examine(*, tries: bool) -> int:
    """Print what works here, and return the exit code.

    Args:
        tries: Compile and run a step and a model, too.
    """
    print(ms.version_report(), end="\n\n")
    found = []
    for finding in _findings(tries):
        print(finding, flush=True)
        found.append(finding)
    num_broken = sum(finding.status == "broken" for finding in found)
    good = "everything works" if tries else "nothing is broken, as far as a look tells; without --quick it is tried"
    print(f"\n{num_broken} broken" if num_broken else f"\n{good}")
    return EXIT_BROKEN if num_broken else EXIT_OK


def _findings(tries: bool) -> Iterator[Finding]:
    yield find_torch(torch.__version__)
    yield find_compiler(compiler())
    yield _find_cache()
    if tries:
        yield from find_native()
    yield from _find_cuda()
    yield from find_overrides(dict(os.environ))
    yield from find_load(os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1)
    yield _find_backend()
    if tries:
        places = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        for place in places:
            device = torch.device(place)
            for subject, attempt in ((f"ms.step on {place}", _try_step), (f"ms.compile on {place}", _try_model)):
                yield tried(subject, lambda attempt=attempt, device=device: attempt(device))


def find_torch(version: str) -> Finding:
    """Judge PyTorch's version by what the package was tried with."""
    release = tuple(int(part) for part in version.split(".", maxsplit=2)[:2] if part.isdigit())
    if (2, 11) <= release < (2, 14):
        return Finding("ok", "PyTorch", version)
    remedy = "Install a version from 2.11 to 2.13: private parts of PyTorch are used, and tried with these only."
    return Finding("broken", "PyTorch", f"{version} was never tried", remedy)


def find_compiler(found: str) -> Finding:
    """Judge the C++ compiler, ``found`` as in ``version_report``."""
    if found == "none" or "does not run" in found:
        remedy = "Install g++ or clang, or name one in CXX. Without it, CUDA works, with more work for the host."
        return Finding("broken", "C++ compiler", f"{found}: nothing can be compiled for the CPU", remedy)
    return Finding("ok", "C++ compiler", found)


def find_overrides(settings: dict[str, str]) -> Iterator[Finding]:
    """Remind of environment variables that overrule arguments."""
    overrides = {"MILLSTREAM_ENGINE": "engine=", "MILLSTREAM_NSTREAMS": "streams=", "MILLSTREAM_TUNE": "tune="}
    for name, argument in overrides.items():
        if name in settings:
            yield Finding("note", name, f"{settings[name]!r} overrules {argument} everywhere")


def find_load(load: float, num_cores: int) -> Iterator[Finding]:
    """Say when other programs keep the machine busy: plans are chosen by measuring."""
    if load > num_cores:
        detail = f"load {load:.1f} on {num_cores} cores: what is measured now is measured badly"
        yield Finding("note", "other programs", detail)


def tried(subject: str, attempt: Callable[[], str]) -> Finding:
    """Try something; what it warns of is a note, and what it raises is broken."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            detail = attempt()
        except Exception as error:  # noqa: BLE001  whatever it is, it is what is looked for
            said = str(error).strip().splitlines()
            return Finding("broken", subject, f"{type(error).__name__}: {said[0] if said else ''}")
    detail += f", {time.perf_counter() - began:.0f} s with compilation"
    reasons = [str(each.message) for each in caught if issubclass(each.category, ms.FallbackWarning)]
    if reasons:
        return Finding("note", subject, f"{detail}; falls back: {reasons[0]}")
    return Finding("ok", subject, detail)


def _find_cache() -> Finding:
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder):
            return Finding("ok", "cache folder", str(folder))
    except OSError as error:
        detail = f"nothing can be kept in {folder} ({error.strerror}): every process measures and compiles again"
        return Finding("note", "cache folder", detail, "Name a folder of yours in MILLSTREAM_CACHE_DIR.")


def find_native() -> Iterator[Finding]:
    """Yield what of the package's C++ can be had, compiling it if need be, and why not."""
    for name in _native.NAMES:
        path = _native.find(name)
        if path is None:
            yield Finding("note", f"native {name}", _native.why_not(name), "Python does the same, more slowly.")
        else:
            yield Finding("ok", f"native {name}", str(path))


def _find_cuda() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        detail = "none that PyTorch sees; models and steps run on the CPU"
        built = "" if torch.version.cuda else "This PyTorch is built for the CPU: for a GPU, install a CUDA build."
        yield Finding("note", "CUDA device", detail, built)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        detail = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        if (properties.major, properties.minor) < OLDEST_CAPABILITY:
            yield Finding("broken", f"cuda:{index}", detail, "Triton needs 7.0 or more; use the CPU.")
        else:
            yield Finding("ok", f"cuda:{index}", detail)
    if reason := why_not_conditional():
        yield Finding("note", "branches in CUDA graphs", f"none: {reason}", "The host decides, which runs no graph.")
    else:
        yield Finding("ok", "branches in CUDA graphs", "the device decides")
    triton = version_of("triton") or version_of("pytorch-triton")
    if triton:
        yield Finding("ok", "Triton", triton)
    else:
        yield Finding("broken", "Triton", "none", "Install the one that this PyTorch names as its requirement.")


def _find_backend() -> Finding:
    if "millstream" in torch.compiler.list_backends(()):
        return Finding("ok", 'torch.compile(backend="millstream")', "registered")
    remedy = "Install the package (pip install .): from a source folder alone, PyTorch does not find its backends."
    return Finding("note", 'torch.compile(backend="millstream")', "not registered", remedy)


def _network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10)).to(device)


def _try_step(device: torch.device) -> str:
    """Train for some steps eagerly and captured, from the same start."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 32, generator=generator), torch.arange(16) % 10) for _ in range(NUM_STEPS)]

    def train(captured: bool) -> tuple[list[float], str]:
        model = _network(device)
        optimizer = torch.optim.AdamW(model.parameters())

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = ms.step(train_step) if captured else train_step
        with ms.feed(batches, device) as fed:
            losses = torch.stack([step(x, y).detach() for x, y in fed]).tolist()
        return losses, _describe(step) if captured else ""

    (theirs, _), (ours, detail) = train(captured=False), train(captured=True)
    _assert_close(ours, theirs)
    return detail


@torch.no_grad()
def _try_model(device: torch.device) -> str:
    model = _network(device).eval()
    x = torch.randn(16, 32, device=device)
    compiled = ms.compile(model)
    results = [compiled(x) for _ in range(3)]
    _assert_close(results[-1].flatten().tolist(), model(x).flatten().tolist())
    return _describe(compiled)


def _describe(compiled: object) -> str:
    found = executables(compiled)
    if not found:
        return "right, but nothing of it was captured"
    return f"{len(found)} graph on engine {found[0].name}, values as eager"


def _assert_close(ours: list[float], theirs: list[float]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if not abs(a - b) <= TOLERANCE * max(1.0, abs(b)):
            raise ms.errors.InternalError(f"values differ from eager's: {a} and {b}")


if __name__ == "__main__":
    sys.exit(examine(tries=True))
