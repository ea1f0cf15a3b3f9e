"""PyTorch's global switches: changed between calls, within a step, by another thread, and read by a step."""

import contextlib
import operator

import pytest
import torch
from torch import nn

import millstream as ms
from millstream._torch.modes import switches
from millstream._torch.modes.switches import SWITCHES, present
from millstream.api.compiling import dynamo_backend
from millstream.capture import model
from millstream.capture.step.capturing import captures, retracing
from millstream.capture.step.plain.patience import MAX_FIRST
from millstream.device.compiled_switches import install

cudnn, mkldnn, attention = torch.backends.cudnn, torch.backends.mkldnn, torch.nn.attention


@pytest.fixture(autouse=True)
def _as_before():
    before = switches.remember()
    yield
    switches.put_back(before)


def other_value(switch):
    """A value that ``switch`` has not now."""
    value, name = switch.read(), switch.name.rpartition(".")[2]
    if isinstance(value, tuple):
        return value[::-1] if "sdpa_kernel" in name else (not value[0], *value[1:])
    if isinstance(value, bool):
        return not value
    if isinstance(value, torch.dtype):
        return torch.float64
    if name == "fp32_precision":
        return "ieee" if value == "tf32" else "tf32"
    if name == "engine":
        return next(engine for engine in torch._C._supported_qengines() if engine != value)
    return {"depthwise_kernel": "native", "strategy": "greedy"}.get(name) or (value or 0) + 1


class Handle:
    """Of a way to compute attention."""

    def remove(self):
        pass


@contextlib.contextmanager
def changed(switch):
    """With another value of ``switch``."""
    before = switch.read()
    if switch.name.endswith("activate_flash_attention_impl"):
        attention.register_flash_attention_impl("of a test", register_fn=Handle)
        attention.activate_flash_attention_impl("of a test")
        yield
        attention.restore_flash_attention_impl()
    elif switch.name.endswith("python_native"):
        torch.backends.python_native.triton.disable()
        yield
        torch.backends.python_native.triton.enable()
    elif switch.write is None:
        pytest.skip("there is no other value without a device")
    else:
        try:
            switch.write(other_value(switch))
        except RuntimeError as error:  # float16 arithmetic
            pytest.skip(str(error))
        yield
        switch.write(before)


@pytest.fixture(scope="module")
def readers():
    """What reads all switches: in Python, and in compiled code."""
    before = switches._read
    assert install()
    yield switches._read_plainly, switches._read
    switches.accelerate(before)


@pytest.mark.parametrize("switch", SWITCHES, ids=operator.attrgetter("name"))
def test_another_value_is_seen(switch, readers, monkeypatch):
    for reader in readers:
        monkeypatch.setattr(switches, "_read", reader)
        before = present()
        with changed(switch):
            now = present()
            assert switch in now.changed_since(before)
            assert (now.text != before.text) == any(each.is_lowered for each in now.changed_since(before))
        assert present() is before


def read_switches(x):
    """A step whose results show which switches it has read."""
    read = cudnn.benchmark, mkldnn.enabled, cudnn.conv.fp32_precision, torch.backends.cuda.flash_sdp_enabled()
    return x + 1, *read, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.ones(()) / 3


CHANGES = {
    "determinism": lambda: torch.use_deterministic_algorithms(True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "a flag of cudnn": lambda: setattr(cudnn, "benchmark", True),
    "precision of convolutions": lambda: setattr(cudnn.conv, "fp32_precision", "ieee"),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "a library": lambda: setattr(mkldnn, "enabled", False),
    "type": lambda: torch.set_default_dtype(torch.float64),
}


def test_a_step_that_reads_them_is_captured_again_and_replayed_when_that_is_undone():
    step, x = ms.step(read_switches, strict=True, max_graphs=len(CHANGES) + 1), torch.ones(3)

    def check(num_graphs):
        for _ in range(2):
            result, expected = step(x), read_switches(x)
            assert result[1:-1] == expected[1:-1]
            torch.testing.assert_close([result[0], result[-1]], [expected[0], expected[-1]])
        assert len(step.graphs) == num_graphs

    check(1)
    for number, change in enumerate(CHANGES.values(), 2):
        before = switches.remember()
        change()
        check(number)
        switches.put_back(before)
        check(number)


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES, ids=operator.attrgetter("name"))
def test_a_step_is_captured_again(switch):
    step, x = ms.step(lambda x: x + 1, strict=True), torch.ones(3)
    for _ in range(2):
        step(x)
    with changed(switch):
        for _ in range(2):
            step(x)
        assert len(step.graphs) == 2
    step(x)
    assert [graph.num_runs for graph in step.graphs] == [2, 3]


# --- set within a step ------------------------------------------------------------------------------------------------


def with_elementwise_operators_without_cudnn(x):
    with cudnn.flags(enabled=False):
        return x.sin()


def with_products_on_a_cpu_without_cudnn(x):
    with cudnn.flags(enabled=False):
        return x @ x


def with_one_way_to_compute_attention(x):
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])


def with_threads_set_for_a_while(x):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    x = x @ x
    torch.set_num_threads(before)
    return x


CAPTURED = (
    with_elementwise_operators_without_cudnn,
    with_products_on_a_cpu_without_cudnn,
    with_one_way_to_compute_attention,
    with_threads_set_for_a_while,
)


@pytest.mark.parametrize("function", CAPTURED)
def test_what_no_operator_obeys_is_captured(function):
    step, x = ms.step(function, strict=True), torch.rand(4, 4)
    for _ in range(2):
        torch.testing.assert_close(step(x), function(x))
    assert len(step.graphs) == 1


def with_a_product_without_onednn(x):
    with mkldnn.flags(enabled=False):
        return x @ x


def with_a_product_in_another_precision(x):
    before, mkldnn.matmul.fp32_precision = mkldnn.matmul.fp32_precision, "tf32"
    x = x @ x
    mkldnn.matmul.fp32_precision = before
    return x


def with_another_type_of_new_tensors(x):
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(3)
    finally:
        torch.set_default_dtype(torch.float32)


def with_determinism_toggled(x):
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    return x + 1


REFUSED = {
    with_a_product_without_onednn: "mkldnn.enabled for some of its operators",
    with_a_product_in_another_precision: "mkldnn.matmul.fp32_precision for some of its operators",
    with_another_type_of_new_tensors: "torch.set_default_dtype for some of its operators",
    with_determinism_toggled: "torch.use_deterministic_algorithms is set while the step runs, again and again",
}


@pytest.mark.parametrize("function", REFUSED)
@pytest.mark.filterwarnings("ignore::millstream.FallbackWarning")
def test_what_operators_obey_runs_as_in_eager(function):
    step, x, settings = ms.step(function), torch.rand(4, 4), {True: [], False: []}
    for run, seen in ((step, settings[True]), (function, settings[False])):
        for _ in range(2 * MAX_FIRST + 4):
            result = run(x)
            seen.append((result.dtype, present()))
            torch.testing.assert_close(result, function(x))
            seen.append(present())
    assert settings[True] == settings[False]
    assert all(REFUSED[function] in reason for reason in step.fallbacks)
    assert step.fallbacks
    assert not step.graphs


def test_one_that_is_set_once_is_left_set_and_captured_with_that():
    @ms.step(strict=True)
    def step(x):
        before = x @ x
        torch.set_float32_matmul_precision("high")
        return before + 1

    x = torch.rand(4, 4)
    for _ in range(3):
        torch.testing.assert_close(step(x), x @ x + 1)
        assert torch.get_float32_matmul_precision() == "high"
    assert len(step.graphs) == 1
    torch.set_float32_matmul_precision("highest")
    for _ in range(2):
        step(x)
        assert torch.get_float32_matmul_precision() == "high"
    assert len(step.graphs) == 1


def test_the_precision_that_a_step_asks_for_is_that_of_the_call():
    function, x = lambda x: x * len(torch.get_float32_matmul_precision()), torch.ones(3)
    step = ms.step(function, strict=True, engine="serial")
    for precision in ("highest", "medium", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        for _ in range(2):
            assert torch.equal(step(x), function(x))
    assert len(step.graphs) == 3
    torch.backends.cuda.matmul.allow_tf32 = True  # which leaves all switches of the newer form as they were
    for call in (step, function):
        with pytest.raises((RuntimeError, ms.CaptureError), match="mix of the legacy and new APIs"):
            call(x)


# --- set by another thread meanwhile ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "stage"), [(retracing, "trace_step"), (captures, "build_and_run")])
def test_one_that_another_thread_sets_while_it_is_captured_leaves_no_graph(module, stage, monkeypatch):
    original, seen = getattr(module, stage), []

    def while_another_sets_it(*args, **kwargs):
        if not seen:
            cudnn.benchmark = True
        seen.append(present())
        return original(*args, **kwargs)

    monkeypatch.setattr(module, stage, while_another_sets_it)
    step, x = ms.step(lambda x: x + (2 if cudnn.benchmark else 1), strict=True), torch.ones(3)
    step(x)
    assert not step.graphs
    for _ in range(2):
        assert torch.equal(step(x), x + 2)
    assert len(step.graphs) == 1
    cudnn.benchmark = False
    assert torch.equal(step(x), x + 1)


# --- compiled models --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["compile", "backend"])
def compiler(request):
    torch._dynamo.reset()
    if request.param == "compile":
        return ms.compile
    return lambda function: torch.compile(function, backend=dynamo_backend)


def test_a_model_is_compiled_again_and_the_first_is_run_when_it_is_undone(compiler, monkeypatch):
    compiled, original = [], model.compile_graph
    monkeypatch.setattr(model, "compile_graph", lambda *args, **kwargs: compiled.append(0) or original(*args, **kwargs))
    run, x = compiler(lambda x: x * (2 if cudnn.benchmark else 1)), torch.ones(3)
    for value, number in ((False, 1), (True, 2), (False, 2), (True, 2)):
        cudnn.benchmark = value
        for _ in range(2):
            assert torch.equal(run(x), x * (1 + value))
        assert len(compiled) == number


@pytest.mark.filterwarnings("ignore::millstream.FallbackWarning")
def test_a_model_sets_what_it_sets_in_every_call(compiler):
    def function(x):
        torch._C._set_cudnn_enabled(not cudnn.benchmark)
        torch.set_float32_matmul_precision("high")
        return x @ x

    run, x = compiler(function), torch.rand(4, 4)
    before = switches.remember()
    for _ in range(3):
        switches.put_back(before)
        torch.testing.assert_close(run(x), x @ x)
        assert cudnn.enabled
        assert torch.get_float32_matmul_precision() == "high"


# --- precision in the newer form --------------------------------------------------------------------------------------

NEWER_FORMS = (
    (torch.backends, "tf32"),
    (torch.backends.cuda.matmul, "tf32"),
    (cudnn, "tf32"),
    (cudnn.conv, "ieee"),
    (mkldnn, "bf16"),
    (mkldnn.matmul, "bf16"),
)


def test_each_form_is_captured_and_compiled():
    linear, x = nn.Linear(3, 2), torch.rand(4, 3)
    step, model = ms.step(lambda x: linear(x).detach(), strict=True, max_graphs=8), ms.compile(linear, strict=True)
    before = switches.remember()
    for number, (owner, precision) in enumerate(NEWER_FORMS, 1):
        owner.fp32_precision = precision
        for run in (step, model):
            torch.testing.assert_close(run(x), linear(x), rtol=0.02, atol=0.02)
        assert len(step.graphs) == number
        switches.put_back(before)
