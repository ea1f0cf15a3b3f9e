"""Graphs cut at collectives: the segments together do what the graph did, in any cutting."""

import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from millstream._torch.distributed.collectives import EXCHANGE, register_exchange
from millstream.data_parallel.exchange import ExchangeMemory
from millstream.lower.segmented.segments import cut
from millstream.lower.segmented.updates import updates_of


class Doubling:
    """A collective of two processes that have the same; it may take the memory of an earlier one."""

    label, is_divided, is_paced, result = "a bucket", False, False, None

    def __init__(self, *like, log, memory=None):
        self.memory = torch.empty(sum(each.numel() for each in like), dtype=like[0].dtype) if memory is None else memory
        self.held = ExchangeMemory(self.memory)
        parts = self.memory.split([each.numel() for each in like])
        self.sent = self.views = [part.view(each.shape) for part, each in zip(parts, like, strict=True)]
        self.key, self.log = register_exchange(self), log
        self._is_under_way = False

    def start(self):
        assert not self._is_under_way
        self._is_under_way = True
        self.given = [view.clone() for view in self.views]
        for view in self.views:
            view.fill_(float("nan"))  # nobody may read it yet
        self.log.append(self.key)

    def wait(self):
        if self._is_under_way:
            self._is_under_way = False
            for view, sent in zip(self.views, self.given, strict=True):
                view.copy_(2 * sent)


class Functional(torch.fx.Interpreter):
    """Runs a segment's graph as it is meant: inputs are written at its end, with what was there before."""

    def run(self, *inputs):
        self.copies = []
        results = super().run(*inputs, enable_io_processing=False)
        for target, value in self.copies:
            target.copy_(value)
        return results

    def run_node(self, node):
        if node.target is not torch.ops.aten.copy_.default:
            return super().run_node(node)
        target, value, *_ = self.fetch_args_kwargs_from_env(node)[0]
        return self.copies.append((target, value.clone()))


def run(segments, exchanges, inputs):
    """As the engine does it, by the segments' own graphs."""
    views = [view for exchange in exchanges for view in (*exchange.views, *exchange.sent)]
    values = [*inputs, *views, *[None] * (segments.num_values - len(inputs) - len(views))]
    for segment in segments.segments:
        for number in segment.waits:
            exchanges[number].wait()
        if segment.graph is not None:
            results = Functional(segment.graph).run(*[values[place] for place in segment.inputs])
            for place, result in zip(segment.outputs, results, strict=True):
                values[place] = result
        for number, places in segment.brings:
            for view, place in zip(exchanges[number].sent, places, strict=True):
                view.copy_(values[place])
        for number in segment.starts:
            exchanges[number].start()
    return [values[value] if is_place else value for is_place, value in segments.outputs]


def functional(function, *inputs, sizes="fake"):
    """The graph as AOT autograd would give it, and Inductor's first passes leave it: a clone is what it is made of."""
    gm = make_fx(torch.func.functionalize(function), tracing_mode=sizes)(*inputs)
    output = next(iter(reversed(gm.graph.nodes)))
    output.args = (tuple(output.args[0]),)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        node.replace_all_uses_with(node.args[0])
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def backward_like(log):
    """Three buckets in the order of a backward pass; buffers that are broadcast; a step whose results cross."""
    w = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    buffer, x = torch.randn(4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    first = Doubling(buffer, log=log)
    buckets = [Doubling(each, log=log) for each in w]

    def step(a, b, c, buffer, x):
        (sent,) = EXCHANGE([buffer], first.key)
        one = torch.tanh(x @ a)
        two = torch.tanh(one @ b)
        three = two @ c
        loss = three.sum()
        grads = []
        back = torch.ones_like(three)
        for weight, before, bucket in ((c, two, 0), (b, one, 1), (a, x, 2)):
            grads += EXCHANGE([before.t() @ back], buckets[bucket].key)
            back = back @ weight.t()
        mean, _ = torch.var_mean(one, 0)
        buffer.copy_(0.9 * sent + mean)
        for weight, gradient in zip((c, b, a), grads, strict=True):
            weight.copy_(0.99 * weight - 0.1 * gradient)
        return [loss, grads[1], c.t() * 2, three]

    return step, [first, *buckets], [*w, buffer, x]


def factors(segment):
    """By what plain numbers it multiplies."""
    nodes = segment.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    return [node.args[1] for node in nodes]


@pytest.mark.parametrize("max_cuts", [1, 2, 3, 8])
def test_segments_do_what_the_graph_does(max_cuts):
    log = []
    step, exchanges, inputs = backward_like(log)
    ours, theirs = [each.clone() for each in inputs], [each.clone() for each in inputs]
    segments = cut(functional(step, *inputs), max_cuts)
    expected = step(*theirs)
    issued, log[:] = list(log), []
    results = run(segments, exchanges, ours)
    for left, right in zip([*results, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(left, right)
    assert log == issued
    assert sum(bool(segment.starts) for segment in segments.segments) == 1 + min(max_cuts, 3)


def test_what_a_later_collective_needs_does_not_hold_up_an_earlier_one():
    log = []
    step, _, inputs = backward_like(log)
    segments = cut(functional(step, *inputs), 8)
    _, first, second, third, last = segments.segments
    assert [segment.starts for segment in (first, second, third)] == [(1,), (2,), (3,)]
    mm = torch.ops.aten.mm.default
    products = [
        len(segment.graph.graph.find_nodes(op="call_function", target=mm)) for segment in (first, second, third)
    ]
    assert products == [4, 2, 2]  # three forward and one gradient; then one to go back and one gradient each
    assert [segment.waits for segment in (first, second, third)] == [(0,), (), ()]
    assert set(last.waits) == {1, 2, 3}


def test_statistics_of_what_is_broadcast_first_are_updated_where_they_are_made():
    step, _, inputs = backward_like([])
    _, first, *_, last = cut(functional(step, *inputs), 8).segments
    assert 0.9 in factors(first)
    assert 0.9 not in factors(last)


def test_weight_decay_is_computed_where_the_optimizer_is():
    step, _, inputs = backward_like([])
    *before, last = [segment for segment in cut(functional(step, *inputs), 8).segments if segment.graph]
    assert 0.99 in factors(last)
    assert not any(0.99 in factors(segment) for segment in before)


def test_values_of_a_paced_collective_are_copied_when_it_begins():
    log = []
    one = Doubling(torch.ones(3), log=log)
    one.is_paced = True

    def gathering(x):
        (a,) = EXCHANGE([x * 3], one.key)
        return [a + 1]

    x = torch.randn(3)
    segments = cut(functional(gathering, x), 1)
    (expected,) = gathering(x)
    (result,) = run(segments, [one], [x])
    torch.testing.assert_close(result, expected)
    assert [(segment.starts, len(segment.brings)) for segment in segments.segments] == [((0,), 1), ((), 0)]


def test_collective_that_needs_another_comes_after_it():
    log = []
    like = torch.ones(3)
    one, two = Doubling(like, log=log), Doubling(like, log=log)

    def chain(x):
        (a,) = EXCHANGE([x + 1], one.key)
        (b,) = EXCHANGE([a * 3], two.key)
        return [b, a]

    segments = cut(functional(chain, like), 1)
    results = run(segments, [one, two], [torch.ones(3)])
    assert [each.tolist() for each in results] == [[24.0] * 3, [4.0] * 3]
    assert log == [one.key, two.key]


def test_results_are_no_memory_of_a_collective():
    exchange = Doubling(torch.ones(3), log=[])

    def step(x):
        return [*EXCHANGE([x + 1], exchange.key)]

    segments = cut(functional(step, torch.ones(3)), 1)
    (first,) = run(segments, [exchange], [torch.ones(3)])
    run(segments, [exchange], [torch.zeros(3)])
    assert first.tolist() == [4.0] * 3


def gathering(log):
    """A step that sends its parameters in the memory in which gradients came, and reads those gradients later on."""
    w, v = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)
    gradients = Doubling(w, v, log=log)
    whole = Doubling(w, v, log=log, memory=gradients.memory)

    def step(w, v, x):
        dw, dv = EXCHANGE([x.t() @ (x @ w), (x @ w).t() @ x], gradients.key)
        w.sub_(0.1 * dw)
        sum_w, sum_v = EXCHANGE([w, v - 0.1 * dv], whole.key)
        v.copy_(sum_v)
        return [dw / sum_w, dv.t(), dw]

    return step, [gradients, whole], [w, v, x]


@pytest.mark.parametrize("max_cuts", [1, 2])
def test_collectives_share_memory(max_cuts):
    log = []
    step, exchanges, inputs = gathering(log)
    ours, theirs = [each.clone() for each in inputs], [each.clone() for each in inputs]
    expected = step(*theirs)
    segments = cut(functional(step, *inputs), max_cuts)
    results = run(segments, exchanges, ours)
    for left, right in zip([*results, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(left, right)
    (sent,) = [places for segment in segments.segments for _, places in segment.brings]
    assert sent[0] == 0  # the input itself, which has its new value by then
    assert sent[1] >= segments.num_inputs


def copying(rng):
    """A step that copies and updates pieces of state, before and after what is exchanged."""
    state = [torch.randn(4, 4, dtype=torch.float64) for _ in range(6)]
    first, second = Doubling(state[0], log=[]), Doubling(state[0], state[1], log=[])
    kinds = [*rng.choices(["add", "lerp", "keep"], k=3), *rng.choices(["copy", "view", "swap", "add"], k=3)]
    statements = [(kind, rng.sample(range(6), 2), rng.randrange(4)) for kind in kinds]
    at_first, at_second = sorted(rng.choices(range(4), k=2))

    def step(a, b, c, d, e, f, x):
        pieces, values, results = [a, b, c, d, e, f], [x, x + 1, torch.sin(x), x.t()], []
        for number, (kind, (one, other), source) in enumerate([*statements, (None, (0, 0), 0)]):
            if number == at_first:
                values[2:3] = EXCHANGE([pieces[number % 4] * x], first.key)
            if number == at_second:
                values[1:3] = EXCHANGE([torch.tanh(values[1]), pieces[number % 3] + 1], second.key)
            ours, theirs = pieces[one], pieces[other]
            if kind == "copy":
                ours.copy_(theirs)
            elif kind == "view":
                ours.copy_(theirs.t())
            elif kind == "swap":
                kept = ours.clone()
                ours.copy_(theirs)
                theirs.copy_(kept)
            elif kind == "add":
                ours.add_(theirs * values[source])
            elif kind == "lerp":
                ours.lerp_(theirs, 0.25)
            elif kind == "keep":
                results.append(ours.clone() * 2)
        return [*results, values[1].sum()]

    return step, [first, second], [*state, torch.randn(4, 4, dtype=torch.float64)]


def test_copies_of_state_are_of_what_was_there_before():
    wrong = []
    for seed in range(60):
        step, exchanges, inputs = copying(random.Random(seed))
        ours, theirs = [each.clone() for each in inputs], [each.clone() for each in inputs]
        expected = step(*theirs)
        results = run(cut(functional(step, *inputs), 1 + seed % 2), exchanges, ours)
        pairs = zip([*results, *ours], [*expected, *theirs], strict=True)
        if not all(torch.allclose(our, their) for our, their in pairs):
            wrong.append(seed)
    assert not wrong


def test_segments_of_symbolic_sizes_serve_others():
    w = torch.randn(4, 3, dtype=torch.float64)
    exchange = Doubling(w, log=[])

    def step(w, x):
        hidden = torch.tanh(x @ w)
        (dw,) = EXCHANGE([x.t() @ hidden / x.shape[0]], exchange.key)
        w.sub_(dw / hidden.shape[0])  # a size that is needed again after the collective
        return [(hidden @ dw.t()) * (x.shape[0] * 2)]

    segments = cut(functional(step, w, torch.randn(5, 4, dtype=torch.float64), sizes="symbolic"), 1)
    for rows in (5, 7, 2):
        x = torch.randn(rows, 4, dtype=torch.float64)
        ours, theirs = w.clone(), w.clone()
        torch.testing.assert_close(run(segments, [exchange], [ours, x]), step(theirs, x))
        torch.testing.assert_close(ours, theirs)


# --- what is done with what was exchanged -----------------------------------------------------------------------------


def clipping_step(rows=5, largest=0.3, weigh_by_batch=False, is_divided=False):
    """How ``w`` and ``momentum`` are written by one process's step."""
    w, x = torch.randn(4, 4), torch.randn(rows, 4)
    exchange = Doubling(w, log=[])
    exchange.is_divided = is_divided

    def step(momentum, gradient, w, x):
        (reduced,) = EXCHANGE([x.t() @ (x @ w)], exchange.key)
        gradient.copy_(reduced)
        clipped = reduced * (largest / reduced.norm()).clamp(max=1.0)
        clipped = clipped * x.mean() if weigh_by_batch else clipped
        new = 0.9 * momentum + clipped
        momentum.copy_(new)
        w.copy_(w - 0.1 * new)
        return [x.sum()]

    gm = functional(step, torch.zeros_like(w), torch.zeros_like(w), w, x)
    return updates_of(gm, ("momentum", "w.grad", "w"), 1)


def test_updates_are_the_same_for_batches_of_other_sizes():
    (momentum, weight) = lines = clipping_step()
    assert lines == clipping_step(rows=7)
    assert momentum.startswith("an update of momentum = operators ")
    assert weight.startswith("an update of w = ")
    assert "with the numbers 0.1, 0.3, 0.9, 1.0" in weight


def test_updates_tell_another_number():
    for one, other in zip(clipping_step(), clipping_step(largest=0.5), strict=True):
        assert one != other
        assert "0.5" in other


def test_updates_by_what_is_a_process_own_are_left_out():
    assert clipping_step(weigh_by_batch=True) == ()
    assert clipping_step(is_divided=True) == ()


def test_gradient_of_a_pointwise_convolution_does_not_cross():
    """It is channels-last, the bucket is as the weight: strides differ for dimensions of one element alone."""
    weight, log = torch.randn(4, 3, 1, 1, dtype=torch.float64), []
    exchange = Doubling(weight, log=log)

    def step(weight, x):
        gradient = (x.t() @ x)[:, :3].reshape(4, 1, 1, 3).permute(0, 3, 1, 2) * 0.5  # strides (3, 1, 3, 3)
        (mean,) = EXCHANGE([gradient], exchange.key)
        gradient.copy_(mean)
        weight.copy_(weight - 0.1 * gradient)
        return [gradient.sum()]

    ours, theirs = ([weight.clone(), torch.ones(5, 4, dtype=torch.float64)] for _ in range(2))
    segments = cut(functional(step, *ours), 1)
    assert [segment.outputs for segment in segments.segments if segment.starts] == [()]
    (expected,), (result,) = step(*theirs), run(segments, [exchange], ours)
    assert torch.equal(result, expected)
    assert torch.equal(ours[0], theirs[0])
