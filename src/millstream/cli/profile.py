"""The command ``profile``: a script, unmodified, and why the device idled in it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from millstream.api.profiling import Profile, check_writable, trace_syncs
from millstream.cli.running import run_script
from millstream.errors import ArgumentError
from millstream.report.idle import Condition, compare

EXIT_FAILED = 1
EXIT_CONDITION = 3  # a --fail-if holds, and the script itself had succeeded


def profile(target: str, arguments: list[str], *, as_module: bool, save: list[Path], fail_if: list[str]) -> int:
    """Run a script and report on the standard error output; its own output is left alone.

    Args:
        target: A script, or with ``as_module`` a module.
        arguments: The script's own.
        as_module: As ``python -m``.
        save: Files for the report; under ``torchrun`` each process writes its own, with its rank in the name.
        fail_if: Conditions such as ``idle>20%`` under which a script that succeeds gives ``EXIT_CONDITION``.

    Returns:
        The script's exit code, unless a condition holds.

    Raises:
        ArgumentError: There is no such script, a condition is none, or a file cannot be written.
    """
    conditions = [Condition.parse(text) for text in fail_if]
    for path in save:
        check_writable(path)
    save = [_of_rank(path) for path in save]
    run = Profile(Path(target).name)
    code = EXIT_FAILED
    try:
        with run:
            code = run_script(target, arguments, as_module=as_module)
    except ArgumentError:
        raise
    except Exception:  # noqa: BLE001 - a fault of the report's must not change what the script has done
        traceback.print_exc()
        print("millstream: the script ran, but its report failed; please report this", file=sys.stderr)
        return code
    if run.findings is None:  # a child that the script forked has come to its end
        return code
    sys.stdout.flush()
    print(f"\n{run}", file=sys.stderr)
    for path in save:
        run.save(path)
        print(f"saved {path}", file=sys.stderr)
    broken = [each.text for each in conditions if each.holds(run.to_dict())]
    if broken:
        print(f"millstream: {', '.join(broken)} holds", file=sys.stderr)
    return EXIT_CONDITION if broken and code == 0 else code


def _of_rank(path: Path) -> Path:
    """A file of this process's own where several processes run the script, as under ``torchrun``."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return path
    name, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{name}.rank{os.environ.get('RANK', '0')}{dot}{suffixes}")


def list_syncs(target: str, arguments: list[str], *, as_module: bool, save: Path | None) -> int:
    """Run a script and list what makes its host wait for the device; returns the script's exit code."""
    trace = trace_syncs()
    with trace:
        code = run_script(target, arguments, as_module=as_module)
    if trace.findings is None:  # a child that the script forked
        return code
    sys.stdout.flush()
    print(f"\n{trace}", file=sys.stderr)
    if save is not None:
        save.write_text(json.dumps(trace.to_dict(), indent=2) + "\n", encoding="utf-8")
    return code


def compare_files(before: Path, after: Path) -> int:
    """Print what has changed from one saved report to another."""
    print(compare(_read(before), _read(after)))
    return 0


def _read(path: Path) -> dict:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from error
    if not isinstance(report, dict) or "idle_ns_by_cause" not in report:
        raise ArgumentError(f"{path} is no report: save one with millstream profile --save {path} script.py")
    return report
