"""Cases in a process of their own: a crash or a hang ends one case, not the suite.

The process logs what it begins and what came out, a line of JSON each; its parent follows the log. It runs case after
case; only when it dies, or its device fails, does a new one continue with the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]  # {"device"}, {"begin"} or {"case", "rows", "failed"}
Tell = Callable[[Event], None]

POLL_S = 0.2


def run_apart(
    cases: list[str], command: Callable[[list[str], Path], list[str]], limit_s: Callable[[str], float], tell: Tell
) -> None:
    """Run cases in another process, and in a new one after each case that ended it.

    Args:
        cases: Names.
        command: Makes the command line for the cases that are left; the path is that of the log.
        limit_s: Seconds after which a case is taken to hang.
        tell: Called with each event; exactly one ``case`` event comes for every case.
    """
    left = list(cases)

    def pass_on(event: Event) -> None:
        if "case" in event:
            left.remove(event["case"])
        tell(event)

    while left:
        before = len(left)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            log.touch()
            process = subprocess.Popen(command(left, log))
            try:
                current, reason = follow(process, log, limit_s, pass_on)
            finally:
                process.kill()
                process.wait()
        if current:
            pass_on(not_run(current, reason))
        elif len(left) == before:  # it would fail again
            for name in list(left):
                pass_on(not_run(name, reason))


def follow(
    process: subprocess.Popen[bytes], log: Path, limit_s: Callable[[str], float], tell: Tell
) -> tuple[str | None, str]:
    """Pass on what a process logs until it ends or hangs; return the case it was at, if any, and how it ended."""
    current, since = None, time.monotonic()
    with log.open() as lines:
        unfinished = ""
        while True:
            ended = process.poll()  # before reading: nothing that was logged before the end is missed
            while line := lines.readline():
                unfinished += line
                if not unfinished.endswith("\n"):
                    break
                event = json.loads(unfinished)
                unfinished = ""
                current, since = event.get("begin"), time.monotonic()
                tell(event)
            if ended is not None:
                return current, f"the process {how_it_ended(ended)}"
            if current and time.monotonic() - since > limit_s(current):
                return current, f"no result after {limit_s(current):g} s"
            time.sleep(POLL_S)


def how_it_ended(code: int) -> str:
    """Tell a signal from an exit status."""
    return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def not_run(case: str, reason: str) -> Event:
    """Return the event for a case that came to nothing."""
    return {"case": case, "rows": [{"case": case, "note": f"not run: {reason}"}], "failed": True}


def answer_of(module: str, arguments: Sequence[str], limit_s: float, variables: Mapping[str, str]) -> Any:
    """Run a module in a new process, and return what its last line says in JSON.

    Args:
        module: As ``python -m`` takes it.
        arguments: Of its command line.
        limit_s: Seconds after which it has failed.
        variables: Of its environment, beside those of this process.

    Raises:
        RuntimeError: It failed; the message is how it ended, and the last line of its errors that is no stack frame.
            All of them are printed.
        subprocess.TimeoutExpired: It took too long.
    """
    child = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(part or os.curdir for part in sys.path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if child.returncode:
        print(child.stderr, file=sys.stderr)
        told = [line for line in child.stderr.splitlines() if line.strip() and not line.startswith("frame #")]
        raise RuntimeError(f"{how_it_ended(child.returncode)}: {(told or ['no message'])[-1][:200]}")
    return json.loads(child.stdout.strip().splitlines()[-1])
