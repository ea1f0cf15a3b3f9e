"""``MILLSTREAM_ENGINE=serial``: kernel after kernel, each finished and looked at before the next begins.

For finding out what is wrong, not for speed. An error is raised where it happens and names the kernel and the user's
line: also one that the device reports late, and a result of another shape or dtype than an operator has promised.
``MILLSTREAM_CHECK_NAN=1`` looks for NaN and infinity, too; by default nothing does, for masks hold infinity by right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from millstream.engine.promises import broken_promise
from millstream.errors import GraphError
from millstream.graph import Kernel
from millstream.program import Program


class KernelCheck:
    """Launches kernels one by one; an ``Observe`` for ``compile_plan``.

    Args:
        program: Whose kernels these are.
        nan: Whether to look for NaN and infinity.
    """

    sees_all = True  # what every kernel writes is to be shown

    def __init__(self, program: Program, *, nan: bool) -> None:
        self._program, self._nan = program, nan
        self._devices = [torch.device(name) for name in program.devices if not name.startswith("cpu")]

    def __call__(self, number: int, launch: Callable[[], Any], written: tuple[Tensor, ...]) -> Any:
        """Launch a kernel, wait for it, and look at what it has made.

        Raises:
            GraphError: Something is not as it should be.
        """
        kernel = self._program.graph.kernels[number]
        try:
            result = launch()
            for device in self._devices:
                torch.cuda.synchronize(device)
        except Exception as error:
            error.add_note(f"Raised by {kernel.label} of {self._program.graph.name}.")
            raise
        made = self._check_results(kernel, result)
        if self._nan:
            self._check_values(kernel, (*written, *made))
        return result

    def check_inputs(self, inputs: list[Any]) -> None:
        """Compare what a call is given with what the program was compiled for.

        Raises:
            GraphError: An input has another shape or dtype.
        """
        for name, value in zip(self._program.inputs, inputs, strict=True):
            if name is not None and isinstance(value, Tensor) and value.layout is torch.strided:
                self._compare(name, value, f"input {name!r} of {self._program.graph.name}")

    def _check_results(self, kernel: Kernel, result: Any) -> list[Tensor]:
        """Compare what an operator has returned with what it had promised when it was captured."""
        made = []
        for index, name in self._program.calls[kernel.id].results:
            tensor = result if index is None else result[index]
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._compare(name, tensor, f"{kernel.label} returns {name!r}, which", kernel)
                made.append(tensor)
        return made

    def _compare(self, name: str, tensor: Tensor, what: str, kernel: Kernel | None = None) -> None:
        layout = self._program.layout(name)
        if layout is None or (tuple(tensor.shape) == layout.size and tensor.dtype == layout.dtype):
            return
        raise broken_promise(kernel, name, what, tensor, layout.size, layout.dtype)

    def _check_values(self, kernel: Kernel, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if (tensor.is_floating_point() or tensor.is_complex()) and not bool(torch.isfinite(tensor).all()):
                bad = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
                raise GraphError(
                    f"{kernel.label} of {self._program.graph.name} has written {bad}: {tensor.dtype} "
                    f"{list(tensor.shape)}. Unset MILLSTREAM_CHECK_NAN if that is right here, as in a mask.",
                    kernel=kernel.name,
                )


def wanted_check(program: Program) -> KernelCheck | None:
    """The check that the environment asks for, if it does."""
    nan = os.environ.get("MILLSTREAM_CHECK_NAN", "") not in ("", "0")
    if nan or os.environ.get("MILLSTREAM_ENGINE") == "serial":
        return KernelCheck(program, nan=nan)
    return None
