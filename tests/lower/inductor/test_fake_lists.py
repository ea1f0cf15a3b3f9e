"""Results of operators over lists of fake tensors are what PyTorch's references find."""

import random

import pytest
import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from millstream._torch.compiler import fake_lists
from millstream._torch.compiler.fake_lists import quick_fake_lists

UNARY = ["sqrt", "neg", "exp", "abs", "reciprocal", "sign", "trunc"]
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum"]
SHAPES = [(), (3,), (1, 4), (4, 1), (2, 0), (2, 3, 4)]


def random_call(choose):
    """An operator over lists, and what it is given: lists of tensors, mostly alike, or numbers."""
    number = choose.randrange(1, 5)
    is_usual = choose.random() < 0.6
    dtypes = [torch.float32] * 3 if is_usual else [torch.float32, torch.bfloat16, torch.int64]
    forms = [(choose.choice(SHAPES), choose.choice(dtypes), choose.random()) for _ in range(number)]

    def make(shape, dtype, layout):
        value = torch.ones(shape, dtype=dtype)
        return value.mT.contiguous().mT if layout > 0.8 and value.dim() > 1 else value

    def items():
        return [make(shape, dtype, layout if is_usual else choose.random()) for shape, dtype, layout in forms]

    kind = choose.choice(["unary", "binary", "zeros", "zeros", "number", "numbers", "scalar", "addcmul", "lerp"])
    suffix = choose.choice(["", "_"])
    if kind == "unary":
        return f"_foreach_{choose.choice(UNARY)}{suffix}", (items(),), {}
    name = f"_foreach_{choose.choice(BINARY[:4] if kind in ('number', 'scalar') else BINARY)}{suffix}"
    if kind == "binary":
        return name, (items(), items()), {}
    if kind == "zeros":  # of no dimension, on either side
        zeros = [torch.ones((), dtype=choose.choice(dtypes)) for _ in forms]
        # References enlarge a result in place, the first time that they are asked.
        return name, (items(), zeros) if suffix or choose.random() < 0.7 else (zeros, items()), {}
    if kind == "number":
        return name, (items(), choose.choice([2, 0.5])), {}
    if kind == "numbers":
        return f"_foreach_mul{suffix}", (items(), [choose.choice([2, 0.5]) for _ in range(number)]), {}
    if kind == "scalar":
        return f"_foreach_mul{suffix}", (items(), torch.tensor(2.0, dtype=choose.choice(dtypes))), {}
    if kind == "addcmul":
        return f"_foreach_addcmul{suffix}", (items(), items(), items()), {"value": 0.5}
    return f"_foreach_lerp{suffix}", (items(), items(), 0.1), {}


def forms_of(name, args, kwargs):
    """What an operator gives for fake tensors, and what it leaves of those that it writes."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        try:
            results = getattr(torch, name)(*fakes, **kwargs)
        except RuntimeError as error:
            return type(error)
        return [
            (each.shape, each.stride(), each.dtype, each.device, each.storage_offset(), type(each))
            for each in (*(results or ()), *fakes[0])
        ]


@pytest.fixture
def taken(monkeypatch):
    found, find = [], fake_lists._specs_of_results

    def note(*args):
        specs = find(*args)
        found.append(specs is not None)
        return specs

    monkeypatch.setattr(fake_lists, "_specs_of_results", note)
    return found


def test_results_of_lists_are_those_of_references(taken):
    choose = random.Random(0)
    for _ in range(250):
        call = random_call(choose)
        expected = forms_of(*call)
        with quick_fake_lists():
            assert forms_of(*call) == expected, call
    assert 60 < sum(taken) < len(taken)


def test_switched_off_references_are_asked(monkeypatch):
    before = [*fake_impls.op_implementations_checks]
    with quick_fake_lists():
        assert fake_impls.op_implementations_checks != before
    assert fake_impls.op_implementations_checks == before
    monkeypatch.setenv("MILLSTREAM_WITHOUT", "shortcuts")
    with quick_fake_lists():
        assert fake_impls.op_implementations_checks == before
