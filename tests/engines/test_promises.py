"""Operators whose real implementation returns something else than their fake one says."""

from dataclasses import replace

import pytest
import torch

import millstream as ms
from millstream.api import executables
from millstream.engine.plan_source import compile_plan
from millstream.errors import GraphError
from millstream.schedule import plan_serial
from tests.engines.test_threads import threaded
from tests.networks import lowered


def turned(x):
    """As ``x``, by columns."""
    return x.t().contiguous().t()


@pytest.fixture
def operators():
    """Their results lie by columns, or begin behind something else; all are said to lie by rows."""
    with torch.library._scoped_library("unlike", "FRAGMENT") as library:
        real = {
            "one(Tensor x) -> Tensor": lambda x: turned(x.sin()),
            "two(Tensor x) -> (Tensor, Tensor)": lambda x: (turned(x.sin()), x.cos()),
            "some(Tensor x) -> Tensor[]": lambda x: [turned(x.sin()), x.cos()],
            "behind(Tensor x) -> Tensor": lambda x: torch.cat([x, x.sin()])[len(x) :],
            "double(Tensor x) -> Tensor": lambda x: x.double(),
            "short(Tensor x) -> Tensor": lambda x: x[:1].clone(),
        }
        for schema, function in real.items():
            name = schema.partition("(")[0]
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")
            num_results = {"two": 2, "some": 2}.get(name)

            def fake(x, num_results=num_results, is_list=name == "some"):
                made = [torch.empty_like(x) for _ in range(num_results or 1)]
                return made if is_list else tuple(made) if num_results else made[0]

            torch.library.register_fake(f"unlike::{name}", fake, lib=library)
        torch._dynamo.reset()
        yield torch.ops.unlike


def uses(operators):
    def function(x):
        y = x * 2
        first, second = operators.two(y)
        third, fourth = operators.some(y)
        return (
            (operators.one(y) + 1) * second,
            operators.one(y)[1:, 1:].exp() + operators.one(x).t()[1:, 1:].sum(),
            (first + fourth).t() @ third,
            operators.behind(y)[1:] * 2,
            operators.one(y),
        )

    return function


@pytest.mark.parametrize("how", ["compile", "threads", "step"])
def test_results_with_other_strides_are_read_as_they_are(operators, how):
    function = uses(operators)
    if how == "step":
        run = ms.step(function, strict=True)
    elif how == "threads":
        run = ms.compile(function, strict=True, engine="threads", streams=2)
    else:
        run = ms.compile(function, strict=True)
    for seed, size in enumerate([4, 4, 4, 6, 6, 7]):  # the text for all sizes, too
        x = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(run(x), function(x))
    if how == "threads":
        assert "threads" in {executable.name for executable in executables(run)}


@pytest.mark.parametrize(("name", "told"), [("double", r"torch.float64 \[4, 4\]"), ("short", r"float32 \[1, 4\]")])
def test_results_of_another_shape_or_dtype_are_an_error(operators, name, told):
    run = ms.compile(lambda x: getattr(operators, name)(x * 2) + 1, strict=True)
    with pytest.raises(
        GraphError, match=rf"unlike.{name}.*test_promises.py.*{told}.*captured as torch.float32 \[4, 4\]"
    ):
        run(torch.ones(4, 4))


def test_what_pytorch_returns_is_compared_in_the_first_call(monkeypatch):
    """And in later ones, where it was something else then."""
    program, inputs, _ = lowered(lambda x: x.sort(0)[0] + 1, torch.randn(4, 4))
    program = program.program
    for make in (turned, torch.clone):
        numbers = [0, 0]

        def sort(*args, make=make, numbers=numbers, **kwargs):
            values, indices = torch.sort(args[0], 0)
            numbers[0] += 1
            return make(values), indices

        calls = tuple(replace(call, target=sort) if call.results else call for call in program.calls)
        run = compile_plan(replace(program, calls=calls), plan_serial(program.graph))
        for number in range(3):
            (result,) = run([x + number for x in inputs])
            torch.testing.assert_close(result, (inputs[0] + number).sort(0)[0] + 1)
        assert numbers[0] == 3
        assert bool(run.__globals__["pending"]) is (make is turned)


@torch.no_grad()
def test_what_pytorch_returns_is_copied_where_threads_call_it():
    program, inputs, _ = lowered(lambda x: [(x + number).sort(0) for number in range(2)], torch.randn(4, 4))
    program = program.program
    names = [name for call in program.calls for _, name in call.results]
    layouts = {name: replace(program.tensors[name], stride=(1, 4)) for name in names}
    _, run = threaded(replace(program, tensors=program.tensors | layouts))
    results, x = run(list(inputs)), inputs[0]
    assert {result.stride() for result in results} == {(1, 4)}
    for number in range(2):
        assert all(map(torch.equal, results[2 * number : 2 * number + 2], (x + number).sort(0)))
