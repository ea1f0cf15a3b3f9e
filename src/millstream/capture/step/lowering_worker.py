"""The process that lowers a step's graph for another one: ``python -m …lowering_worker FILE PID``.

Its exit status is 0 where the program is on disk, and another process that asks for it there finds it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from millstream._torch.modes.switches import put_back, remember
from millstream.capture.kept.elsewhere import CONFIGS, Task, read, remove
from millstream.capture.step.step_program import Compiling, StepProgram
from millstream.errors import LoweringError
from millstream.lower import Lowered, LoweredForSizes
from millstream.lower.kept.program_files import ProgramFile

LOOK_S = 1.0  # from one look whether the other process is there to the next
NICE = 5
"""Added to the priority: what the user's process does comes first."""


class _Pretended:
    """Runs a program as far as its callers can see: the results have no values."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def __call__(self, inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return list(self._results)

    def release(self) -> None:
        """Nothing is held."""


def lower(task: Task) -> None:
    """Lower a graph, so that its program is on disk.

    Raises:
        LoweringError: It is not, or not as the process that asked would look for it.
    """
    output = next(iter(reversed(task.gm.graph.nodes))).args[0]
    results = [getattr(node, "meta", {}).get("val", node) for node in tree_leaves(output)]
    records: list[ProgramFile] = []

    def check(record: ProgramFile) -> None:
        if record.digest != task.facts["digest"]:
            raise LoweringError("The graph is another here.", construct=record.digest)
        records.append(record)

    def build(lowered: Lowered | LoweredForSizes) -> _Pretended:  # noqa: ARG001
        return _Pretended(results)

    def join(*_: Any) -> NoReturn:
        raise LoweringError("The step's processes communicate.", construct="join")

    facts = task.facts
    program = StepProgram(
        task.gm,
        task.inputs,
        facts["static"],
        name=facts["name"],
        build=build,
        join=join,
        how=Compiling(facts["options"], begin_elsewhere=check),
    )
    program(task.inputs)
    if records and records[0].load() is None:
        raise LoweringError("The program is not kept on disk.", construct=facts["name"])


def main(path: Path, parent: int) -> None:
    """Lower the graph that a file describes, under the switches and options of the process that wrote it."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    watch = threading.Thread(target=_end_with, args=(parent, path), name="millstream-parent", daemon=True)
    watch.start()
    task = read(path)
    if (device := task.facts["cuda device"]) is not None:
        torch.cuda.set_device(device)
    put_back([(switch, value) for (switch, _), value in zip(remember(), task.facts["switches"], strict=True)])
    with contextlib.ExitStack() as stack:
        for name, config in CONFIGS.items():
            own = config.save_config_portable(ignore_private_configs=False)  # type: ignore[attr-defined]
            asked = task.facts["configs"][name]
            stack.enter_context(config.patch({key: value for key, value in asked.items() if own.get(key) != value}))  # type: ignore[attr-defined]
        lower(task)


def _end_with(parent: int, path: Path) -> None:
    """End soon after the process that started this one, with the processes that compile for it."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    remove(path)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
