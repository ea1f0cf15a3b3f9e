"""Checkpoints that resume exactly: weights, optimizer, carried state, random numbers and the step they belong to."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from millstream.cli.training.job import Carry, Job
from millstream.errors import ArgumentError

_ENTRIES = {"job", "identity", "done", "model", "optimizer", "carry", "cpu_rng", "device_rng"}
FORMAT = 1  # raise it when the entries change; older files are then refused by name instead of by a missing key


def check_writable(path: Path) -> None:
    """Make the directory of a checkpoint, so that a wrong path is found before the training and not after it.

    Raises:
        ArgumentError: No file can be written there.
    """
    if path.is_dir():
        raise ArgumentError(f"cannot write --checkpoint {path}: it is a directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _partial(path).touch()
        _partial(path).unlink()
    except OSError as error:
        raise ArgumentError(f"cannot write --checkpoint {path}: {error.strerror}") from error


def save_checkpoint(path: Path, job: Job, done: int, carry: Carry) -> None:
    """Save ``job`` after ``done`` steps; the file is replaced as a whole, so that a failure leaves the old one.

    Raises:
        ArgumentError: It cannot be written, as on a full disk.
    """
    state = {
        "format": FORMAT,
        "job": job.name,
        "identity": dict(job.identity),
        "done": done,
        "model": job.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "carry": list(carry),
        "cpu_rng": torch.get_rng_state(),
        "device_rng": torch.cuda.get_rng_state(job.device) if job.device.type == "cuda" else None,
    }
    try:
        torch.save(state, _partial(path))
        _partial(path).replace(path)
    except (OSError, RuntimeError) as error:  # PyTorch's writer raises its own
        with suppress(OSError):
            _partial(path).unlink(missing_ok=True)
        raise ArgumentError(f"cannot write --checkpoint {path} (a full disk?): {error}") from error


def load_checkpoint(path: Path, job: Job) -> dict[str, Any]:
    """Read a checkpoint and make sure that it belongs to ``job``; nothing is changed yet.

    Raises:
        ArgumentError: It cannot be read, or was made by another job, with other sizes, seed or data.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read --resume {path}: {error.strerror}") from error
    try:
        # PyTorch compares no checksums: a bit that has changed on a disk would be trained on.
        if (bad := ZipFile(BytesIO(content)).testzip()) is not None:
            raise ValueError(f"{bad} has another checksum")
        state = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in as many ways as it has bytes
        raise ArgumentError(f"--resume {path} is no checkpoint of this program, or is damaged") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or not state.keys() >= _ENTRIES:
        raise ArgumentError(f"--resume {path} is no checkpoint of this program, or of another version")
    if state["job"] != job.name:
        raise ArgumentError(f"--resume {path} is a checkpoint of {state['job']}, not of {job.name}")
    for key, ours in job.identity.items():
        theirs = state["identity"].get(key)
        if theirs != ours:
            detail = f"{key} {theirs}, not {ours}" if isinstance(ours, int) else f"another {key}"
            raise ArgumentError(f"--resume {path} was made with {detail}")
    return state


def restore(job: Job, state: dict[str, Any]) -> tuple[int, Carry]:
    """Put ``job`` and the random numbers where ``state`` says; return the steps done and the carried state.

    ``state`` stays as it is and can be restored again.
    """
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(deepcopy(state["optimizer"]))  # it keeps the tensors it is given, and changes them
    torch.set_rng_state(state["cpu_rng"])
    if state["device_rng"] is not None and job.device.type == "cuda":
        torch.cuda.set_rng_state(state["device_rng"], job.device)
    return state["done"], tuple(value.to(job.device) for value in state["carry"])


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
