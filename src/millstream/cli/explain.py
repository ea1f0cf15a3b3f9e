"""The command ``explain``: the graph of a script's step or model, in words, as data, as a picture."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import millstream as ms
from millstream.api import is_compiled
from millstream.cli.running import compiling_at_once
from millstream.errors import ArgumentError, check_folder
from millstream.report.explanation import writer_for


@dataclass(frozen=True)
class Showing:
    """The form in which an explanation is shown.

    Attributes:
        as_json: As data instead of words.
        save: A file to draw into.
        measure: Time each kernel.
    """

    as_json: bool
    save: Path | None
    measure: bool = False


def explain(target: str, arguments: list[str], show: Showing) -> int:
    """Run a script as ``python script.py`` would, then explain an object of its globals.

    Ctrl-C ends the script, not the explanation: of a long training run, a few steps are enough.

    Args:
        target: ``script.py:object``; the object's name may have dots. Without one, the only compiled object there is.
        arguments: The script's own.
        show: How to show it.

    Raises:
        ArgumentError: There is no such script or object, or it is nothing that can be explained; or, before anything
            runs, the picture cannot go where it is to.
    """
    if show.save:
        writer_for(show.save)
        check_folder(show.save)
    script, _, name = target.partition(":")
    explanation = ms.explain(_find(run_script(script, arguments), script, name), measure=show.measure)
    if show.save:
        explanation.save(show.save)
    print(json.dumps(explanation.to_dict(), indent=2) if show.as_json else explanation)
    return 0


def run_script(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script as ``python script.py`` would, to its end or until Ctrl-C, and return its globals.

    Raises:
        ArgumentError: There is no such script.
    """
    try:
        source = Path(script).read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read {script}: {error.strerror}") from error
    module = types.ModuleType("__main__")
    module.__file__ = script
    folder = str(Path(script).resolve().parent)
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.modules["__main__"], sys.argv, sys.path[0:1] = module, [script, *arguments], [folder]
    try:
        with compiling_at_once():
            exec(compile(source, script, "exec"), vars(module))  # noqa: S102  the user's own script, as Python runs it
    except SystemExit:
        pass
    except KeyboardInterrupt:
        print(f"millstream: {script} was interrupted; this is what there was by then", file=sys.stderr)
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before
    return vars(module)


def _find(names: dict[str, Any], script: str, name: str) -> Any:
    compiled = [each for each, value in names.items() if is_compiled(value)]
    if not name:
        if len(compiled) != 1:
            raise ArgumentError(f"say which object of {script} to explain, as {script}:NAME; {_told(compiled)}")
        name = compiled[0]
    first, *rest = name.split(".")
    if first not in names:
        raise ArgumentError(f"{script} has no global {first!r}; {_told(compiled)}")
    found = names[first]
    for part in rest:
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ArgumentError(f"{script}:{name}: {error}") from error
    return found


def _told(compiled: list[str]) -> str:
    return f"compiled there: {', '.join(compiled)}" if compiled else "none of its globals is compiled by Millstream"
