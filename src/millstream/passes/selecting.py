"""Both ways of a branch in one graph: each is computed, and the branch's value selects what is kept.

``gm`` has recorded the step with one outcome of the branch, ``other`` with the other one. Up to the branch they are
equal. What follows is put together as it stands, in place operators included: what the first way writes is kept aside,
and undone before the second way begins. The compiler makes plain values of it all.

**Contract**
- Every input, and every result, is as the way leaves it that the predicate says.
- Nothing of the way that is not taken can be noticed: operators that may raise an error there, draw random numbers or
  communicate are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from millstream._torch.tensors import FakeTensor, storage_id, without_autocast
from millstream.passes.cleanup import drop_marks, storages_written_by
from millstream.passes.graph_pass import graph_pass

aten = torch.ops.aten

MOST_IN_VAIN = 1 / 4
"""Of the graph's operators: what is computed though it may not be taken is not the larger part of the work."""
FEW = 64
"""Operators that are always few enough."""


def results_of(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a graph's results."""
    return [*gm.graph.output_node().args[0]]  # type: ignore[misc] # pyrefly: ignore[not-iterable]


def set_results(gm: fx.GraphModule, results: Sequence[fx.Node]) -> None:
    """Have it return these."""
    gm.graph.output_node().args = ([*results],)


class DifferentWays(Exception):  # noqa: N818 - to the tracer, which says it to the user
    """Both ways cannot be one graph; says why, as the end of a sentence about them."""


def _stay_apart(*_: object, **__: object) -> None:
    raise DifferentWays("are told to stay apart")


@graph_pass("branches", "puts both ways of a branch on a tensor's value into one graph", _stay_apart)
def merge_ways(
    gm: fx.GraphModule, other: fx.GraphModule, inputs: Mapping[fx.Node, fx.Node], predicate: int, *, outcome: bool
) -> Mapping[fx.Node, fx.Node]:
    """Have ``gm`` do what ``other`` does where a value is not ``outcome``, in place.

    Args:
        gm: The graph of one way; ``meta["val"]`` of its nodes are fake tensors.
        other: Of the other one.
        inputs: For each input of ``other`` that of ``gm``.
        predicate: Which result of both is the value, a boolean without dimensions.
        outcome: The value with which ``gm`` was recorded.

    Returns:
        For each node of ``other`` that of ``gm``, which computes the same where that way is taken.

    Raises:
        DifferentWays: They cannot be one graph; then ``gm`` is of no use any more.
    """
    return _Merge(gm, other, inputs).merge(predicate, outcome=outcome)


class _Merge:
    def __init__(self, gm: fx.GraphModule, other: fx.GraphModule, inputs: Mapping[fx.Node, fx.Node]) -> None:
        for each in (gm, other):
            drop_marks(each)
        self._gm, self._other = gm, other
        self._graph = gm.graph
        self._own: dict[fx.Node, fx.Node] = {**inputs}  # for nodes of the other graph those of this one
        self._output, self._others_output = gm.graph.output_node(), other.graph.output_node()
        values = (node.meta.get("val") for node in inputs.values())
        self._mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        self._before = self._common()
        num_before = len(self._before)
        first, second = _computed(gm)[num_before:], _computed(other)[num_before:]
        num_after = self._num_common_after(first, second)
        ends = len(first) - num_after, len(second) - num_after
        self._first, self._second = first[: ends[0]], second[: ends[1]]
        self._after = dict(zip(first[ends[0] :], second[ends[1] :], strict=True))

    def merge(self, predicate: int, *, outcome: bool) -> Mapping[fx.Node, fx.Node]:
        num_all = len(self._before) + len(self._first) + len(self._second) + len(self._after)
        if min(len(self._first), len(self._second)) > max(FEW, MOST_IN_VAIN * num_all):
            raise DifferentWays("both compute too much")
        used = {node for each in self._before if _name(each) in _BY_INDEX for node in each.all_input_nodes}
        used |= {its for its, mine in self._own.items() if mine in used}
        _check_in_vain([*self._first, *self._second], used)
        chosen = results_of(self._gm)[predicate]
        if self._own.get(results_of(self._other)[predicate]) is not chosen:
            raise DifferentWays("are not the same up to there")
        take = _Where(self, chosen, outcome=outcome)

        written = storages_written_by(self._first)
        bases = self._bases(written)
        overwritten = written | self._written_by_second()
        changed = self._bases(overwritten)
        pairs = self._pairs()
        after = next(iter(self._after), self._output)
        with self._graph.inserting_before(next(iter(self._first), after)):
            old = {base: self.call(aten.clone.default, base) for base in changed}
        with self._graph.inserting_before(after):
            firsts = [self._kept_apart(one, overwritten) for one, _ in pairs]
            new = old | {base: self.call(aten.clone.default, base) for base in bases}
            for base in bases:
                self.call(aten.copy_.default, base, old[base])
            for node in self._second:
                self._take_over(node)
            selected = {pair: take(first, self._own[pair[1]]) for pair, first in zip(pairs, firsts, strict=True)}
            for base, value in new.items():
                self.call(aten.copy_.default, base, take(value, base))
        for mine, its in (*self._after.items(), (self._output, self._others_output)):
            partners = iter(_nodes_in(its))
            mine.args, mine.kwargs = map_arg(
                (mine.args, mine.kwargs),
                lambda node: selected.get((node, next(partners)), node),  # noqa: B023  called at once
            )
            if mine is not self._output:
                self._evaluate(mine)
        return self._own | {its: mine for mine, its in self._after.items()}

    def _pairs(self) -> list[tuple[fx.Node, fx.Node]]:
        """Return what the ways bring to what is common after them, and to the results, where that is not the same."""
        found = {}
        for mine, its in (*self._after.items(), (self._output, self._others_output)):
            for one, two in zip(_nodes_in(mine), _nodes_in(its), strict=True):
                if self._own.get(two) is not one and self._after.get(one) is not two:
                    found[one, two] = None
        return [*found]

    def _num_common_after(self, first: list[fx.Node], second: list[fx.Node]) -> int:
        """Of the operators at the end, how many are the same in both ways, but for what is selected before them."""
        most = 0
        for mine, its in zip(reversed(first), reversed(second), strict=False):
            if not self._does_the_same(mine, its):
                break
            most += 1
        numbers = [{node: number for number, node in enumerate(reversed(way), 1)} for way in (first, second)]

        def fits(one: fx.Node, two: fx.Node) -> bool:
            places = [known.get(node, most + 1) for known, node in zip(numbers, (one, two), strict=True)]
            if min(places) <= most:
                return places[0] == places[1]
            return self._own.get(two) is one or _can_be_selected(one.meta.get("val"), two.meta.get("val"))

        number = 0
        while number < most:
            number += 1
            pairs = zip(_nodes_in(first[-number]), _nodes_in(second[-number]), strict=True)
            if not all(fits(*pair) for pair in pairs):
                most, number = number - 1, 0
        return most if self._may_write(first[len(first) - most :], second[len(second) - most :]) else 0

    def _does_the_same(self, mine: fx.Node, its: fx.Node) -> bool:
        """Return whether two nodes are the same but for the nodes they are given."""
        if mine.op == "get_attr" or its.op == "get_attr":
            return mine.op == its.op and _is_same_constant(
                self._constant(self._gm, mine), self._constant(self._other, its)
            )
        given = [_told_apart(map_arg((each.args, each.kwargs), lambda _: None)) for each in (mine, its)]
        return mine.target is its.target and given[0] == given[1]

    def _may_write(self, first: list[fx.Node], second: list[fx.Node]) -> bool:
        """Return whether what is common at the end writes to nothing that would have to be selected as memory."""
        ways = [
            ({*way}, storages_written_by(way), self._known_before(is_first=way is first), dict[int, fx.Node]())
            for way in (first, second)
        ]
        for mine, its in zip(first, second, strict=True):
            for pair in zip(_nodes_in(mine), _nodes_in(its), strict=True):
                if self._own.get(pair[1]) is pair[0]:
                    continue
                for (own, written, before, met), node in zip(ways, pair, strict=True):
                    storage = storage_id(node.meta["val"]) if isinstance(node.meta.get("val"), Tensor) else None
                    if node in own or storage not in written:
                        continue
                    if storage in before or met.setdefault(storage, node) is not node:
                        return False
        return True

    def _known_before(self, *, is_first: bool = True) -> set[int]:
        """Memory that is there before the branch, as the graph of either way knows it."""
        nodes = self._own.values() if is_first else self._own
        return {storage_id(each) for node in nodes for each in _tensors(node.meta.get("val"))}

    def call(self, operator: Any, *args: Any) -> fx.Node:
        """Add an operator here, with the fake tensor that it gives."""
        node = self._graph.call_function(operator, args)
        self._evaluate(node)
        return node

    def _common(self) -> list[fx.Node]:
        """Nodes of this graph that the other one has, too, up to where they part."""
        found = []
        for mine, its in zip(_computed(self._gm), _computed(self._other), strict=False):
            if mine.op != its.op or (mine.op == "call_function" and mine.target is not its.target):
                break
            if mine.op == "get_attr" and not _is_same_constant(
                self._constant(self._gm, mine), self._constant(self._other, its)
            ):
                break
            given = map_arg((its.args, its.kwargs), lambda node: self._own.get(node, node))
            if _told_apart((mine.args, mine.kwargs)) != _told_apart(given):
                break
            self._own[its] = mine
            found.append(mine)
        return found

    @staticmethod
    def _constant(gm: fx.GraphModule, node: fx.Node) -> Any:
        return getattr(gm, str(node.target))

    def _bases(self, storages: Iterable[int]) -> list[fx.Node]:
        """Return what has the whole of each of these memories that is there before the branch."""
        found: dict[int, fx.Node] = {}
        wanted = {*storages} & self._known_before()
        placeholders = self._graph.find_nodes(op="placeholder")
        for node in (*placeholders, *self._before):
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or (storage := storage_id(value)) not in wanted:
                continue
            if storage in found and node.op == "placeholder":
                raise DifferentWays("write inputs that share memory")
            if value.untyped_storage().nbytes() == value.numel() * value.element_size():
                found.setdefault(storage, node)
        if found.keys() != wanted:
            raise DifferentWays("write parts of larger memory")
        return [*found.values()]

    def _written_by_second(self) -> set[int]:
        """Of the memory that is there before the branch, what the second way writes."""
        known = {
            storage_id(its): storage_id(mine)
            for node, own in self._own.items()
            for its, mine in zip(_tensors(node.meta.get("val")), _tensors(own.meta.get("val")), strict=True)
        }
        return {known[storage] for storage in storages_written_by(self._second) if storage in known}

    def _kept_apart(self, result: fx.Node, written: set[int]) -> fx.Node:
        """A result of the first way, safe from what undoes its writes and from those of the second."""
        return self.call(aten.clone.default, result) if storage_id(result.meta["val"]) in written else result

    def _take_over(self, node: fx.Node) -> None:
        """Add a node of the other graph here."""
        if node.op == "get_attr":
            name = f"_of_other_way_{len(self._own)}"
            setattr(self._gm, name, self._constant(self._other, node))
            mine = self._graph.get_attr(name)
            mine.meta.update(node.meta)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), self._own.__getitem__)
            mine = self._graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            mine.meta.update(node.meta)
            self._evaluate(mine)
        self._own[node] = mine

    def _evaluate(self, node: fx.Node) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with self._mode, without_autocast(), torch.no_grad():  # which the recorded operators have behind them
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


class _Where:
    """Selects between what the first way and the second one have made."""

    def __init__(self, merge: _Merge, predicate: fx.Node, *, outcome: bool) -> None:
        self._merge, self._predicate, self._outcome = merge, predicate, outcome

    def __call__(self, first: fx.Node, second: fx.Node) -> fx.Node:
        if not _can_be_selected(first.meta["val"], second.meta["val"]):
            raise DifferentWays("give results of different shapes or dtypes")
        if first.meta["val"].device != self._predicate.meta["val"].device:
            raise DifferentWays("write to another device than decides")
        pair = (first, second) if self._outcome else (second, first)
        return self._merge.call(aten.where.self, self._predicate, *pair)


def _told_apart(value: Any) -> Any:
    """Something that equals the same of another value only if that is the same: NaN, -0.0 and ``True`` included."""
    if isinstance(value, list | tuple):
        return [*map(_told_apart, value)]
    if isinstance(value, dict):
        return {key: _told_apart(each) for key, each in value.items()}
    return type(value), repr(value) if isinstance(value, float | complex) else value


def _nodes_in(node: fx.Node) -> list[fx.Node]:
    """Return those among its arguments, as often as they are there."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), lambda each: found.append(each) or each)  # type: ignore[func-returns-value]
    return found


def _can_be_selected(one: Any, two: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(two, Tensor)):
        return False
    return (one.shape, one.dtype, one.device, one.stride()) == (two.shape, two.dtype, two.device, two.stride())


def _computed(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]


def _is_same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        return is_alike and repr(one.tolist()) == repr(other.tolist())  # NaN included
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):  # what control flow is given
        used = [
            [getattr(each, str(node.target)) for node in each.graph.find_nodes(op="get_attr")] for each in (one, other)
        ]
        return str(one.graph) == str(other.graph) and all(map(_is_same_constant, *used))
    return one is other


_SAFE_TAGS = (torch.Tag.pointwise, torch.Tag.inplace_view)
_SAFE = frozenset(
    """
    mm addmm bmm baddbmm addbmm addmv mv dot convolution convolution_backward _softmax _log_softmax
    _softmax_backward_data _log_softmax_backward_data native_layer_norm native_layer_norm_backward native_group_norm
    native_group_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit
    _native_batch_norm_legit_no_training cudnn_batch_norm cudnn_batch_norm_backward _fused_rms_norm
    _fused_rms_norm_backward sum mean amax amin var std var_mean std_mean prod norm linalg_vector_norm any all argmax
    argmin max min cumsum logsumexp max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward clone copy copy_ _to_copy detach empty
    empty_like full full_like zeros zeros_like ones ones_like new_empty new_full new_zeros new_ones empty_strided
    new_empty_strided scalar_tensor arange fill_ zero_ cat stack constant_pad_nd native_dropout_backward
    threshold_backward gelu_backward silu_backward mse_loss_backward slice_backward select_backward
    slice_scatter select_scatter embedding_dense_backward nll_loss_backward nll_loss_forward embedding index_select
    gather scatter_add _unsafe_view lift_fresh_copy
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    """.split()
)
"""Operators without the tags, of PyTorch's own, that give some value for any values they are given."""
_BY_INDEX = frozenset(
    "embedding_dense_backward nll_loss_backward nll_loss_forward embedding index_select gather scatter_add".split()
)
"""Those of them that may fail by an index: each of theirs must have been used so before the branch."""
_DIVIDES = frozenset("div div_ floor_divide floor_divide_ remainder remainder_ fmod fmod_ pow pow_".split())
"""Those that may end the process on whole numbers."""


def _check_in_vain(nodes: Sequence[fx.Node], used: Collection[fx.Node]) -> None:
    """Refuse operators that must not run where their way is not taken; ``used`` are indices that fit anyway."""
    for node in nodes:
        name = _name(node)
        if node.op == "get_attr" or name == "getitem":
            continue
        operator = node.target
        if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
            raise DifferentWays(f"have {node.target}, which must not run where its way is not taken")
        is_whole = all(not each.is_floating_point() for each in _tensors(node.meta.get("val")))
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns)
        is_safe = (
            name in _SAFE or is_view or name.startswith("_foreach_") or any(tag in operator.tags for tag in _SAFE_TAGS)
        )
        if torch.Tag.nondeterministic_seeded in operator.tags or not is_safe or (name in _DIVIDES and is_whole):
            raise DifferentWays(f"have {name}, which must not run where its way is not taken")
        if name in _BY_INDEX and not any(
            each in used for each in node.all_input_nodes if not each.meta["val"].is_floating_point()
        ):
            raise DifferentWays(f"have {name} with an index that may be meant for one of them only")


def _name(node: fx.Node) -> str:
    target = node.target
    return (
        target._schema.name.partition("::")[2]
        if isinstance(target, torch._ops.OpOverload)
        else getattr(target, "__name__", "")
    )


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Tensor)]
