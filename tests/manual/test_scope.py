"""Scopes: what runs where, what they give back, and what they say to bad input."""

import gc
import os
import sys
import threading

import pytest
import torch
from torch import nn

import millstream as ms
from millstream.device.pools import stream_pool
from millstream.errors import ArgumentError, DeviceError, StreamError
from millstream.manual import issuing, storages, thread_streams
from millstream.manual.hints import HintedScope
from millstream.manual.operator_rules import Effect, find_function, recipe_of
from millstream.manual.ordering import Ordering
from millstream.manual.scope import SerialScope
from tests.device.virtual_device import make_virtual_context
from tests.manual.virtual_torch import VirtualTorch

CONTEXTS = sys.modules["millstream.device.context"]  # a function has the module's name


@pytest.fixture
def machine():
    """A virtual device, lazy: its context, the device, and PyTorch on it."""
    context, device = make_virtual_context("lazy", seed=1)
    with VirtualTorch(device) as virtual, torch.no_grad():
        yield context, device, virtual


# --- one stream


@pytest.mark.parametrize("scope", [lambda: ms.streams(4, "cpu"), lambda: ms.streams(1)])
def test_same_code_runs_on_one_stream(scope):
    a = torch.rand(3, 3)
    with scope() as s:
        b = s[3].mm(a, a)
        with s[2]:
            c = b + 1
        d, e = s.run([lambda: c * 2, lambda: c * 3])
        s.join()
        s.wait(d)
        f = s[1](torch.add, d, e)
        assert s[2].stream is None
    assert torch.equal(f, (a @ a + 1) * 2 + (a @ a + 1) * 3)


@pytest.mark.parametrize("scope", [lambda: ms.streams(4, "cpu"), lambda: ms.streams(1), lambda: HintedScope(4)])
def test_scope_is_for_its_with_alone_on_one_stream_too(scope):
    s = scope()
    for _ in range(2):  # before and after
        with pytest.raises(StreamError, match="within `with"):
            s[1]
        with s:
            s[1].sin(torch.ones(1))


def test_engine_serial_makes_one_stream(monkeypatch, machine):
    monkeypatch.setenv("MILLSTREAM_ENGINE", "serial")
    assert isinstance(ms.streams(4, machine[0]), SerialScope)


# --- several


def test_stream_0_is_the_callers(machine):
    context, device, virtual = machine
    a = virtual.tensor([1.0])
    with ms.streams(3, context) as s:
        assert s[0].stream is device.default
        assert len({id(s[i].stream) for i in range(3)}) == 3
        assert s[4].stream is s[1].stream
        with s[2]:
            assert context.current_stream() is s[2].stream
            b = s[1].add(a, 1.0)
            assert context.current_stream() is s[2].stream
        assert context.current_stream() is device.default
    assert virtual.read(b).item() == 2


def test_scope_without_work_waits_for_nothing(machine):
    context, device, _ = machine
    with ms.streams(4, context):
        pass
    assert sum(len(stream.queue) for stream in device.streams) == 1, "the record of the fork"


def test_groups_within_groups_take_streams_of_their_own(machine):
    context, device, virtual = machine
    a, used = virtual.tensor([1.0]), []

    def layer(x):
        with ms.streams(3, context) as group:
            used.extend(group[i].stream for i in range(3))
            return group[1].add(x, 1.0) + group[2].add(x, 2.0)

    for _ in range(2):
        with ms.streams(5, context) as s:
            results = s.run([lambda: layer(a)] * 5)
            total = sum(results)
        assert virtual.read(total).item() == 25
    assert len({id(stream) for stream in used}) == 15
    assert len(device.streams) == 15


def test_tensor_of_a_group_is_waited_for_by_another(machine):
    context, _, virtual = machine
    a = virtual.tensor([1.0])
    with ms.streams(3, context) as s:
        with s[1], ms.streams(2, context) as group:
            b = group[1].add(a, 1.0)
        c = s[2].mul(b, 10.0)
    assert virtual.read(c).item() == 20


def test_functions_are_those_of_functional_first():
    assert find_function("softmax").call is torch.nn.functional.softmax
    assert find_function("mm").is_plain
    assert find_function("linear").is_plain
    assert find_function("relu_").writes_first
    assert not find_function("batch_norm").is_plain
    with pytest.raises(AttributeError, match="s\\[i\\]\\(function"):
        find_function("no_such_function")


def test_recipes_follow_schemas():
    aten = torch.ops.aten
    assert recipe_of(aten.view.default).effect is Effect.VIEW
    assert recipe_of(aten.add_.Tensor).positions == {0}
    assert recipe_of(aten.mm.out).names == {"out"}
    assert recipe_of(aten.resize_.default).effect is Effect.REALLOCATE


# --- errors


def test_exception_in_a_branch_joins_the_others_and_surfaces_once(machine):
    context, device, virtual = machine
    out = virtual.tensor([0.0])

    def fails():
        raise KeyError("gate")

    with pytest.raises(KeyError, match="gate") as caught, ms.streams(3, context) as s:
        s.run([lambda: out.add_(1.0), lambda: out.mul_(5.0), fails])
    assert context.current_stream() is device.default
    assert caught.value.__notes__ == ["Raised in branch 2."]
    assert caught.traceback[-1].name == "fails"
    assert virtual.read(out + 0).item() == 5


@pytest.mark.parametrize(
    ("where", "name", "nth"),
    [
        *((Ordering, "add_stream", nth) for nth in (1, 2, 3)),
        *((Ordering, name, nth) for name in ("fork", "join", "use", "make") for nth in (1, 2)),
        *((thread_streams.ThreadStreams, name, nth) for name in ("take", "give_back") for nth in (1, 2)),
    ],
)
def test_interrupted_scope_leaves_nothing(where, name, nth, machine, monkeypatch):
    context, device, virtual = machine
    a, whole, calls = virtual.tensor([1.0]), getattr(where, name), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return whole(*args)

    def work():
        with ms.streams(3, context) as s:
            b = s[1].add(a, 1.0)
            with s[2], ms.streams(2, context) as group:
                return group[1].add(b, a)

    before = torch._C._len_torch_dispatch_stack()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            work()
    assert torch._C._len_torch_dispatch_stack() == before
    assert context.current_stream() is device.default
    assert context.streams.num_lent == 0
    assert virtual.read(work()).item() == 3


def test_stream_after_its_scope_is_refused(machine):
    context, _, virtual = machine
    a = virtual.tensor([1.0])
    with ms.streams(2, context) as s:
        handle, call = s[1], s[1].add
        call(a, 1.0)
    for use in (lambda: s[1], lambda: handle.add(a, a), lambda: call(a, a), handle.__enter__, lambda: handle(abs, a)):
        with pytest.raises(StreamError, match="within `with"):
            use()
    for use in (s.join, lambda: s.wait(a), lambda: s.run([abs])):
        with pytest.raises(StreamError, match="within `with"):
            use()
    with pytest.raises(StreamError, match="once"), s:
        pass


@pytest.mark.parametrize("number", [0, -1, 33, 2.0, "4", True])
def test_no_number_of_streams(number):
    if number is True:
        return  # an int that is one
    with pytest.raises(ArgumentError, match="number of streams"):
        ms.streams(number)


@pytest.mark.parametrize("index", [-1, 1.0, "1", None])
def test_no_number_of_a_stream(index, machine):
    for scope in (ms.streams(2, machine[0]), ms.streams(2, "cpu")):
        with scope as s, pytest.raises(ArgumentError, match="numbers"):
            s[index]


def test_more_groups_than_there_are_streams(machine, monkeypatch):
    context, device, _ = machine
    monkeypatch.setattr(stream_pool, "MAX_LENT_STREAMS", 4)

    def nest(depth):
        with ms.streams(2, context) as s, s[1]:
            if depth:
                nest(depth - 1)

    with pytest.raises(DeviceError, match="smaller groups"):
        nest(6)
    assert context.current_stream() is device.default
    nest(2)


def test_idle_streams_go_to_whom_needs_them(machine, monkeypatch):
    context, _, virtual = machine
    monkeypatch.setattr(stream_pool, "MAX_LENT_STREAMS", 4)
    a = virtual.tensor([1.0])
    for base in range(6):
        with context.on(context.streams[base]), ms.streams(4, context) as s:
            b = s[3].add(s[2].add(a, 1.0), 1.0)
        assert virtual.read(b).item() == 3


def test_other_thread_is_refused(machine):
    context, _, virtual = machine
    a, seen = virtual.tensor([1.0]), []

    def use(handle):
        try:
            handle.add(a, a)
        except StreamError as error:
            seen.append(str(error))

    with ms.streams(2, context) as s:
        thread = threading.Thread(target=use, args=(s[1],))
        thread.start()
        thread.join()
    assert "thread" in seen[0]


def test_threads_have_streams_of_their_own(machine):
    context, _, _ = machine
    found, barrier = [], threading.Barrier(4)

    def work():
        with ms.streams(3, context) as s:
            found.append([s[1].stream, s[2].stream])
            barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(stream) for pair in found for stream in pair}) == 8


def test_closed_context_is_refused():
    context, _ = make_virtual_context()
    with ms.streams(2, context) as s:
        context.close()
        with pytest.raises(StreamError, match="cannot be used any more"), s[1]:
            pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child_is_refused(monkeypatch):
    context, _ = make_virtual_context()
    monkeypatch.setitem(CONTEXTS._contexts, context.place, context)
    with ms.streams(2, context) as s:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with s[1]:
                    os.write(write, b"no error")
            except StreamError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert b"forked" in os.read(read, 1000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child_works_on_the_cpu_within_the_scope(monkeypatch):
    context, _ = make_virtual_context()
    monkeypatch.setitem(CONTEXTS._contexts, context.place, context)
    monkeypatch.setattr(issuing, "LOOK_EVERY", 1)
    tensors = [torch.ones(2) for _ in range(200)]
    read, write = os.pipe()
    with torch.no_grad(), ms.streams(2, context) as s:
        child = os.fork()
        if child == 0:  # as a DataLoader's worker is
            try:
                os.write(write, str(sum(tensor + 1 for tensor in tensors)[0].item()).encode())
                s[1].add(tensors[0], 1)
            except StreamError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
    answer = os.read(read, 1000)
    assert answer.startswith(b"400.0")
    assert b"forked" in answer


def test_scope_of_before_a_capture_is_refused_in_it(machine):
    context, device, _ = machine
    capture = context.streams[5]
    with ms.streams(2, context) as s:
        device.capturing = True
        with context.on(capture), pytest.raises(StreamError, match="within it"), s[1]:
            pass
        device.capturing = False


def test_fork_within_a_capture_of_another_device_is_refused(machine):
    context, device, _ = machine
    device.capturing_elsewhere = True
    with pytest.raises(StreamError, match="another device"), ms.streams(2, context):
        pass
    device.capturing_elsewhere = False
    with ms.streams(2, context):
        pass


def test_generators_that_end_in_another_order_leave_nothing(machine):
    context, device, virtual = machine
    a = virtual.tensor([1.0])

    def branch():
        with ms.streams(2, context) as s:
            yield s[1].add(a, 1.0)
            yield s[1].add(a, 2.0)

    before = torch._C._len_torch_dispatch_stack()
    one, other = branch(), branch()
    total = next(one) + next(other)
    one.close()
    total = total + next(other)
    other.close()
    assert torch._C._len_torch_dispatch_stack() == before
    assert context.current_stream() is device.default
    assert virtual.read(total).item() == 7


def suspend(handle):
    """A generator that is suspended on a stream."""
    with handle:
        yield


def test_scope_that_ends_while_a_generator_is_on_its_stream_is_left(machine):
    context, device, virtual = machine
    a, results = virtual.tensor([1.0]), []
    with ms.streams(2, context):
        with ms.streams(2, context) as inner:
            generator = suspend(inner[1])
            next(generator)
        assert context.current_stream() is device.default
        b = a + 1.0
    device.starved = range(1, len(device.streams))
    device.read(b, results)
    device.run_until(lambda: results)
    assert torch.frombuffer(bytearray(results[0]), dtype=torch.float32).item() == 2
    generator.close()
    assert context.current_stream() is device.default


def test_generator_that_ends_after_the_scope_leaves_the_callers_stream(machine):
    context, device, _ = machine
    with ms.streams(3, context) as s, s[1]:
        generator = suspend(s[2])
        next(generator)
    generator.close()
    assert context.current_stream() is device.default


def test_group_that_ends_after_its_scope_is_joined(machine):
    context, device, virtual = machine
    a, results = virtual.tensor([1.0]), []

    def branch():
        with ms.streams(2, context) as group:
            yield group[1].add(a, 1.0)

    with ms.streams(3, context) as s, s[1]:
        generator = branch()
        made = next(generator)
    generator.close()
    device.starved = range(1, len(device.streams))
    device.read(made, results)
    device.run_until(lambda: results)
    assert torch.frombuffer(bytearray(results[0]), dtype=torch.float32).item() == 2


def test_scope_ended_by_another_thread_is_no_ones_next(machine):
    context, device, virtual = machine
    a, results = virtual.tensor([1.0]), []

    def branch():
        with ms.streams(2, context) as s:
            yield s[1].add(a, 1.0)

    def end(generator):
        with VirtualTorch(device), torch.no_grad():
            generator.close()
            with ms.streams(2, context) as s:
                results.append(s[1].add(a, 2.0))

    before = torch._C._len_torch_dispatch_stack()
    generator = branch()
    made = next(generator)
    thread = threading.Thread(target=end, args=(generator,))
    thread.start()
    thread.join()
    with ms.streams(2, context) as s, ms.streams(2, context):
        made = s[1].add(made, results[0])
    assert virtual.read(made).item() == 5
    assert torch._C._len_torch_dispatch_stack() == before
    assert context.streams.num_lent == 0


def test_eight_threads_do_not_meet():
    context, device = make_virtual_context("random", seed=3)
    errors, interval = [], sys.getswitchinterval()

    def work(number):
        try:
            with VirtualTorch(device) as virtual, torch.no_grad(), context.on(context.streams[number]):
                for _ in range(8):
                    fork_and_fail(context, virtual, number)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert context.streams.num_lent == 0


def fork_and_fail(context, virtual, number):
    a, here, made = virtual.tensor([float(number)]), context.current_stream(), []

    def fails():
        raise KeyError(number)

    def fork():
        with ms.streams(4, context) as s:
            b = s[2].mul(s[1].add(a, 1.0), 2.0)
            with s[3], ms.streams(3, context) as group:
                made.append(group[2].add(b, a))
                a.mul_(2.0)
            s.run([lambda: None, fails])

    with pytest.raises(KeyError) as caught:
        fork()
    assert caught.value.args == (number,)
    assert caught.value.__notes__ == ["Raised in branch 1."]
    assert context.current_stream() is here
    assert (virtual.read(made[0]).item(), virtual.read(a).item()) == (3 * number + 2, 2 * number)


# --- memory


def test_loop_in_a_scope_is_bounded(machine, monkeypatch):
    context, device, virtual = machine
    monkeypatch.setattr(issuing, "MOST_HELD", 20)
    monkeypatch.setattr(issuing, "LOOK_EVERY", 8)
    a = virtual.tensor([1.0])
    with ms.streams(3, context) as s:
        for _ in range(300):
            s[2].add(s[1].add(a, 1.0), 1.0)
        assert device.num_raw < 80, "memory is used again"
    assert context.streams.num_lent == 0


def test_held_memory_is_given_back_at_the_end(machine):
    context, device, virtual = machine
    a = virtual.tensor([1.0])
    for _ in range(30):
        with ms.streams(3, context) as s:
            s[2].add(s[1].add(a, 1.0), 1.0)
    assert device.num_raw < 12
    gc.collect()
    assert not s._context._arena.num_bytes


def test_books_of_storages_that_are_gone_are_thrown_away(machine, monkeypatch):
    context, _, virtual = machine
    monkeypatch.setattr(storages, "CLEAN_EVERY", 10)
    a = virtual.tensor([1.0])
    with ms.streams(2, context) as s:
        s._session._storages._clean_at = 10
        for _ in range(100):
            s[1].add(a, 1.0)
        assert len(s._session._storages.memories) < 30


def test_short_memory_waits_for_what_is_held(machine):
    context, device, virtual = machine
    a = virtual.tensor([1.0])
    with ms.streams(3, context) as s:
        made = s[1].add(a, 1.0)
        s[2].add(made, 1.0)
        del made
        device.free_bytes = 0  # nothing new: only what is given back can be taken
        b = s[1].add(a, 5.0)
    device.free_bytes = None
    assert virtual.read(b).item() == 6


# --- what is not a plain operator


def test_views_and_writes_in_place_are_ordered(machine):
    context, _, virtual = machine
    a = virtual.tensor([[1.0, 2.0], [3.0, 4.0]])
    with ms.streams(4, context) as s:
        with s[1]:
            a.t()[0].mul_(10.0)
        with s[2]:
            b = a[:, 0] + 0
        s[3].relu_(a.neg_())
    assert virtual.read(b).tolist() == [10, 30]
    assert virtual.read(a).tolist() == [[0, 0], [0, 0]]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_tensors_without_storage_are_pytorchs_affair():
    context, _ = make_virtual_context()
    sparse, a = torch.eye(3).to_sparse(), torch.rand(3, 3)
    with ms.streams(2, context) as s:
        results = [
            torch.sparse.mm(sparse, a),
            s[1].mm(sparse, a),
            s[1].mm(s[1].sparse_coo_tensor([[0, 1, 2], [0, 1, 2]], [1.0, 1.0, 1.0], (3, 3)), a),
            torch.func.vmap(lambda row: s[1].mul(row, 1.0))(a),
        ]
    assert all(torch.equal(result, a) for result in results)


def test_gradients_on_the_virtual_device(machine):
    context, _, virtual = machine
    with torch.enable_grad():
        w = virtual.tensor([[0.5, 1.0], [2.0, 0.25]]).requires_grad_()
        x = virtual.tensor([[1.0, 2.0]])
        with ms.streams(3, context) as s:
            left = s[1].mm(x, w)
            right = s[2].tanh(left)
            with s[1]:
                both = (left * right).sum()
            (grad,) = torch.autograd.grad(both, [w])
    expected_w = torch.tensor([[0.5, 1.0], [2.0, 0.25]], requires_grad=True)
    values = torch.tensor([[1.0, 2.0]])
    with torch.enable_grad():
        left = values @ expected_w
        (expected,) = torch.autograd.grad((left * left.tanh()).sum(), [expected_w])
    assert torch.equal(virtual.read(grad), expected)


def test_parallel_calls_all_with_the_same_arguments(machine):
    context, _, virtual = machine
    a = virtual.tensor([2.0])
    one, two = ms.manual.parallel([lambda x, y: x + y, lambda x, y: x * y], a, y=3.0, device=context)
    assert (virtual.read(one).item(), virtual.read(two).item()) == (5, 6)
    assert ms.manual.parallel([], a) == []


def test_parallel_refuses_what_cannot_be_called():
    with pytest.raises(ArgumentError, match="Branch 1"):
        ms.manual.parallel([abs, 3], torch.ones(1))
    with pytest.raises(ArgumentError, match="Branch 0"):
        ms.manual.Parallel([abs])


def test_parallel_module_has_its_branches_parameters():
    model = ms.manual.Parallel(nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 4)]))
    assert [tuple(y.shape) for y in model(torch.ones(5, 2))] == [(5, 3), (5, 4)]
    assert len(list(model.parameters())) == 4


# --- check=True


def use_foreign(context, foreign, a, *, ordered):
    with ms.streams(2, context, check=True) as s:
        made = s[1].mul(a, 2.0)
        if ordered:
            event = context.events.acquire()
            event.record(s[1].stream)
            foreign.wait_event(event)
        with context.on(foreign):
            made.add(1.0)


def test_unsynchronised_foreign_stream_is_told_with_two_lines(machine):
    context, _, virtual = machine
    a = virtual.tensor([1.0])
    with pytest.raises(StreamError, match="not ordered") as caught:
        use_foreign(context, context.streams[9], a, ordered=False)
    assert str(caught.value).count("test_scope.py") >= 2
    assert "aten.mul" in str(caught.value)
    assert "aten.add" in str(caught.value)
    use_foreign(context, context.streams[9], a, ordered=True)


def test_check_is_for_the_outermost_scope(machine):
    with (
        ms.streams(2, machine[0]),
        pytest.raises(ArgumentError, match="outermost"),
        ms.streams(2, machine[0], check=True),
    ):
        pass
