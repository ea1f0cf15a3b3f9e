"""All that a lowered program depends on, as text.

**Contract**
- Two graphs have the same text only where lowering makes the same program of them, but for the user's lines.
- What text cannot tell apart (a function of the user's among the options, a subgraph) is an error, never left out.
- Nothing in it differs between two processes that run the same script.

It does not see functions that others have put into PyTorch's own tables of lowerings; neither do Inductor's caches.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import _disable_current_modes

from millstream import errors as millstream_errors
from millstream._torch.compiler.node_notes import stream_hint_of
from millstream._torch.compiler.symbols import NUMBERS, expression_of
from millstream._torch.dispatcher import is_expanded_later
from millstream._torch.modes.switches import present
from millstream._torch.tensors import ALIGNMENT_BYTES
from millstream._torch.workarounds import left_out
from millstream.lower import workarounds
from millstream.lower.inductor.tuning import versions

MOST_CONSTANT_BYTES = 64 << 20
"""Of tensors in a graph, whose values count: reading more takes longer than it is worth."""

_VARIABLES = ("MILLSTREAM_", "TORCH", "PYTORCH", "TRITON_", "OMP_", "MKL_", "CUDA_", "CUDNN_", "CXX", "CC", "CPATH")
_OF_ONE_RUN = "TORCHELASTIC_"  # another number each time that torchrun starts
_OWN_BUSINESS = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "MILLSTREAM_CACHE_DIR",
        "MILLSTREAM_CACHE_LIMIT",
        "MILLSTREAM_COMMUNICATOR",
        "MILLSTREAM_DISABLE",
        "MILLSTREAM_PROGRESS",
        "MILLSTREAM_TRACES",
        "MILLSTREAM_TUNE",
        "MILLSTREAM_WARM_START",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_PTXAS_PATH",
    }
)
"""Variables that say where things lie, and what is shown: no program depends on them. Devices are described instead.

PyTorch sets the last one itself once it has compiled a kernel with Triton, which a process with warm caches does not.
"""

_PASSES = ("_custom_pre_pass", "_custom_post_pass", "_custom_pass", "_pre_fusion_custom_pass")
_PLAIN_MODULES = frozenset({"_operator", "math", "builtins"})
_NOTED = ("user_visible_output_idxs", "original_output_strides")


class ProgramNotKept(Exception):  # noqa: N818  no error: the program is lowered in every process
    """A program that is not kept on disk; the message says why."""


def describe_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterable[str]:
    """A graph and its example inputs: operators, arguments, what is known of values, memory that inputs share."""
    yield from _describe_inputs(inputs)
    left = MOST_CONSTANT_BYTES
    for node in gm.graph.nodes:
        parts = [node.op, node.name, _target(node.target), _text(node.args), _text(dict(node.kwargs))]
        parts.append(_text(node.meta.get("val", node.meta.get("example_value"))))
        parts += [f"{name} {_text(node.meta[name])}" for name in _NOTED if name in node.meta]
        if (hint := stream_hint_of(node)) is not None:
            parts.append(f"stream {hint}")
        if node.op == "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), gm)
            if not isinstance(value, torch.Tensor):
                raise ProgramNotKept(f"the graph has a {type(value).__name__} in it")
            left -= value.numel() * value.element_size()
            if left < 0:
                raise ProgramNotKept(f"the graph has more than {MOST_CONSTANT_BYTES >> 20} MiB of constants")
            parts += [_text(value), hashlib.sha256(bytes_of(value)).hexdigest()]
        yield " | ".join(parts)


def _describe_inputs(inputs: Sequence[Any]) -> Iterable[str]:
    """Each input, and which of them are one tensor, or lie in the same memory."""
    memory: dict[int, int] = {}
    same: dict[int, int] = {}
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            if isinstance(value.storage_offset(), torch.SymInt):
                raise ProgramNotKept("where an input begins is symbolic")
            is_aligned = value.storage_offset() * value.element_size() % ALIGNMENT_BYTES == 0
            where = memory.setdefault(storage._cdata, len(memory)), same.setdefault(id(value), len(same))
            yield f"{_text(value)} in {where} of {storage.nbytes()} aligned {is_aligned}"
        else:
            yield _text(value)


def describe_settings(options: Mapping[str, Any]) -> Iterable[str]:
    """Options, switches, variables of the environment, versions, devices, and our own sources."""
    yield _text(dict(sorted(options.items())))
    for config in (inductor_config, functorch_config):
        found = config.save_config_portable(ignore_private_configs=False)  # type: ignore[attr-defined]
        yield _text({name: found[name] for name in sorted(found) if not name.endswith(_PASSES)})
    for name, value in inductor_config.get_config_copy().items():  # type: ignore[attr-defined]
        is_ours = isinstance(value, workarounds.JointPasses) and value.is_ours_alone
        if name.endswith(_PASSES) and value is not None and not is_ours:
            raise ProgramNotKept(f"option {name} is a function")
    yield _text({name: os.environ[name] for name in sorted(os.environ) if _counts(name)})
    yield _text(sorted(left_out()))
    yield present().text
    yield _text(describe_machine())
    if torch.cuda.is_available():
        yield _text(torch.cuda.current_device())


def describe_machine() -> dict[str, str]:
    """Versions, the processor, the GPUs, and the sources of this package, by what a message calls them."""
    found = dict(_describe_host())
    if torch.cuda.is_available():
        devices = (torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count()))
        found["GPUs"] = "; ".join(sorted(set(map(_device, devices))))
    return found


def _device(found: Any) -> str:
    """Return what is known of a device, but for which one of its kind it is: another process may be given another."""
    return " ".join(each for each in str(found).split(", ") if not each.startswith(("uuid=", "pci_")))


def _counts(name: str) -> bool:
    return name.startswith(_VARIABLES) and not name.startswith(_OF_ONE_RUN) and name not in _OWN_BUSINESS


@functools.cache
def _describe_host() -> dict[str, str]:
    return {
        **versions(),
        "git": str(torch.version.git_version),
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "number of processors": str(os.cpu_count()),
        "millstream": sources_digest(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except (OSError, UnicodeDecodeError):
        return platform.processor()
    return " ".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def sources_digest(folder: Path | None = None) -> str:
    """A digest of all source files of this package, by their contents and names."""
    folder = folder or Path(millstream_errors.__file__).parent
    digest = hashlib.sha256()
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.cpp"))):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def bytes_of(value: torch.Tensor) -> bytes:
    """The values of a tensor, in the order of its elements."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise ProgramNotKept(f"a constant is a {type(value).__name__} of layout {value.layout}")
    with _disable_current_modes(), torch.no_grad():
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().clone()
        # Not ``bytes(storage)``, which asks for each byte by itself: minutes for 64 MiB.
        return torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage()).numpy().tobytes()


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        is_own = target.namespace not in ("aten", "prims", "prim", "inductor")
        if is_own and is_expanded_later(target):
            raise ProgramNotKept(f"the graph has {target} in it, in whose place Python is called")
        return f"{target} {target._schema}" if is_own else str(target)
    if getattr(target, "__module__", None) in _PLAIN_MODULES and hasattr(operator, getattr(target, "__name__", "")):
        return f"{target.__module__}.{target.__name__}"
    if isinstance(target, (type(torch.sin), type(len))) and getattr(torch, target.__name__, None) is target:
        return f"torch.{target.__name__}"
    if getattr(target, "__name__", "").startswith("sym_") and getattr(torch, target.__name__, None) is target:
        return f"torch.{target.__name__}"
    raise ProgramNotKept(f"the graph has {getattr(target, '__name__', target)} in it")


def _text(value: Any) -> str:
    """Return what a value is, the same in every process."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{type(value).__name__}:{value!r}" if isinstance(value, float) else repr(value)
    if isinstance(value, NUMBERS):
        return f"{type(value).__name__}({expression_of(value)})"
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, (list, tuple, torch.Size)):
        return f"{'[' if isinstance(value, list) else '('}{', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (set, frozenset)) or type(value).__name__ == "OrderedSet":
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    if isinstance(value, torch._ops.OpOverload):
        return _target(value)
    if isinstance(value, Path):
        return str(value)
    raise ProgramNotKept(f"{type(value).__name__} has no text that says all about it")


def _tensor(value: torch.Tensor) -> str:
    parts: list[Any] = [value.dtype, value.device, tuple(value.shape), value.requires_grad, value.layout]
    if value.layout is torch.strided:
        parts += [value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()]
    kind = type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter) and kind.__name__ != "FakeTensor":
        raise ProgramNotKept(f"a tensor is a {kind.__name__}")
    return f"tensor({', '.join(map(_text, parts))})"
