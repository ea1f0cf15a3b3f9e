"""Tensors are taken for alike only when they may be treated alike."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from millstream import _native
from millstream._torch.tensors import place_of_implementation
from millstream.device.tensor_specs import TensorSpecs

pytestmark = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)

tensors = st.builds(
    lambda dtype, size, flip: (
        torch.zeros(size, dtype=dtype).permute(*reversed(range(len(size)))) if flip else torch.zeros(size, dtype=dtype)
    ),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.booleans(),
)


def specs_of(leaves):
    return TensorSpecs(leaves, place_of_implementation())


def look(tensor):
    return tensor.dtype, tensor.size(), tensor.stride()


@given(st.lists(tensors, min_size=1, max_size=4), st.lists(tensors, min_size=1, max_size=4))
def test_alike_is_who_has_the_same_sizes_strides_and_dtypes(first, second):
    found = specs_of(first).find(second)
    assert (found is not None) == ([*map(look, first)] == [*map(look, second)])
    if found is not None:
        assert list(found) == [tensor.data_ptr() for tensor in second]


def test_addresses_are_those_of_the_first_elements():
    base = torch.arange(20.0)
    found = specs_of([torch.zeros(5)]).find([base[7:12]])
    assert found is not None
    assert list(found) == [base.data_ptr() + 28]


EXAMPLE = torch.zeros(4, 4)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 4, requires_grad=True),
        nn.Parameter(torch.zeros(4, 4), requires_grad=False),
        torch.zeros(4, 4, device="meta"),
        torch.zeros(4, 4).to_sparse(),
        torch.zeros(4, 4, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(4, 4)),
        torch.zeros(4, 5)[:, :4],
        torch.zeros(4, 1).expand(4, 4),
        torch.zeros(4, 4).t(),
        torch.zeros(16),
        np.zeros((4, 4), dtype=np.float32),
        None,
    ],
    ids=lambda other: type(other).__name__,
)
def test_other_kinds_are_not_alike(other):
    assert specs_of([EXAMPLE]).find([torch.ones(4, 4)]) is not None
    assert specs_of([EXAMPLE]).find([other]) is None


def test_lazy_conjugates_differ_from_what_they_are_views_of():
    complex_one = torch.zeros(3, dtype=torch.complex64)
    assert specs_of([complex_one]).find([complex_one.conj()]) is None


def test_tensors_that_share_memory_need_another_look():
    base = torch.zeros(8)
    specs_of_two = specs_of([torch.zeros(4), torch.zeros(4)])
    assert specs_of_two.find([base[:4], torch.zeros(4)]) is not None
    assert specs_of_two.find([base[:4], base[4:]]) is None
    assert specs_of_two.find([base[:4], base[:4]]) is None


def test_tensors_of_inference_mode_differ_from_others():
    with torch.inference_mode():
        made = torch.zeros(4, 4)
    assert specs_of([EXAMPLE]).find([made]) is None
    assert specs_of([made]).find([made]) is not None


def test_other_numbers_of_leaves_are_not_alike():
    assert specs_of([EXAMPLE]).find([]) is None
    assert specs_of([EXAMPLE]).find([EXAMPLE, torch.ones(4, 4)]) is None


def test_without_a_compiler_there_is_none(monkeypatch):
    monkeypatch.setattr(_native, "load", lambda name: None)
    with pytest.raises(ValueError, match="compiled"):
        specs_of([EXAMPLE])


def test_what_was_found_does_not_change_with_the_next_question():
    leaves, others = [torch.ones(3)], [torch.ones(3)]
    tensor_specs = TensorSpecs(leaves, place_of_implementation())
    found = tensor_specs.find(leaves)
    assert tensor_specs.find(others)[0] == others[0].data_ptr()
    assert found[0] == leaves[0].data_ptr()
