"""The command ``profile``: a script, unmodified, and why the device idled in it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from millstream.api.profiling import Profile, check_writable
from millstream.cli.exits import EXIT_CONDITION, EXIT_FAILED
from millstream.cli.running import run_script
from millstream.errors import ArgumentError, check_folder
from millstream.insight.ranks import merge
from millstream.report.idle import SLOWER, Condition, compare, several_ranks, sync_list
from millstream.trace import SyncTrace

PATIENCE_S = 10.0  # for the reports of other ranks
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # read when PyTorch is imported, which here is before the script


def profile(target: str, arguments: list[str], *, as_module: bool, save: list[Path], fail_if: list[str]) -> int:
    """Run a script and report on the standard error output; its own output is left alone.

    Args:
        target: A script, or with ``as_module`` a module.
        arguments: The script's own.
        as_module: As ``python -m``.
        save: Files for the report; under ``torchrun`` each process writes its own, with its rank in the name.
        fail_if: Conditions such as ``idle>20%`` under which a script that succeeds gives ``EXIT_CONDITION``.

    Returns:
        The script's exit code, unless a condition holds; without a diagnosis none does.

    Raises:
        ArgumentError: There is no such script, it only starts other processes, a condition is none, or a file cannot
            be written.
    """
    if as_module and target in _LAUNCHERS:
        raise ArgumentError(
            f"{target} only starts other processes: write it in front, as in "
            "torchrun ... -m millstream profile script.py"
        )
    conditions = _parse(fail_if)
    if any(each.name == SLOWER for each in conditions):
        raise ArgumentError(f"{SLOWER!r} takes two reports: millstream profile --fail-if COND --compare BEFORE AFTER")
    for path in save:
        check_writable(path)
    save = [_of_rank(path) for path in save]
    run = Profile(Path(target).name)
    code, before = EXIT_FAILED, _threads_asked_for()
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
    if text := _text_of(run):
        print(f"\n{text}", file=sys.stderr)
    if late := [name for name in _THREADS if _threads_asked_for().get(name) != before.get(name)]:
        names = " and ".join(late)
        print(f"note: the script sets {names}, which PyTorch reads earlier here: set it outside", file=sys.stderr)
    for path in save:
        try:
            run.save(path)
        except (ArgumentError, OSError) as error:  # the script may have removed its folder
            why = f"cannot write {path}: {error.strerror}" if isinstance(error, OSError) else error
            print(f"millstream: {why}", file=sys.stderr)
            return code or EXIT_FAILED
        print(f"saved {path}", file=sys.stderr)
    held = _held_against(conditions, run.to_dict())
    return code or held


def _threads_asked_for() -> dict[str, str]:
    return {name: os.environ[name] for name in _THREADS if name in os.environ}


def _parse(texts: list[str]) -> list[Condition]:
    return [Condition.parse(text) for text in texts]


def _held_against(conditions: list[Condition], report: dict, before: dict | None = None) -> int:
    """An exit code, and in words why it is not 0."""
    for each in (before or report, report):
        if conditions and each["why_unreliable"]:
            texts = ", ".join(condition.text for condition in conditions)
            print(f"millstream: cannot tell whether {texts} holds: {each['why_unreliable']}", file=sys.stderr)
            return 0
    broken = [each.text for each in conditions if each.holds(report, before)]
    if broken:
        print(f"millstream: {', '.join(broken)} holds", file=sys.stderr)
    return EXIT_CONDITION if broken else 0


def _of_rank(path: Path) -> Path:
    """A file of this process's own where several processes run the script, as under ``torchrun``."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return path
    name, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{name}.rank{os.environ.get('RANK', '0')}{dot}{suffixes}")


def _text_of(run: Profile) -> str:
    """The report; where several ranks of this host train together, that of all of them in rank 0, else nothing.

    Each rank leaves its own where rank 0 finds it; rank 0 waits for those that come soon.
    """
    world, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world < 2 or world != here:  # ranks of other hosts leave files there: millstream profile --merge
        return str(run)
    name = "-".join(os.environ.get(each, "") for each in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    folder = Path(tempfile.gettempdir(), f"millstream-{os.getuid()}-{os.getppid()}-{name.replace('/', '_')}")
    folder.mkdir(mode=0o700, exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))
    own = folder / f"rank{rank}.json"
    run.save(own.with_suffix(".part.json"))
    own.with_suffix(".part.json").rename(own)  # whole, or not there
    if rank:
        return ""
    end = time.monotonic() + PATIENCE_S
    paths = [folder / f"rank{number}.json" for number in range(world)]
    while time.monotonic() < end and not all(path.exists() for path in paths):
        time.sleep(0.05)
    reports = [_read(path) for path in paths if path.exists()]
    shutil.rmtree(folder, ignore_errors=True)
    lost = [number for number, path in enumerate(paths) if number not in {report["rank"] for report in reports}]
    missing = f"note: no report came from rank {', '.join(map(str, lost))}\n" if lost else ""
    text = several_ranks.to_text(merge(reports)) if len(reports) > 1 else ""
    return f"{text}\n{missing}\nrank 0: {run}"


def merge_files(paths: list[Path]) -> int:
    """Print what the saved reports of all ranks say together."""
    print(several_ranks.to_text(merge([_read(path) for path in paths])))
    return 0


def list_syncs(target: str, arguments: list[str], *, as_module: bool, save: Path | None) -> int:
    """Run a script and list what makes its host wait for the device; returns the script's exit code."""
    if save is not None:
        check_folder(save)
    trace = SyncTrace(follows_threads=True)
    with trace:
        code = run_script(target, arguments, as_module=as_module)
    if trace.findings is None:  # a child that the script forked
        return code
    sys.stdout.flush()
    print(f"\n{sync_list.to_text(trace.findings)}", file=sys.stderr)
    if save is not None:
        save.write_text(json.dumps(sync_list.to_dict(trace.findings), indent=2) + "\n", encoding="utf-8")
    return code


def compare_files(before: Path, after: Path, fail_if: list[str]) -> int:
    """Print what has changed from one saved report to another; a condition is of the other one."""
    conditions, was, now = _parse(fail_if), _read(before), _read(after)
    print(compare(was, now), flush=True)
    return _held_against(conditions, now, was)


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
