"""Reasons why Dynamo does not capture a model, or not all of it, in words for its user."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo import config as dynamo_config

from millstream._torch.compiler.dynamo import num_refused_forms
from millstream.capture.lines import in_library, is_users, library_in, place_in
from millstream.errors import CaptureError

#: Of a recurrent network, or of sequences in a batch: tracing more would keep users waiting for minutes.
MOST_TURNS = 128
SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)


def find_scripted(function: Callable[..., Any]) -> str:
    """Return why Dynamo does not see into a function or a part of a module, if ``torch.jit`` has made it."""
    parts = function.named_modules() if isinstance(function, torch.nn.Module) else [("", function)]
    for path, part in parts:
        if isinstance(part, SCRIPTED):
            return (
                f"{path or 'it'} runs as it is, for Dynamo does not see into what torch.jit has made. "
                "Use the module or function that it was made from."
            )
    return ""


def guess_obstacles(root: torch.nn.Module) -> list[str]:
    """Return why Dynamo may capture nothing: it says so only when it first meets a function, maybe in another model."""
    parts = [part for part in root.modules() if isinstance(part, torch.nn.RNNBase)]
    if parts:
        return [_RECURRENT]
    if num_refused_forms():
        return [
            "more forms of this class, or of the function, are captured by others than Dynamo takes; "
            "torch._dynamo.reset() makes room"
        ]
    return ["Dynamo does not say why"] if next(root.parameters(), None) is not None else []


def first_line(text: object) -> str:
    """Return the first line of an error's text."""
    return str(text).strip().partition("\n")[0]


def takes_no_more(limit: int) -> str:
    """Return what Dynamo does after so many versions of a function."""
    limit = max(dynamo_config.recompile_limit, limit)
    return (
        f"Dynamo takes {limit} forms of inputs and state of one function; all models of one of "
        "PyTorch's own classes are one to it, and where it refuses a part of one it takes none any more."
    )


def dynamos_reason(text: object) -> str:
    """Dynamo's own words: what it has met, and its explanation, in one line."""
    if "RNN, GRU, or LSTM" in str(text):
        return _RECURRENT
    first = first_line(text)
    first = "Dynamo cannot trace what is called there" if first == "step_unsupported" else first
    explained = _EXPLANATION.search(str(text))
    return first if explained is None else f"{first.rstrip('.')}: {explained[1].rstrip('.')}"


_RECURRENT = (
    f"recurrent networks are traced here from PyTorch 2.12 on, for sequences and batches of up to {MOST_TURNS}; "
    "ms.step traces all of them"
)
_EXPLANATION = re.compile(r"^ *Explanation: *(\S.*)$", re.MULTILINE)


def place_in_code(stack: Sequence[Any]) -> tuple[str, str]:
    """Return where Dynamo was, and what to do if that is a library: each begins with a space, or is empty."""
    frames = [(each.filename, f"{each.lineno} in {each.name}") for each in reversed(stack)]
    users = [each for each in frames if is_users(each[0])]
    found = users or [each for each in frames if "/torch/_dynamo/" not in each[0]][:1]
    place = place_in(found) if found else ""
    library = library_in(place)
    return f" at {place}" * bool(place), f" {in_library(library)}" * bool(library)


def refusal_of(error: Exception) -> CaptureError:
    """Return the error that tells a user, where they asked for one, of what Dynamo cannot trace."""
    where, remedy = place_in_code(getattr(error, "real_stack", None) or ())
    return CaptureError(
        f"Dynamo cannot trace all of it ({dynamos_reason(error)}).",
        where=where.removeprefix(" at "),
        remedy=f"Without strict=True, that part runs as plain Python.{remedy}",
    )
