"""The switches of PyTorch that hold for a whole process or thread: what each decides, and who sees that it has changed.

A graph holds for the switches under which it was captured and lowered. ``present`` gives those of ``SWITCHES`` as they
are now: it is asked in every call of a step, by a guard in every call of a compiled model, and by the key of what is
kept on disk. ``other_setters`` names all that is set besides, with who sees that, or why nobody need. A test finds the
setters of the PyTorch that runs, and fails for one that is in neither table.

Reading them takes some 6 µs in Python, and 0.4 in compiled code (``accelerate``). What is read never raises: the
getters of PyTorch's older switches of precision do where the newer ones are in use. Private APIs; tried on torch 2.11
and 2.13.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import sys
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

_C: Any = torch._C
_EINSUM: Any = torch.backends.opt_einsum
_ATTENTION: Any = sys.modules["torch.nn.attention._registry"]
_MHA: Any = torch.backends.mha


class Decides(StrEnum):
    """What a switch decides of what an operator computes, once a trace has written down which operator that is."""

    ANYTHING = "any operator"
    PRODUCTS = "products, convolutions and what else libraries compute"
    NOTHING = "nothing"


@dataclass(frozen=True, eq=False)
class Switch:
    """A switch whose value is a part of what graphs are found by.

    Attributes:
        name: As users write it.
        read: Gives its value.
        write: Sets it to what ``read`` gave, if that can be.
        setters: Functions that set it, those of ``torch._C`` by their names alone.
        decides: What it decides at run time.
        device: The type of device whose operators it concerns; empty for all.
        is_lowered: Whether lowering, or what a kernel costs, depends on it.
        holders: Dicts in which Python keeps it, each with the key; the first that has it counts.
        is_there: Whether this PyTorch has it.
    """

    name: str
    read: Callable[[], Hashable]
    write: Callable[[Any], object] | None
    setters: tuple[str, ...] = ()
    decides: Decides = Decides.PRODUCTS
    device: str = "cuda"
    is_lowered: bool = True
    holders: tuple[tuple[dict[str, Any], str], ...] = ()
    is_there: bool = True

    def in_effect(self, value: Hashable) -> Hashable:
        """Return what a value that was read means.

        An operator whose precision nobody has set computes in full precision.
        """
        is_unset = value == "none" and self.decides is Decides.PRODUCTS
        return "ieee" if is_unset else value


_ANYTHING: dict[str, Any] = {"decides": Decides.ANYTHING, "device": ""}
_ON_CPU: dict[str, Any] = {"device": "cpu"}
_CHOOSES: dict[str, Any] = {"decides": Decides.NOTHING}  # an operator, and a trace shows which
_TRACED: dict[str, Any] = {"decides": Decides.NOTHING, "device": "", "is_lowered": False}


def _plain(name: str, getter: str, setter: str, **facts: Any) -> Switch:
    """One that two functions of ``torch._C`` read and write."""
    read, write = getattr(_C, getter, None), getattr(_C, setter, None)
    return Switch(name, read, write, (setter,), is_there=read is not None, **facts)  # type: ignore[arg-type]


def _precision(owner: str, backend: str, what: str, **facts: Any) -> Switch:
    """One of float32 precision in PyTorch's newer form. What is not set there has the value of what it belongs to."""
    read = functools.partial(_C._get_fp32_precision_getter, backend, what)
    write = functools.partial(_C._set_fp32_precision_setter, backend, what)
    return Switch(f"torch.backends.{owner}fp32_precision", read, write, ("_set_fp32_precision_setter",), **facts)


def _reduction(dtype: str) -> Switch:
    key = f"allow_{dtype}_reduced_precision_reduction"
    write = getattr(_C, f"_set_cublas_{key}")
    return Switch(
        f"torch.backends.cuda.matmul.{key}",
        getattr(_C, f"_get_cublas_{key}"),
        lambda value: write(*value),
        (f"_set_cublas_{key}",),
    )


def _attention(name: str, getter: str, setter: str) -> Switch:
    return _plain(f"torch.backends.cuda.{name}", getter, setter, **_CHOOSES)


def _preferred(library: str, kind: str) -> Switch:
    getter, setter = f"_get_{library}_preferred_backend", f"_set_{library}_preferred_backend"
    read, write, kinds = getattr(_C, getter), getattr(_C, setter), getattr(_C, kind)
    return Switch(
        f"torch.backends.cuda.preferred_{library}_library",
        lambda: read().value,  # the enumeration itself takes microseconds to be hashed
        lambda value: write(kinds(value)),
        (setter,),
    )


def _einsum(name: str) -> Switch:
    """One of the order in which ``einsum`` multiplies: an attribute of a module, or of the one for which it stands."""
    own, behind = vars(_EINSUM), vars(_EINSUM.m)
    return Switch(
        f"torch.backends.opt_einsum.{name}",
        lambda: own[name] if name in own else behind[name],  # ``getattr`` takes microseconds
        functools.partial(setattr, _EINSUM, name),
        holders=((own, name), (behind, name)),
        **_TRACED,
    )


def _set_determinism(is_on: bool) -> None:
    _C._set_deterministic_algorithms(is_on, warn_only=_C._get_deterministic_algorithms_warn_only())


def _set_warn_only(is_on: bool) -> None:
    _C._set_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=is_on)


def _flash_attention() -> str | None:
    active = _ATTENTION._FLASH_ATTENTION_ACTIVE
    return None if active is None else str(active[0])


NATIVE_FILTERS: tuple[set[str], ...] = tuple(
    held
    for key, held in vars(getattr(sys.modules.get("torch._native.registry"), "_filter_state", object)).items()
    if key in ("_dsl_names", "_op_symbols", "_dispatch_keys")
)
"""Which kernels in other languages are switched off: sets that are changed in place, and empty as a rule."""

_DETERMINISM = ("_set_deterministic_algorithms",)
_ALL = (
    Switch(
        "torch.set_default_dtype",
        torch.get_default_dtype,
        torch.set_default_dtype,
        ("_set_default_dtype", "_set_default_tensor_type"),
        **_ANYTHING,
    ),
    Switch("torch.set_default_tensor_type", _C._get_default_device, None, **_TRACED),
    _plain("torch.set_num_threads", "get_num_threads", "set_num_threads", decides=Decides.NOTHING, **_ON_CPU),
    Switch(
        "torch.use_deterministic_algorithms",
        _C._get_deterministic_algorithms,
        _set_determinism,
        _DETERMINISM,
        **_ANYTHING,
    ),
    Switch(
        "torch.use_deterministic_algorithms(warn_only=True)",
        _C._get_deterministic_algorithms_warn_only,
        _set_warn_only,
        _DETERMINISM,
        **_ANYTHING,
    ),
    _plain(
        "torch.utils.deterministic.fill_uninitialized_memory",
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory",
        **_ANYTHING,
    ),
    _precision("", "generic", "all", **_CHOOSES),
    _precision("cudnn.", "cuda", "all", **_CHOOSES),
    _precision("cuda.matmul.", "cuda", "matmul"),
    _precision("cudnn.conv.", "cuda", "conv"),
    _precision("cudnn.rnn.", "cuda", "rnn"),
    _precision("mkldnn.", "mkldnn", "all", **_CHOOSES),
    _precision("mkldnn.matmul.", "mkldnn", "matmul", **_ON_CPU),
    _precision("mkldnn.conv.", "mkldnn", "conv", **_ON_CPU),
    _precision("mkldnn.rnn.", "mkldnn", "rnn", **_ON_CPU),
    _plain("torch.backends.cudnn.enabled", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    _plain("torch.backends.cudnn.benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    _plain(
        "torch.backends.cudnn.benchmark_limit",
        "_cuda_get_cudnn_benchmark_limit",
        "_cuda_set_cudnn_benchmark_limit",
    ),
    _plain("torch.backends.cudnn.deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    _plain(
        "torch.backends.cudnn.depthwise_kernel",
        "_get_cudnn_depthwise_kernel",
        "_set_cudnn_depthwise_kernel",
    ),
    _reduction("fp16"),
    _reduction("bf16"),
    _plain(
        "torch.backends.cuda.matmul.allow_fp16_accumulation",
        "_get_cublas_allow_fp16_accumulation",
        "_set_cublas_allow_fp16_accumulation",
    ),
    _plain("a share of the multiprocessors", "_get_sm_carveout_experimental", "_set_sm_carveout_experimental"),
    _preferred("blas", "_BlasBackend"),
    _preferred("linalg", "_LinalgBackend"),
    _preferred("rocm_fa", "_ROCmFABackend"),
    _plain("torch.backends.miopen.immediate", "_get_miopen_immediate", "_set_miopen_immediate"),
    _attention("enable_flash_sdp", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    _attention("enable_mem_efficient_sdp", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    _attention("enable_math_sdp", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    _attention("enable_cudnn_sdp", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    _attention("overrideable attention", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    _attention(
        "allow_fp16_bf16_reduction_math_sdp",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_set_math_sdp_allow_fp16_bf16_reduction",
    ),
    Switch(
        "torch.nn.attention.sdpa_kernel(set_priority=True)",
        lambda: tuple(_C._get_sdp_priority_order()),
        lambda order: _C._set_sdp_priority_order([*order]),
        ("_set_sdp_priority_order",),
        **_CHOOSES,
    ),
    Switch(
        "torch.nn.attention.activate_flash_attention_impl",
        _flash_attention,
        None,
        ("torch.nn.attention.restore_flash_attention_impl", "_set_sdp_use_fa3"),
        holders=((vars(_ATTENTION), "_FLASH_ATTENTION_ACTIVE"),),
    ),
    _plain("torch.backends.mkldnn.enabled", "_get_mkldnn_enabled", "_set_mkldnn_enabled", **_ON_CPU),
    _plain("torch.backends.mkldnn.deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic", **_ON_CPU),
    _plain("torch.backends.nnpack.set_flags", "_get_nnpack_enabled", "_set_nnpack_enabled", **_ON_CPU),
    _plain("torch.backends.quantized.engine", "_get_qengine", "_set_qengine", **_ON_CPU),
    _plain(
        "float16 sums in float16",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
        **_ON_CPU,
    ),
    _plain(
        "torch.autograd.enforce_grad_layout_policy",
        "_is_grad_layout_enforcement_enabled",
        "_set_grad_layout_enforcement_enabled",
        **_TRACED,
    ),
    Switch(
        "torch.backends.mha.set_fastpath_enabled",
        _MHA.get_fastpath_enabled,
        _MHA.set_fastpath_enabled,
        holders=((vars(_MHA), "_is_fastpath_enabled"),),
        **_TRACED,
    ),
    _einsum("enabled"),
    _einsum("strategy"),
    Switch(
        "torch.backends.python_native",
        lambda: tuple(tuple(sorted(names)) for names in NATIVE_FILTERS) if any(NATIVE_FILTERS) else (),
        None,
        device="",
        is_there=bool(NATIVE_FILTERS),
    ),
)

SWITCHES = tuple(switch for switch in _ALL if switch.is_there)
"""Those of the PyTorch that runs."""

LEGACY = (
    _plain("torch.set_float32_matmul_precision", "_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    _plain("torch.backends.cuda.matmul.allow_tf32", "_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    _plain("torch.backends.cudnn.allow_tf32", "_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
)
"""Precision in PyTorch's older form. What it sets is seen in the newer one; to ask for it may raise, and takes long."""

ASKS_PRECISION = torch.get_float32_matmul_precision
"""What gives the precision of matrix products in the older form, which the newer one does not tell in each case."""


def precision_told_by(ask: Callable[[], str]) -> str | None:
    """Return what a getter of the older form gives; ``None`` where it raises, as the newer form is in use besides."""
    try:
        return ask()
    except RuntimeError:
        return None


class SwitchSettings:
    """The values of all switches; there is one object for equal ones.

    Attributes:
        values: In the order of ``SWITCHES``.
        text: Those that lowering and costs depend on, the same in every process.
    """

    def __init__(self, values: Sequence[Hashable]) -> None:
        self.values = tuple(values)
        self.text = self._text_of(SWITCHES)
        self._digests: dict[str, str] = {}

    def _text_of(self, switches: Container[Switch]) -> str:
        known = zip(SWITCHES, self.values, strict=True)
        return ", ".join(f"{each.name}={value}" for each, value in known if each.is_lowered and each in switches)

    def digest(self, device: str) -> str:
        """A short name for those that costs on a type of device depend on."""
        if device not in self._digests:
            text = self._text_of([switch for switch in SWITCHES if switch.device in ("", device)])
            self._digests[device] = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self._digests[device]

    def changed_since(self, before: SwitchSettings) -> list[Switch]:
        """The switches that were otherwise before."""
        found = zip(SWITCHES, self.values, before.values, strict=True)
        return [switch for switch, now, then in found if now != then]


_READERS = tuple(switch.read for switch in SWITCHES)
_settings: dict[tuple[Hashable, ...], SwitchSettings] = {}
_known: dict[Any, SwitchSettings] = {}  # by what ``_read`` gives
"""Few: one for each setting of a process's switches."""


def _read_plainly() -> tuple[Hashable, ...]:
    return tuple(map(operator.call, _READERS))


_read: Callable[[], Any] = _read_plainly


def accelerate(read: Callable[[], Any]) -> None:
    """Read by compiled code from now on.

    Args:
        read: Gives something hashable that is another one whenever a switch has changed; ``None`` where it cannot tell.
    """
    global _read  # noqa: PLW0603
    _read = read


def present() -> SwitchSettings:
    """The switches as they are; asked in every call."""
    found = _known.get(_read())
    return _learn() if found is None else found


def _learn() -> SwitchSettings:
    while True:  # another thread may change one meanwhile
        read = _read
        key = read()
        values = tuple(switch.in_effect(value) for switch, value in zip(SWITCHES, _read_plainly(), strict=True))
        found = _settings.setdefault(values, SwitchSettings(values)) if values not in _settings else _settings[values]
        if key is None:
            return found
        if read() == key:
            return _known.setdefault(key, found)


# --- switches that a step sets itself ---------------------------------------------------------------------------------

SETTERS: dict[str, Switch] = {
    name: switch for switch in (*SWITCHES, *LEGACY) for name in switch.setters if hasattr(_C, name)
}
"""Functions of ``torch._C`` by name, and one of the switches that each sets."""

IN_GRAPHS = frozenset(
    (
        *(getattr(_C, name) for name, switch in SETTERS.items() if switch.decides is not Decides.NOTHING),
        *(torch.set_default_dtype, torch.set_float32_matmul_precision),
        *(torch.use_deterministic_algorithms, torch.set_deterministic_debug_mode),
    )
)
"""Functions that Dynamo writes into graphs, though what is compiled of them sets nothing."""


def remember() -> list[tuple[Switch, Any]]:
    """The switches as they are, in an order in which they can be put back; ``None`` for what cannot be told."""
    kept: list[tuple[Switch, Any]] = []
    for switch in LEGACY:
        value = None
        with suppress(RuntimeError):  # a mix of the older and the newer form
            value = switch.read()
        kept.append((switch, value))
    return [*kept, *((switch, switch.read()) for switch in SWITCHES)]


def put_back(kept: Sequence[tuple[Switch, Any]]) -> None:
    """Set what differs from what was remembered to that."""
    for switch, before in kept:
        if switch.write is None or (switch in LEGACY and before is None):
            continue
        try:
            is_same = switch.read() == before
        except RuntimeError:  # as above
            is_same = False
        if not is_same:
            switch.write(before)
