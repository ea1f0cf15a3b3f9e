"""Kernels that start early: they wait first, and nothing else starts early."""

import importlib.util
import re

import pytest
from torch._inductor import config
from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling
from torch._inductor.codegen.triton import TritonScheduling

from millstream.errors import ArgumentError
from millstream.lower.dependent_launch import TRIGGER, VARIABLE, WAIT, launch_dependently, with_dependent_launch
from millstream.lower.fx_wrapper import collect_wrappers

SOURCE = """
import triton
import triton.language as tl

@triton.jit
def _triton_helper_fn_add0(arg0_0, arg1_0):
    tmp0 = arg0_0 + arg1_0
    return tmp0

@triton_heuristics.reduction(
    size_hints={'x': 4096, 'r0_': 64},
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9), 'constants': {}, 'launch_pdl': False, 'disable_ftz': False},
    inductor_meta={'grid_type': 'Grid1D', 'kernel_name': 'triton_red_fused_0'}
)
@triton.jit
def triton_red_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + (xindex), xmask)
    tmp1 = tl.load(in_ptr0 + (0))
    tl.store(out_ptr0 + (xindex), tmp0 + tmp1, xmask)
"""  # noqa: E501  as Inductor writes it


def body(source):
    """The lines of the kernel itself."""
    return [line.strip() for line in source.partition("def triton_red_fused_0")[2].splitlines()[1:]]


@pytest.mark.parametrize("heuristic", ["pointwise", "reduction", "persistent_reduction", "split_scan", "foreach"])
def test_a_fused_kernel_waits_in_its_first_line_and_is_launched_early(heuristic):
    source = SOURCE.replace("heuristics.reduction", f"heuristics.{heuristic}")
    early = launch_dependently(source, trigger=False)
    assert body(early) == [WAIT, *body(source)]
    assert "triton_meta={'launch_pdl': True, 'signature'" in early
    assert (early.count("launch_pdl"), early.count(WAIT), early.count(TRIGGER)) == (1, 1, 0)


def test_a_trigger_stands_right_behind_the_wait():
    assert body(launch_dependently(SOURCE, trigger=True)) == [WAIT, TRIGGER, *body(SOURCE)]


def test_a_kernel_whose_metadata_do_not_mention_the_launch_gets_it_too():
    source = SOURCE.replace("'launch_pdl': False, ", "")  # as PyTorch 2.11 writes combined kernels
    assert launch_dependently(source, trigger=False) == launch_dependently(SOURCE, trigger=False)


@pytest.mark.parametrize(
    "change",
    [
        ("heuristics.reduction", "heuristics.template"),
        ("heuristics.reduction", "heuristics.user_autotune"),
        ("heuristics.reduction", "heuristics.cooperative_reduction"),
        ("'disable_ftz': False", "'launch_cooperative_grid': True"),
        ("type='cuda'", "type='hip'"),
        ("cc=90", "cc=89"),
        ("@triton_heuristics.reduction", "@somebody.reduction"),
    ],
)
def test_every_other_kernel_stays_as_it_is(change):
    source = SOURCE.replace(*change)
    assert source != SOURCE
    assert launch_dependently(source, trigger=True) == source


def test_the_newest_devices_count_as_well():
    assert WAIT in launch_dependently(SOURCE.replace("cc=90", "cc=120"), trigger=False)


def test_the_setting_is_read_when_lowering_starts(monkeypatch):
    defined = []
    monkeypatch.setattr(TritonScheduling, "define_kernel", lambda self, source, nodes, kernel: defined.append(source))
    for setting, expected in (
        (None, SOURCE),
        ("0", SOURCE),
        ("1", launch_dependently(SOURCE, trigger=False)),
        ("2", launch_dependently(SOURCE, trigger=True)),
    ):
        monkeypatch.delenv(VARIABLE, raising=False) if setting is None else monkeypatch.setenv(VARIABLE, setting)
        backend = with_dependent_launch(CUDACombinedScheduling)(None)
        backend._triton_scheduling.define_kernel(SOURCE, [], None)
        assert defined.pop() == expected


def test_an_unknown_setting_is_an_error(monkeypatch):
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ArgumentError, match="'yes' is no setting"):
        with_dependent_launch(CUDACombinedScheduling)


def test_inductors_own_placement_of_waits_stays_off():
    with collect_wrappers({"triton.enable_pdl": True}):
        assert not config.triton.enable_pdl


@pytest.mark.parametrize("trigger", [False, True])
def test_the_compiled_kernel_waits_before_it_touches_memory(trigger, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    early = launch_dependently(SOURCE, trigger=trigger)
    path = tmp_path / "early_kernel.py"
    path.write_text("import triton\nimport triton.language as tl\n@triton.jit\n" + early.rpartition("@triton.jit\n")[2])
    spec = importlib.util.spec_from_file_location("early_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"}
    compiled = triton.compile(
        ASTSource(module.triton_red_fused_0, signature, {"XBLOCK": 256}),
        target=GPUTarget("cuda", 90, 32),
        options={"launch_pdl": True},
    )
    operations = re.findall(r"griddepcontrol\.\w+|(?:ld|st|atom|red)\.global", compiled.asm["ptx"])
    expected = ["griddepcontrol.wait", *["griddepcontrol.launch_dependents"] * trigger]
    assert operations[: len(expected) + 1] == [*expected, "ld.global"]
    assert not any(operation.startswith("griddepcontrol") for operation in operations[len(expected) :])
    assert compiled.metadata.launch_pdl
