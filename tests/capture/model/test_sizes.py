"""Sizes that change: compiled once for all, equal to eager, on every engine; what is kept ready is bounded."""

import threading
import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as property_settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

import millstream as ms
from millstream.api.compiling import dynamo_backend
from millstream.api.explaining import executables
from millstream.engine import by_size
from millstream.lower import LoweredForSizes


def by_backend(model, **arguments):
    return torch.compile(model, backend=dynamo_backend, **arguments)


@pytest.fixture(autouse=True)
def _counted():
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ms.FallbackWarning)
        yield
    torch._dynamo.reset()


def num_graphs():
    return counters["stats"]["unique_graphs"]


@pytest.fixture(params=[ms.compile, by_backend], ids=["compile", "backend"])
def form(request):
    return request.param


class Text(nn.Module):
    """Embedding, attention over all positions, layer norm and GELU."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + torch.softmax(hidden @ hidden.transpose(1, 2) / 8**0.5, -1) @ hidden
        return self.out(F.gelu(self.linear(self.norm(hidden))))


def gradients(call, model, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(call(x).square().mean(), [x, *model.parameters()])


def test_any_length_is_one_graph_after_the_second(form):
    model = Text()
    compiled = form(model)
    for length in (7, 16, 33, 100, 7, 2, 16, 64):
        tokens = torch.randint(20, (3, length))
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert num_graphs() == 2


def test_sizes_zero_and_one_are_graphs_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
    compiled = ms.compile(model)
    for rows in (5, 3, 1, 0, 8, 1, 0):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), model(x))
    assert num_graphs() == 4


@torch.no_grad()
def test_size_past_memory_is_an_error_and_the_others_go_on(form):
    compiled = form(lambda x: torch.outer(x, x).cumsum(0))
    for number in (4, 3_000_000, 5, 3_000_000, 7):
        x = torch.ones(number)
        if number > 7:
            with pytest.raises(RuntimeError, match="allocate memory"):
                compiled(x)
        else:
            torch.testing.assert_close(compiled(x), torch.outer(x, x).cumsum(0))
    assert num_graphs() <= 3


def test_sizes_of_another_model_of_the_class_change_nothing():
    for width in (3, 5):
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh())
        compiled = ms.compile(model)
        compiled(torch.ones(width, 4))
    compiled(torch.ones(2, 4))
    assert num_graphs() == 3  # the second model's first one was for its first size alone


def test_short_last_batch_trains(form):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = form(model)
    for rows in (8, 8, 3, 8, 8, 5, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(gradients(compiled, model, x), gradients(model, model, x))
    assert num_graphs() == 2


def test_backward_pass_is_given_two_sizes_that_are_one():
    embed, places = nn.Embedding(20, 8), nn.Embedding(16, 8)
    mixed = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24))

    def loss_of(tokens, mask, labels):
        hidden = embed(tokens) + places(torch.arange(tokens.shape[1]))
        query, key, value = (part[:, None] for part in mixed(hidden).chunk(3, -1))
        hidden = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None].bool())[:, 0]
        return F.cross_entropy((hidden @ embed.weight.T).flatten(0, 1), labels.flatten(), ignore_index=-100)

    compiled = ms.compile(loss_of)
    for length in (5, 7, 9):
        tokens, mask = torch.randint(20, (3, length)), torch.ones(3, length)
        mask[1, 2:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        ours, theirs = (torch.autograd.grad(call(tokens, mask, labels), embed.weight) for call in (compiled, loss_of))
        torch.testing.assert_close(ours, theirs)
    assert num_graphs() == 2


@torch.no_grad()
def test_growing_cache_is_one_graph():
    step = nn.Linear(8, 24)

    def attend(x, keys, values):
        query, key, value = step(x).chunk(3, -1)
        keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        return F.scaled_dot_product_attention(query, keys, values), keys, values

    compiled = ms.compile(attend)
    own = keys, values = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    for _ in range(12):
        x = torch.randn(2, 1, 8)
        result, keys, values = attend(x, keys, values)
        mine, *own = compiled(x, *own)
        torch.testing.assert_close((mine, *own), (result, keys, values))
    assert num_graphs() == 2


def test_images_of_several_sizes_and_batches():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).eval()
    compiled = ms.compile(model)
    with torch.no_grad():
        for size, rows in product((16, 12, 20), (2, 3, 4, 5, 6)):
            image = torch.randn(rows, 3, size, size)
            torch.testing.assert_close(compiled(image), model(image))
    assert num_graphs() == 3  # the first; any batch; any size and batch


def test_independent_sizes_share_no_symbol_because_they_were_equal():
    def pair(a, b):
        return a @ b.T, torch.cat([a, b]).softmax(0), a.sum() + b.mean(0)

    compiled = ms.compile(pair)
    for rows, others in ((4, 4), (5, 5), (5, 7), (9, 3), (2, 2)):
        a, b = torch.randn(rows, 8), torch.randn(others, 8)
        torch.testing.assert_close(compiled(a, b), pair(a, b))
    assert num_graphs() <= 3


@torch.no_grad()
def test_an_argument_that_is_no_whole_number():
    bias, weight = torch.randn(5), torch.randn(4, 5)

    def scaled(x):
        return torch.addmm(bias, x, weight, alpha=x.shape[0] / 3)

    compiled = ms.compile(scaled)
    for rows in (3, 5, 8, 13):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), scaled(x))
    assert num_graphs() == 2


def test_numbers_computed_from_sizes():
    def odd(x, shift):
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 1, 2)).roll(1, 0).reshape(-1)[: rows * 4 + shift]
        parts = x.new_ones(rows * 2 - shift), rows * x, x.unfold(0, 2, 2), torch.arange(rows // 2) * shift
        return padded, *parts, F.pad(x, (0, 0, rows // 2, 1), value=2.0), F.interpolate(x[None], scale_factor=1.7)

    compiled = ms.compile(odd)
    for rows, shift in ((4, 2), (6, 2), (6, 3), (7, 4), (9, 5), (8, 2)):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x, shift), odd(x, shift))
    assert num_graphs() <= 3


def mix(a, b, c):
    return torch.cat([a @ b.T, c]), (a * 2).sum(1, keepdim=True), b[::2] @ a.T, c.softmax(0) + 1, a.new_zeros(len(b))


@property_settings(max_examples=4)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=2, max_size=4))
def test_any_sequence_of_sizes_equals_eager(sizes):
    for first, second, third in sizes:
        a, b, c = torch.randn(first, 3), torch.randn(second, 3), torch.randn(third, second)
        torch.testing.assert_close(compiled_mix(a, b, c), mix(a, b, c))


compiled_mix = ms.compile(mix)


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "automatic_dynamic_exclusion_guard"), reason="since torch 2.13")
def test_the_size_compiled_first_keeps_its_graph_after_a_short_batch(monkeypatch):
    symbolic = []
    call = by_size.BySize.__call__
    monkeypatch.setattr(by_size.BySize, "__call__", lambda self, inputs: symbolic.append(1) or call(self, inputs))
    compiled = ms.compile(nn.Linear(4, 4))
    with torch.no_grad():
        for rows in (8, 8, 3, 8, 5, 8, 8):
            compiled(torch.randn(rows, 4))
    assert len(symbolic) == 2
    assert num_graphs() == 2
    assert not torch._dynamo.config.automatic_dynamic_exclusion_guard


def test_dynamic_true_is_one_graph():
    model = Text()
    compiled = ms.compile(model, dynamic=True)
    for length in (5, 9, 31):
        tokens = torch.randint(20, (3, length))
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert num_graphs() == 1


def test_marked_dimension_is_one_graph(form):
    model = Text()
    compiled = form(model)
    for length in (5, 9, 31):
        tokens = torch.randint(20, (3, length))
        torch._dynamo.mark_dynamic(tokens, 1)
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert num_graphs() == 1


def test_dynamic_false_is_a_graph_each():
    compiled = ms.compile(nn.Linear(4, 4), dynamic=False)
    for rows in (2, 3, 4):
        compiled(torch.randn(rows, 4))
    assert num_graphs() == 3


def test_sizes_that_inductor_decided_about_are_compiled_anew():
    """Inductor numbers the elements of short rows in 16 bits when it sorts, and sums rows of up to 4096 in one pass."""
    compiled = ms.compile(lambda x: (x.sort(-1), x.softmax(-1)), dynamic=True)
    for size, graphs in ((8, 1), (40, 1), (40_000, 2), (50_000, 2), (9, 2)):
        x = torch.randn(2, size)
        torch.testing.assert_close(compiled(x), (x.sort(-1), x.softmax(-1)))
        assert num_graphs() == graphs


def test_backward_passes_belong_to_their_forward():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    compiled = ms.compile(model)
    for rows in (2, 3, 5):  # two graphs, and both sizes below known or not
        compiled(torch.randn(rows, 4)).sum().backward()
    a, b = torch.randn(5, 4), torch.randn(6, 4)
    losses = [compiled(x).square().mean() for x in (a, b)]
    found = [torch.autograd.grad(loss, [*model.parameters()]) for loss in losses]
    expected = [torch.autograd.grad(model(x).square().mean(), [*model.parameters()]) for x in (a, b)]
    torch.testing.assert_close(found, expected)


def test_two_threads_with_two_sizes():
    model = Text()
    compiled = ms.compile(model)
    wrong = []

    def call(length):
        for _ in range(20):
            tokens = torch.randint(20, (3, length))
            with torch.no_grad():
                if not torch.allclose(compiled(tokens), model(tokens), atol=1e-5):
                    wrong.append(length)

    with torch.no_grad():
        for length in (4, 5):
            compiled(torch.randint(20, (3, length)))
    threads = [threading.Thread(target=call, args=(length,)) for length in (11, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_engines_give_the_same_bits():
    model = Text()
    compiled = [ms.compile(model, engine=engine, dynamic=True) for engine in ("serial", "threads", None)]
    for length in (*[7, 16, 33] * 10, 5, 16):  # from the open text at first, then each from an executable
        tokens = torch.randint(20, (3, length))
        first, *others = [each(tokens) for each in compiled]
        assert all(torch.equal(first, other) for other in others)
    assert {each.name for each in executables(compiled[1])} == {"threads"}
    assert len(executables(compiled[2])) == 3


@torch.no_grad()
def test_sizes_without_a_plan_of_their_own_are_explained():
    compiled = ms.compile(nn.Linear(4, 4), dynamic=True)
    for rows in (3, 3, 5, 5, 5):
        compiled(torch.randn(rows, 4))
    text = str(ms.explain(compiled))
    assert "one program for 2 sizes" in text
    assert text.count("none yet") == 2
    (program,) = ms.explain(compiled, size=3).programs
    assert (program.one_size.values, program.one_size.calls, program.one_size.is_planned) == ((3,), 2, False)
    assert any("no plan of its own yet" in note for note in program.notes)


@torch.no_grad()
def test_programs_for_one_size_are_explained_by_the_size_that_changes():
    compiled = ms.compile(nn.Linear(8, 4))
    for rows in (8, 5, 1):  # of which 8 and 1 have programs for themselves
        compiled(torch.randn(rows, 8))
    for rows in (8, 5, 1):
        assert [each.inputs for each in ms.explain(compiled, size=rows).programs] == [(f"float32 [{rows}, 8]",)]
    with pytest.raises(ms.ArgumentError, match="has run with size=4"):
        ms.explain(compiled, size=4)
    for size in ("a", 8.0, True):
        with pytest.raises(ms.ArgumentError, match="must be an integer"):
            ms.explain(compiled, size=size)


@torch.no_grad()
def test_many_sizes_that_come_again_get_executables_later_and_later(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_SIZES", 4)
    monkeypatch.setitem(by_size.OPEN_CALLS, "cpu", 1)
    made = []
    at = LoweredForSizes.at
    monkeypatch.setattr(LoweredForSizes, "at", lambda self, sizes: made.append(sizes) or at(self, sizes))
    compiled = ms.compile(nn.Linear(4, 4), dynamic=True)
    for _ in range(20):
        for rows in range(2, 22):
            compiled(torch.randn(rows, 4))
    assert len(made) < 15  # the open text, four executables, and one more for each time that one has gone


def test_sizes_kept_ready_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_SIZES", 3)
    model = nn.Linear(4, 4)
    compiled = ms.compile(model, dynamic=True, engine="serial")
    for rows in (2, 3, 4, 5, 6, 3, 2):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), model(x))
    sizes = [each.lowered.program.layout(name).size[0] for each in executables(compiled) for name in _batch(each)]
    assert sizes == [6, 3, 2]
    forward = [each for each in ms.explain(compiled, size=3).programs if each.phase == "forward"]
    assert [each.one_size.values for each in forward] == [(3,)]
    assert "one program for 3 sizes" in str(ms.explain(compiled))
    with pytest.raises(ms.ArgumentError, match="has run with size=7"):
        ms.explain(compiled, size=7)


def test_sizes_kept_ready_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(by_size, "MOST_BYTES", 2000)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    compiled = ms.compile(model, dynamic=True, engine="threads")  # which has memory for itself
    with torch.no_grad():
        for rows in (10, 1000, 20, 30, 40):
            compiled(torch.randn(rows, 4))
    numbers = [each.peak_bytes for each in executables(compiled)]
    assert len(numbers) > 1
    assert sum(numbers) <= max(numbers) + 2000


def _batch(executable):
    program = executable.lowered.program
    return [name for name in program.inputs if name is not None and program.layout(name).size[1:] == (4,)][-1:]
