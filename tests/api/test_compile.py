"""``ms.compile``: the numbers of eager, for inference and training, whatever the calls are mixed with."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config

import millstream as ms
from millstream._torch.workarounds import torch_version
from millstream.api import executables
from millstream.engine.assembly import why_not_capture
from millstream.engine.plan_source import compile_plan
from millstream.graph import KernelKind, Timeline
from millstream.lower import compile as lowering
from millstream.lower import lower_graph
from millstream.lower.inductor.fx_wrapper import collect_wrappers
from millstream.report import Account
from tests import networks


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [networks.Mlp, networks.ResNet, networks.Lstm])
def test_training_gives_the_numbers_of_eager(kind):
    ours, theirs = kind(), kind()
    theirs.load_state_dict(ours.state_dict())
    compiled = ms.compile(ours, strict=True)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in (ours, theirs)]
    for _ in range(4):
        x, y = networks.example(kind)
        for model, optimizer in zip((compiled, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    networks.assert_close(list(ours.state_dict().values()), list(theirs.state_dict().values()))


def test_several_forwards_may_wait_for_their_backwards():
    model = networks.ResNet()
    other = copy.deepcopy(model)
    compiled = ms.compile(model, strict=True)
    batches = [networks.example(networks.ResNet) for _ in range(3)]
    for forward in (compiled, other):
        losses = [F.cross_entropy(forward(x), y) for x, y in batches]
        with torch.no_grad():
            forward(batches[0][0])
        for i in (2, 0, 1):
            losses[i].backward()
    networks.assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_results_are_the_callers_own():
    model = networks.Mlp().eval()
    compiled = ms.compile(model)
    with torch.no_grad():
        x, _ = networks.example(networks.Mlp)
        first = compiled(x)
        kept = first.clone()
        compiled(x + 1)
        assert torch.equal(first, kept)


def test_two_runs_are_bit_identical():
    model = networks.Inception().eval()
    compiled = ms.compile(model)
    x, _ = networks.example(networks.Inception)
    with torch.no_grad():
        assert torch.equal(compiled(x), compiled(x))


def test_dropout_follows_the_seed():
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.5)).train()
    compiled = ms.compile(model, strict=True)
    x, _ = networks.example(networks.Mlp)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(first, second)


def test_nested_inputs_and_outputs():
    def function(batch, scale=1.0):
        left, (right, names) = batch["left"], batch["rest"]
        return {"sum": left + right * scale, "parts": [left.t(), (right, names, None)]}

    compiled = ms.compile(function, strict=True)
    batch = {"left": torch.randn(3, 4), "rest": (torch.randn(3, 4), "names")}
    networks.assert_close(compiled(batch, scale=2.0), function(batch, scale=2.0))


def test_inputs_mutated_in_place():
    def function(x, counter):
        counter.add_(1)
        x[1:].mul_(2)
        return x.sum() + counter

    compiled = ms.compile(function, strict=True)
    for _ in range(3):
        x, counter = torch.randn(4, 4), torch.zeros(())
        x2, counter2 = x.clone(), counter.clone()
        networks.assert_close(compiled(x, counter), function(x2, counter2))
        networks.assert_close((x, counter), (x2, counter2))


def test_every_shape_gets_its_graph_and_the_oldest_gives_memory_back():
    model = networks.Mlp().eval()
    compiled = ms.compile(model, max_graphs=2, dynamic=False)
    with torch.no_grad():
        for batch in (1, 2, 3, 1, 3):
            x, _ = networks.example(networks.Mlp, batch=batch)
            networks.assert_close(compiled(x), model(x))
    assert len(executables(compiled)) == 3


@pytest.mark.usefixtures("lowered_once")
@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("kind", [networks.Mlp, networks.ResNet])
def test_batches_without_rows(kind, engine):
    model = kind()
    twin = copy.deepcopy(model)
    compiled = ms.compile(model, engine=engine, strict=True)
    for rows in (0, 0, 3):
        x, _ = networks.example(kind)
        result, wanted = compiled(x[:rows]), twin(x[:rows])
        assert result.shape == wanted.shape
        assert result.stride() == wanted.stride()
        result.sum().backward()
        wanted.sum().backward()
    networks.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()], 1e-4)


def test_what_has_no_rows_is_the_callers_own():
    compiled = ms.compile(nn.ReLU(), strict=True)
    first, second = (compiled(torch.empty(0, 5)) for _ in range(2))
    assert first is not second
    assert first.shape == (0, 5)


def fill_borders(x):
    made = torch.empty(4, 10, 10)
    made[:, 1:-1, 1:-1] = x
    made[:, 0], made[:, -1], made[:, :, 0], made[:, :, -1] = 0, 1, 2, 3
    return made @ made


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize(
    ("function", "shape"),
    [(fill_borders, (4, 8, 8)), (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 9, 7))],
)
def test_memory_that_is_read_before_all_of_it_is_written(function, shape, engine):
    compiled = ms.compile(function, engine=engine, strict=True)
    for _ in range(3):
        x = torch.randn(shape)
        networks.assert_close(compiled(x), function(x))


def test_a_view_that_is_copied_as_complex_numbers():
    def transform(x):
        return torch.fft.fftn((x @ x.t() @ x).view(2, 16, 64), dim=(1, 2)).real

    x = torch.rand(32, 64)
    torch.testing.assert_close(ms.compile(transform, strict=True)(x), transform(x))


def test_memory_that_nobody_writes():
    compiled = ms.compile(lambda x: (torch.empty(3), x * 2), strict=True)
    (first, twice), (second, _) = compiled(torch.ones(2)), compiled(torch.ones(2))
    assert first.shape == second.shape == (3,)
    assert first.data_ptr() != second.data_ptr()
    assert twice.tolist() == [2, 2]


def test_graphs_without_kernels():
    x = torch.randn(3, 2)
    assert ms.compile(nn.Identity(), strict=True)(x).data_ptr() == x.data_ptr()
    assert ms.compile(lambda x: x.t(), strict=True)(x).shape == (2, 3)
    assert ms.compile(lambda x: torch.empty(2).shape, strict=True)(x) == (2,)


def test_other_strides_and_offsets():
    def function(x):
        return (x * 2).sum(0), x[1:] + 1

    compiled = ms.compile(function, strict=True)
    for x in (torch.randn(6, 8), torch.randn(8, 6).t(), torch.randn(1, 8).expand(6, 8), torch.randn(7, 9)[1:, 1:]):
        networks.assert_close(compiled(x), function(x))


def test_switching_between_training_and_evaluation():
    model = networks.ResNet()
    compiled = ms.compile(model)
    assert compiled.eval() is compiled
    x, _ = networks.example(networks.ResNet)
    with torch.no_grad():
        networks.assert_close(compiled(x), model(x))
        compiled.train()
        assert model.training
        compiled(x)
        compiled.eval()
        networks.assert_close(compiled(x), model(x))


def test_a_compiled_module_stays_a_module_in_use():
    model = networks.Mlp()
    compiled = ms.compile(model)
    assert isinstance(compiled, networks.Mlp)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    compiled.note = 3
    assert model.note == 3
    nested = torch.nn.Sequential(compiled, torch.nn.ReLU())
    assert sum(p.numel() for p in nested.parameters()) == sum(p.numel() for p in model.parameters())


def test_replaced_parameters_are_seen():
    model = networks.Mlp().eval()
    compiled = ms.compile(model)
    x, _ = networks.example(networks.Mlp)
    with torch.no_grad():
        compiled(x)
        model.load_state_dict(networks.Mlp().state_dict(), assign=True)
        networks.assert_close(compiled(x), model(x))


def test_frozen_parameters_become_constants():
    model = networks.ResNet().eval()
    with torch.no_grad():
        x, _ = networks.example(networks.ResNet)
        compiled = ms.compile(model, freeze=True)
        networks.assert_close(compiled(x), model(x))
        (executable,) = executables(compiled)
    assert executable.lowered.program.constants
    assert len(executable.lowered.program.inputs) == 1


def test_freezing_where_gradients_may_be_asked_for_is_told_to_do_nothing():
    model, x = networks.Mlp().eval(), networks.example(networks.Mlp)[0]
    compiled = ms.compile(model, freeze=True)
    with pytest.warns(ms.FallbackWarning, match=r"torch\.no_grad\(\) only"):
        networks.assert_close(compiled(x), model(x))
    assert "torch.no_grad() only" in str(ms.explain(compiled))
    torch._dynamo.reset()
    with pytest.raises(ms.CaptureError, match="freeze=True"):
        ms.compile(model, freeze=True, strict=True)(x)


def _frozen_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()


def _step(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], 0.1).step()


def _doubled():
    return {name: value * 2 for name, value in _frozen_model().state_dict().items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(_doubled()),
        lambda model: model.load_state_dict(_doubled(), assign=True),
        lambda model: model[0].weight.mul_(3),
        lambda model: setattr(model[2], "bias", nn.Parameter(torch.ones(2))),
        lambda model: model[1].running_mean.add_(1),
        lambda model: model.__setitem__(0, nn.Linear(4, 8)),
        lambda model: torch.optim.SGD([model[0].weight], 0.1).step(
            lambda: setattr(model[0].weight, "grad", torch.ones(8, 4))
        ),
    ],
    ids=["load", "assign", "in place", "replace", "buffer", "module", "optimizer"],
)
def test_changed_parameters_of_a_frozen_model_are_folded_in_again(change):
    model, x = _frozen_model(), torch.randn(3, 4)
    compiled = ms.compile(model, freeze=True, engine="serial")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        change(model)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
    assert not compiled._millstream.compiler.fallbacks


def test_parameters_that_change_again_and_again_are_not_folded_in_any_more(monkeypatch):
    monkeypatch.setattr("millstream.capture.model.MAX_FOLDED_ANEW", 1)
    model, x = _frozen_model(), torch.randn(3, 4)
    compiled = ms.compile(model, freeze=True, engine="serial")
    with torch.no_grad(), pytest.warns(ms.FallbackWarning, match="leave out freeze=True") as caught:
        for _ in range(5):
            torch.testing.assert_close(compiled(x), model(x))
            model[0].weight.mul_(1.1)
    assert len(caught) == 1
    assert len(compiled._millstream.compiler.graphs) == 1


@pytest.mark.parametrize("freeze", [False, True])
def test_products_are_known_as_such_whatever_library_computes_them(freeze):
    compiled = ms.compile(nn.Linear(32, 16).eval(), freeze=freeze)
    with torch.no_grad():
        compiled(torch.randn(8, 32))
    (executable,) = executables(compiled)
    kinds = [(kernel.kind, kernel.flops) for kernel in executable.plan.graph.kernels if kernel.flops]
    assert (KernelKind.GEMM, 2 * 8 * 32 * 16) in kinds


class Casting(nn.Module):
    """Multiplies by a parameter in another type."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.weight.double()


@pytest.mark.parametrize("freeze", [False, True])
def test_what_prepares_parameters_is_found_and_freezing_spares_it(freeze):
    model, x = Casting(), torch.randn(4, 8, dtype=torch.float64)
    compiled = ms.compile(model.eval(), freeze=freeze)
    with torch.no_grad():
        networks.assert_close(compiled(x), model(x))
    (executable,) = executables(compiled)
    assert len(Account(executable.plan.graph, Timeline((), 1, 0)).preparing) == (0 if freeze else 1)


@pytest.mark.parametrize("wrap", [ms.compile, torch.compile])
def test_freezing_is_that_of_one_model(wrap):
    model, head = nn.Linear(4, 4), nn.Linear(4, 4)
    inner = wrap(model)
    x = torch.randn(5, 4)

    @torch._dynamo.disable
    def call(x):
        return inner(x)

    def forward(x):
        return head(call(x))

    outer = ms.compile(forward, freeze=True)
    with torch.no_grad(), pytest.warns(ms.FallbackWarning, match="the graph is cut"):
        outer(x)
    assert not inductor_config.freezing
    with torch.no_grad():
        model.weight.zero_()  # of the one that nobody froze
        networks.assert_close(inner(x), model(x))
        wanted = outer(x)
        head.weight.data.zero_()  # which is not seen: the old one was folded in
        networks.assert_close(outer(x), wanted)


def test_freezing_is_asked_for_while_a_graph_is_compiled_only():
    model, seen = nn.Linear(4, 4), []
    model.register_forward_hook(lambda *_: seen.append(inductor_config.freezing))
    compiled = ms.compile(nn.Sequential(model), freeze=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ms.FallbackWarning)
        for _ in range(2):
            compiled(torch.randn(2, 4))
    assert seen
    assert not any(seen)


def files_of(caught):
    """Which lines are to blame for what was told: the user's, and not those of PyTorch that called ours."""
    return {each.filename for each in caught if issubclass(each.category, ms.FallbackWarning)}


def test_what_dynamo_cannot_capture_runs_between_the_graphs_with_a_warning():
    def function(x):
        y = x * 2
        if y.sum().item() > 0:
            return y + 1
        return y - 1

    compiled = ms.compile(function)
    with pytest.warns(ms.FallbackWarning, match=r"test_compile.py:\d+") as caught:
        networks.assert_close(compiled(torch.ones(3)), function(torch.ones(3)))
    assert files_of(caught) == {__file__}
    networks.assert_close(compiled(-torch.ones(3)), function(-torch.ones(3)))
    with pytest.raises(ms.CaptureError, match="Dynamo cannot trace all of it") as raised:
        ms.compile(function, strict=True)(torch.ones(3))
    assert raised.value.where == f"{__file__}:{function.__code__.co_firstlineno + 2} in function"


def stop_early(x):
    for _ in range(3):
        try:
            if x.sum() > 1e9:
                break
            x = x * 2
        finally:
            x = x + 1
    return x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (stop_early, "ata-dependent branching"),
        (torch.unique, "Dynamic shape"),
    ],
    ids=["branches", "unique"],
)
def test_where_nothing_is_captured_the_user_is_told_once(function, reason):
    compiled = ms.compile(function)
    x = torch.randn(5, 4)
    with pytest.warns(ms.FallbackWarning, match=f"nothing of it is captured .*{reason}") as caught:
        for _ in range(2):
            result, wanted = compiled(x), function(x)
    assert len([each for each in caught if issubclass(each.category, ms.FallbackWarning)]) == 1
    assert files_of(caught) == {__file__}
    networks.assert_close(*(each if isinstance(each, torch.Tensor) else each[0] for each in (result, wanted)))


@torch.no_grad()
@pytest.mark.skipif(torch_version() < (2, 13), reason="PyTorch refuses it")
def test_a_body_writes_what_the_model_has_made():
    def choose(x):
        y = x * 1
        return torch.cond(x.sum() > 0, lambda x: x.mul_(2) + 1, lambda x: x - 1, (y,)) + y

    x = torch.rand(3)
    compiled = ms.compile(choose, strict=True)
    for each in (x, -x):
        assert torch.equal(compiled(each), choose(each))


def test_what_torch_compile_cannot_compile_either_runs_as_python(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such kernel")

    for module in (lower_graph, lowering):
        monkeypatch.setattr(module, "compile_fx_inner", fail)
    model = networks.Mlp()
    twin = copy.deepcopy(model)
    x, _ = networks.example(networks.Mlp)
    with (
        pytest.warns(ms.FallbackWarning, match="on plain torch.compile.*no such kernel"),
        pytest.warns(ms.FallbackWarning, match="as plain Python.*no such kernel") as caught,
    ):
        ms.compile(model)(x).sum().backward()
    assert files_of(caught) == {__file__}
    twin(x).sum().backward()
    networks.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.skipif("millstream" not in torch._dynamo.list_backends(), reason="runs from source, without entry points")
def test_backend_of_torch_compile_is_explained():
    torch._dynamo.reset()  # from here on these share a graph, as PyTorch has it once for modules of one class
    model, in_place = networks.Mlp().eval(), networks.Mlp().eval()
    in_place.load_state_dict(model.state_dict())
    x, _ = networks.example(networks.Mlp)
    expected = model(x).detach()
    in_place.compile(backend="millstream")
    returned = torch.compile(model, backend="millstream")
    for compiled in (returned, in_place, torch.compile(model.forward, backend="millstream")):
        with torch.no_grad():
            networks.assert_close(compiled(x), expected)
        assert "Mlp.inference: " in str(ms.explain(compiled))
    for other in (torch.compile(model.forward), networks.Mlp(), torch.compile(networks.Mlp(), backend="eager")):
        with pytest.raises(ms.ArgumentError, match=r"torch\.compile with our backend"):
            ms.explain(other)


@pytest.mark.parametrize(
    "arguments",
    [
        {"engine": "fast"},
        {"max_graphs": 0},
        {"max_graphs": True},
        {"strict": "yes"},
        {"freeze": 1},
        {"copy_outputs": None},
    ],
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ms.ArgumentError, match=str(next(iter(arguments.values())))):
        ms.compile(networks.Mlp(), **arguments)


def test_no_option_lets_kernels_start_early():
    with collect_wrappers({"triton.enable_pdl": True}):
        assert not torch._inductor.config.triton.enable_pdl


def test_explain_shows_kernels_sources_and_memory():
    model = networks.ResNet().eval()
    compiled = ms.compile(model)
    assert "nothing is compiled; call it once" in str(ms.explain(compiled))
    with torch.no_grad():
        compiled(networks.example(networks.ResNet)[0])
    explanation = ms.explain(compiled)
    text, data = str(explanation), explanation.to_dict()
    assert "networks.py" in text
    (program,) = data["programs"]
    assert program["by_kind"]["conv"]["kernels"] == 5
    assert program["by_kind"]["conv"]["flops"] > 0
    assert 0 < program["memory_bytes"]["peak"] <= program["memory_bytes"]["without_reuse"]
    assert data["fallbacks"] == []
    with pytest.raises(ms.ArgumentError):
        ms.explain(model)


def test_memory_that_graphs_could_not_give_back_is_not_captured(monkeypatch):
    for backend, obstacle in (("native", ""), ("cudaMallocAsync", "cannot take back")):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        assert obstacle in why_not_capture()
        assert bool(why_not_capture()) == bool(obstacle)


def test_explanations_name_inputs_and_modules_as_the_user_does():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
    compiled = ms.compile(model, strict=True)
    with torch.no_grad():
        for size in (3, 5):
            compiled(torch.randn(size, 8))
    programs = ms.explain(compiled).to_dict()["programs"]
    assert [program["inputs"] for program in programs] == [["float32 [3, 8]"], ["float32 [5, 8]"]]
    sources = {kernel["source"] for kernel in programs[0]["kernels"]}
    assert sources == {"module 0 (Linear)", "module 1.0 (ReLU)", "module 1.1 (Linear)"}
    text = ms.explain(compiled).text()
    assert "for float32 [3, 8]\n" in text
    assert "for float32 [5, 8]\n" in text


def test_more_forms_than_dynamo_takes_are_told_of_once(monkeypatch):
    def double(x):
        return x * 2

    monkeypatch.setattr("millstream.capture.model.RECOMPILE_LIMIT", 3)
    with torch._dynamo.config.patch(recompile_limit=3), torch.no_grad():
        compiled = ms.compile(double, dynamic=False)
        for size in range(1, 4):
            compiled(torch.ones(size))
        with pytest.warns(ms.FallbackWarning, match="new forms of inputs run as plain Python") as caught:
            for size in (4, 5, 1, 6):
                assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 2.0))
        assert len(caught) == 1
        assert files_of(caught) == {__file__}
        assert "new forms" in ms.explain(compiled).text()


def test_calls_without_anything_to_compute_are_no_fallback():
    def double(x):
        return None if x is None else x * 2

    compiled = ms.compile(double)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ms.FallbackWarning)
        compiled(torch.ones(3))
        for _ in range(2):
            assert compiled(None) is None


def test_what_a_plan_is_compiled_to_dies_with_its_last_user():
    """With it goes its arena: not only when garbage is collected."""
    compiled = ms.compile(networks.Mlp(), engine="serial", strict=True)
    with torch.no_grad():
        compiled(networks.example(networks.Mlp)[0])
    (executable,) = executables(compiled)
    arena = torch.empty(100)
    run = compile_plan(executable.lowered.program, executable.plan, {"arena": arena})
    dead = weakref.ref(run)
    gc.disable()
    try:
        del run
        assert dead() is None
    finally:
        gc.enable()
