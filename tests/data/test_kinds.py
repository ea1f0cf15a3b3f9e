"""Whatever a batch may hold arrives as ``to`` and the plain loop would bring it, or one error says where it is."""

import collections
import dataclasses
import types
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nested import nested_tensor
from torch.utils._pytree import register_pytree_node, tree_map

from millstream.errors import FeedError

pytestmark = pytest.mark.filterwarnings("ignore:.*(beta|prototype|Nested)")


class Boxes(Tensor):
    """A subclass as those of torchvision: every operator's result is one, too."""


class Sharded(Tensor):
    """A subclass as DTensor: it has no memory of its own, but holds a tensor."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = tree_map(lambda each: each.inner if isinstance(each, Sharded) else each, (args, kwargs or {}))
        return tree_map(lambda each: Sharded(each) if isinstance(each, Tensor) else each, func(*inner[0], **inner[1]))

    def __repr__(self):
        return f"Sharded({self.inner})"


class Pair(NamedTuple):
    x: object
    number: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    number: int = 3


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding."""


class Graph:
    def __init__(self, x):
        self.x = x


register_pytree_node(Graph, lambda graph: ([graph.x], None), lambda parts, _: Graph(*parts))

x = torch.arange(6.0).view(2, 3)
unaligned = np.zeros(3, dtype=[("a", "u1"), ("b", ">f4")])["b"]
read_only = np.arange(4.0)
read_only.flags.writeable = False

STRIDED = {
    "transposed": x.t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.arange(3).view(3, 1).expand(3, 4),
    "sliced": torch.arange(24).view(4, 6)[::2, 1::2],
    "windows": torch.arange(8.0).unfold(0, 4, 2),
    "no dimension": torch.tensor(3.5, dtype=torch.float64),
    "no element": torch.empty(3, 0, 2)[:, :, 1:],
    "bool": x > 1,
    "bfloat16": x.bfloat16(),
    "float8": x.to(torch.float8_e4m3fn),
    "uint16": x.to(torch.uint16),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative view": torch.randn(3, dtype=torch.complex64).conj().imag,
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "needs gradient": torch.ones(2, requires_grad=True),
    "subclass": x.as_subclass(Boxes),
}
with warnings.catch_warnings(action="ignore"):  # that CSR, nested and quantized tensors are young, or old
    OTHER = {
        "coo": x.to_sparse(),
        "coo, not coalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True),
        "csr": x.to_sparse_csr(),
        "bsr": torch.ones(4, 4).to_sparse_bsr((2, 2)),
        "nested": nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        "mkldnn": x.to_mkldnn(),
        "wrapper": Sharded(x),
        "fake": FakeTensorMode().from_tensor(x),
    }
ARRAYS = {
    "without dimension": np.array(3.0),
    "read-only": read_only,
    "big-endian": np.arange(4, dtype=">f4"),
    "big-endian and unaligned": unaligned,
    "backwards": np.arange(6)[::-1],
}
STAY = {
    "number of numpy": np.float32(3),
    "words": np.array(["a", "b"]),
    "objects": np.array([1, "a", None], dtype=object),
    "days": np.array(["2020-01-01"], dtype="M8[D]"),
    "records": np.zeros(2, dtype=[("a", "f4")]),
    "size": x.shape,
}
CONTAINERS = {
    "named tuple": Pair(x),
    "result of max": torch.max(x, 0),
    "frozen dataclass with slots": Frozen(x),
    "ordered dict": collections.OrderedDict(x=x, number=1),
    "dict with a default": collections.defaultdict(list, x=x),
    "encoding": Encoding(x=x, number=1),
    "deque": collections.deque([x], maxlen=3),
    "node of a pytree": Graph(x),
    "namespace": types.SimpleNamespace(x=x),
}
UNKNOWN = {
    "generator": (each for each in [x]),
    "view of a dict": {"a": x}.values(),
    "masked array": np.ma.array([1, 2], mask=[False, True]),
}
KINDS = STRIDED | OTHER | ARRAYS | STAY | CONTAINERS


def plain(value):
    """What a tensor that is not strided, or has none of its own memory, says."""
    if isinstance(value, Sharded):
        return [value.inner]
    if value.is_nested:
        return [*value.unbind()]
    if value.is_quantized:
        return [value.int_repr(), torch.tensor(value.q_scale())]
    if value.is_sparse and not value.is_coalesced():
        return [value._indices(), value._values()]
    return [value.to_dense() if value.layout is not torch.strided else torch.ones(value.shape)]


def same(a, b):
    if isinstance(a, Tensor):
        assert type(a) is type(b)
        assert (a.dtype, a.layout, a.requires_grad) == (b.dtype, b.layout, b.requires_grad)
        if a.layout is torch.strided and not a.is_nested:
            assert a.shape == b.shape
        if any(a is each for each in OTHER.values()):
            return all(map(same, plain(a), plain(b)))
        if a.dtype is torch.float8_e4m3fn:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, Tensor):
        return b.numpy().dtype == a.dtype.newbyteorder("=") and np.array_equal(a, b.numpy())
    assert type(a) is type(b)
    if isinstance(a, (Frozen, Graph, types.SimpleNamespace)):
        return same(a.x, b.x) and getattr(a, "number", None) == getattr(b, "number", None)
    if isinstance(a, (collections.UserDict, dict)):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or a == b


@pytest.mark.parametrize("value", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("is_copied", [False, True])
def test_batches_arrive_as_in_the_plain_loop(make_feed, value, is_copied):
    batches = [{"odd": value, "plain": torch.ones(3)}, [torch.ones(2, 3), value], value, [x, x], [value, x]]
    source = (each for each in batches) if is_copied else batches  # a source on the CPU that may refill its buffers
    first, second, third, _, last = make_feed(source)
    assert all(same(value, got) for got in (first["odd"], second[1], third, last[0]))


@pytest.mark.parametrize("value", STRIDED.values(), ids=STRIDED)
def test_strides_are_those_of_to(virtual_feed, value):
    fed, device = virtual_feed([[value]] * 4)
    for (got,) in fed:
        device.synchronize()
        overlaps = 0 in value.stride() or (value.dim() == 2 and value.stride() == (2, 1))
        expected = value if 0 in value.stride() else torch.empty_like(value)
        assert overlaps or got.stride() == expected.stride()
        assert same(value, got)


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_named(make_feed, value):
    with pytest.raises(FeedError, match=r"batch\['odd'\] is a .* which feeds do not know.*register"):
        next(iter(make_feed([{"odd": value}])))


def test_a_tensor_without_memory_is_named(make_feed):
    with pytest.raises(FeedError, match=r"batch\['odd'\] .* lives on meta"):
        next(iter(make_feed([{"odd": torch.empty(3, device="meta")}])))


def test_a_container_that_holds_itself_says_so(make_feed):
    loop = [x]
    loop.append(loop)
    with pytest.raises(FeedError, match="holds itself"):
        next(iter(make_feed([loop])))


@pytest.mark.parametrize("options", [{}, {"transform": lambda batch: batch}], ids=["plain", "transform"])
def test_an_error_of_a_leafs_own_to_says_where_it_is(virtual_feed, options):
    class Stuck:
        def to(self, device):
            raise OSError("stuck")

    fed, _ = virtual_feed([{"a": [x, Stuck()]}], **options)
    with pytest.raises(OSError, match="stuck") as caught:
        next(iter(fed))
    assert any("batch['a'][1]" in note for note in caught.value.__notes__)
