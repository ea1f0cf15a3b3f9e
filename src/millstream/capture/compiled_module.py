"""A module that ``ms.compile`` has compiled: calls run compiled, everything else reaches the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from millstream._torch.autograd.hooks import HOOKS_OF_MODULE, hooks_of_all_modules
from millstream._torch.compiler.dynamo import (
    is_compiling,
)
from millstream.capture.model import Compiled, Compiler
from millstream.errors import CaptureError

_RUN_ORIGINAL = frozenset(("training_step", "validation_step", "test_step", "predict_step", "generate"))
"""Methods with which frameworks go around the call of a module."""
_RETURN_SELF = frozenset(
    """
    train eval requires_grad_ apply to to_empty type float double half bfloat16 cpu cuda xpu ipu mtia share_memory
    """.split()
)
_PLAIN_METHODS = frozenset(vars(torch.nn.Module)) - _RETURN_SELF
"""Methods of every module that do not return it. Dynamo, when it finds one compiled model in another, looks at them."""


class CompiledModule(torch.nn.Module):
    """A module compiled by ``ms.compile``: calls run compiled, everything else reaches the original module.

    ``parameters()``, ``state_dict()``, ``train()``, attributes read and written, and ``isinstance`` all behave as the
    original, which stays usable beside it and shares all tensors with it.
    """

    def __init__(self, module: torch.nn.Module, compiler: Compiler) -> None:
        object.__setattr__(self, "_millstream", Compiled(module, compiler))
        object.__setattr__(self, "_original", module)

    def __getattribute__(self, name: str) -> Any:
        if name in ("_millstream", "_original", "_compiled_forward"):
            return object.__getattribute__(self, name)
        original = object.__getattribute__(self, "_original")
        value = getattr(original, name)
        if name == "forward" and getattr(value, "__self__", None) is original:
            return self._compiled_forward(value)
        if name in _PLAIN_METHODS or not callable(value) or getattr(value, "__self__", None) is not original:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            if name in _RUN_ORIGINAL:
                self._millstream.tell_unwrapped(original, name)
            result = value(*args, **kwargs)
            return self if result is original else result  # model.train() returns the compiled model

        return method

    def _compiled_forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return what ``model.forward`` is.

        Compiled as a call is, where there are no hooks, which a call alone runs.
        """

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            hooks = [getattr(self._original, name) for name in HOOKS_OF_MODULE]
            is_plain = is_compiling() or any(hooks) or hooks_of_all_modules()
            return (plain if is_plain else self._millstream)(*args, **kwargs)

        return forward

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_original"), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_original"), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._millstream(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original. Dynamo asks the class for it, where a compiled model is a part of another one."""
        return self._original(*args, **kwargs)

    def __repr__(self) -> str:
        return f"compiled {self._original!r}"


def compile_module(module: torch.nn.Module, compiler: Compiler) -> CompiledModule:
    """Make a compiled module, with items where ``module`` has them: Python looks for these methods in classes only.

    Raises:
        CaptureError: Strictly one graph is asked for, and a part of the module is compiled already.
    """
    if compiler.strict and (inner := _find_compiled(module)):
        raise CaptureError(f"{inner} is compiled already.", remedy="Compile the whole only.")
    methods = {name: _reach_original(name) for name in _ITEM_METHODS if hasattr(type(module), name)}
    kind = type(CompiledModule.__name__, (CompiledModule,), methods) if methods else CompiledModule
    return kind(module, compiler)


def _find_compiled(module: torch.nn.Module) -> str:
    """Name of a compiled model within a module; empty where there is none."""
    for path, part in module.named_modules():
        for name, child in part._modules.items():
            if issubclass(type(child), CompiledModule):
                return f"{type(module).__name__}.{path + '.' if path else ''}{name}"
    return ""


_ITEM_METHODS = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")


def _reach_original(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._original, name)(*args)
