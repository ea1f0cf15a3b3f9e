"""Each setter of PyTorch's is in a table: of switches, or of what is seen elsewhere."""

import functools
import importlib
import inspect
import re
import types

import torch

from millstream._torch.modes.other_setters import BEFORE_2_13, ELSEWHERE, SINCE_2_13
from millstream._torch.modes.switches import LEGACY, SWITCHES
from millstream._torch.workarounds import torch_version

VERBS = re.compile(
    r"(set|use|enable|disable|unset|allow|prefer|preferred|activate|restore|freeze|tuning|record_untuned)(_|$)"
)
IN_C = re.compile(r"_?(cuda_)?_?(tunableop_|record_untuned_)?(set|use|enable|disable|unset|tuning_enable)(_|$|[A-Z])")
MODULES = """
    torch torch.__future__ torch.accelerator torch.amp torch.autograd torch.autograd.anomaly_mode
    torch.autograd.forward_ad torch.autograd.grad_mode torch.autograd.graph torch.compiler torch.cpu torch.cuda
    torch.cuda.amp torch.cuda.memory torch.cuda.random torch.cuda.tunable torch.distributed torch.func torch.hub
    torch.jit torch.linalg torch.masked torch.multiprocessing torch.nested torch.nn torch.nn.attention
    torch.nn.functional torch.nn.modules torch.nn.parallel torch.nn.parameter torch.nn.utils torch.optim
    torch.overrides torch.random torch.serialization torch.sparse torch.utils torch.utils._device
    torch.utils.checkpoint torch.utils.deterministic torch._dynamo torch._logging torch._tensor_str
    """.split()
PARTS_OF_C = ("_autograd", "_functorch", "_profiler")
NO_SETTERS = """
    torch.cuda.tunable.tuning_is_enabled torch.cuda.tunable.record_untuned_is_enabled
    torch.backends.quantized.supported_engines torch.backends.cudnn.conv.backend torch.backends.cudnn.conv.op
    torch.backends.mkldnn.conv.backend torch.backends.mkldnn.conv.op torch.backends.mkldnn.matmul.backend
    torch.backends.mkldnn.matmul.op torch.backends.mkldnn.rnn.backend torch.backends.mkldnn.rnn.op
    """.split()
WHOLE = ("flags", "set_flags", "disable_global_flags")
"""Of a module of ``torch.backends``: they set its attributes, which are found."""


def setters_of(owner, front, verbs=VERBS):
    """Functions of a module that set something, and classes that do when they are called, by their names."""
    names = (name for name in dir(owner) if verbs.match(name) and name not in WHOLE)
    held = {name: getattr(owner, name, None) for name in names}
    return {
        front + name
        for name, value in held.items()
        if (inspect.isclass(value) and name.startswith("set_")) or inspect.isroutine(value)
    }


def get(owner, name):
    """An attribute; ``None`` where there is none, and something else where nobody can tell without a device."""
    try:
        return getattr(owner, name, None)
    except (AssertionError, RuntimeError):
        return "of a device"


def attributes_of(module, front):
    """What is set by assigning to an attribute of ``module``."""
    kind = type(module)
    for name, held in vars(kind).items():
        is_set = hasattr(type(held), "__set__") and getattr(held, "fset", held) is not None
        if is_set and not name.startswith("__") and not isinstance(held, types.MemberDescriptorType):
            yield front + name
    if inspect.isfunction(setter := vars(kind).get("__setattr__")):  # it says in there what it has
        constants = (each for each in setter.__code__.co_consts if isinstance(each, (str, tuple)))
        names = {name for each in constants for name in (each if isinstance(each, tuple) else (each,))}
        yield from (front + name for name in names if isinstance(name, str) and get(module, name))


def backends(module=torch.backends, front="torch.backends.", seen=None):
    """The modules within ``torch.backends`` and what they have for modules, with their names."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module, front
    for name in {*dir(module), *vars(type(module))} - {"m"}:  # which is the module behind one, with its own setters
        held = inspect.getattr_static(type(module), name, None) or get(module, name)
        is_part = isinstance(held, types.ModuleType) and held.__name__.startswith("torch.backends.")
        is_like_one = type(held).__module__.startswith("torch.backends") and not hasattr(type(held), "__set__")
        if is_part or (is_like_one and not inspect.isroutine(held)):
            yield from backends(held, f"{front}{name}.", seen)


def all_setters():
    found = setters_of(torch._C, "", IN_C)
    for part in PARTS_OF_C:
        found |= setters_of(getattr(torch._C, part), f"{part}.", IN_C)
    for name in MODULES:
        found |= setters_of(importlib.import_module(name), f"{name}.")
    for module, front in backends():
        found |= {*setters_of(vars(module).get("m", module), front), *attributes_of(module, front)}
    found |= {*attributes_of(torch.utils.deterministic, "torch.utils.deterministic.")}
    return found - {*NO_SETTERS}


def known_setters():
    switches = (*SWITCHES, *LEGACY)
    return {
        *ELSEWHERE,
        *(switch.name for switch in switches),
        *(name for switch in switches for name in switch.setters),
    }


def test_each_setter_is_known():
    assert not all_setters() - known_setters()


def is_there(name):
    first, *parts = name.split(".")
    return functools.reduce(has, parts, (torch, True) if first == "torch" else has((torch._C, True), first))[1]


def has(owner, name):
    found = inspect.getattr_static(owner[0], name, None)
    return get(owner[0], name), found is not None or get(owner[0], name) is not None


def test_each_is_known_once_where_it_is():
    assert not {*ELSEWHERE} & {switch.name for switch in (*SWITCHES, *LEGACY)}
    version = torch_version()
    gone = {name for name in ELSEWHERE if name.startswith("_cuda_") and not hasattr(torch._C, "_cuda_setDevice")}
    gone |= SINCE_2_13 if version < (2, 13) else set()
    gone |= BEFORE_2_13 if version >= (2, 12) else set()
    assert not {name for name in {*ELSEWHERE} - gone if not is_there(name)}
