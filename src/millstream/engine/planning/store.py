"""Measurements on disk: costs of kernels, and which plan was fastest.

Files are JSON, hold for one device and one set of versions each, and may be deleted at any time. Where nothing can be
written, everything is measured again in the next process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from millstream.cache import cache_folder, write
from millstream.cost import CostTable, format_table, parse_table
from millstream.device.cuda_graphs.spread import BESIDE, SMALL
from millstream.errors import ArgumentError
from millstream.graph import format_graph
from millstream.lower.inductor import tuning
from millstream.program import Program
from millstream.schedule import Scheduling
from millstream.schedule.choose import STREAM_COUNTS, TRIED_POLICIES, VARIANTS


class Store:
    """The files for one device.

    Args:
        device: A CUDA device.
        folder: Where; by default as the module says.
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        self._name = torch.cuda.get_device_name(device)
        self._versions = versions()
        digest = hashlib.sha256(json.dumps([self._name, self._versions], sort_keys=True).encode()).hexdigest()[:16]
        folder = folder or cache_folder()
        self._costs, self._choices = folder / f"costs-{digest}.json", folder / f"plans-{digest}.json"

    def load_costs(self) -> CostTable:
        """Read the costs known so far: an empty table where there are none."""
        with contextlib.suppress(OSError, ArgumentError, UnicodeDecodeError):
            table = parse_table(self._costs.read_text())
            if table.fits(self._name, self._versions):
                return table
        return CostTable(self._name, self._versions)

    def save_costs(self, table: CostTable) -> None:
        """Add costs to those on disk."""
        write(self._costs, format_table(self.load_costs().with_costs(table.costs)))

    def load_choice(self, key: str) -> Mapping[str, Any] | None:
        """Read what was noted under a key."""
        choice = self._load_choices().get(key)
        return choice if isinstance(choice, dict) else None

    def save_choice(self, key: str, choice: Mapping[str, Any]) -> None:
        """Note a choice, as plain data."""
        write(self._choices, json.dumps({**self._load_choices(), key: dict(choice)}, indent=1, sort_keys=True) + "\n")

    def _load_choices(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            choices = json.loads(self._choices.read_text())
            if isinstance(choices, dict):
                return choices
        return {}


def versions() -> dict[str, str]:
    """Everything that the time of a kernel depends on beside the device: of libraries, and of our own kernels."""
    from millstream.kernels import registry  # and with it Inductor, which by now is there

    return {**tuning.versions(), "kernels": registry.version()}


def choice_key(program: Program, scheduling: Scheduling) -> str:
    """Return what a choice is found by: everything that it depends on beside device and versions."""
    codes = [program.code(kernel.id) for kernel in program.graph.kernels]
    text = f"{format_graph(program.graph)}{codes}{scheduling}{STREAM_COUNTS}{TRIED_POLICIES}{VARIANTS}{SMALL}{BESIDE}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
