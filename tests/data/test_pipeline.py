"""The state machine of a pass against a model, over all interleavings of what can happen."""

import math

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millstream.data.passes.pipeline import IN_STEP, Do, Message, Pipeline
from millstream.errors import ArgumentError


class PassModel(RuleBasedStateMachine):
    """A worker that carries out instructions, one per rule, and a consumer that asks, drops and leaves in between."""

    plant = staticmethod(lambda pipeline: None)
    """Plants a fault."""
    always_keeps = False
    """Whether a batch without room always needs the source's memory: else that is rare."""

    @initialize(
        depth=st.integers(1, 4),
        look_ahead=st.sampled_from([None, None, 0, 1]),
        in_step=st.sampled_from([0, IN_STEP]),
        sizes=st.lists(st.integers(1, 9), max_size=14),
        max_bytes=st.sampled_from([None, 9, 20]),
        num_buffers=st.integers(2, 5),
        surplus=st.sampled_from([0, 0, 1, math.inf]),  # by which the pipeline takes the room for larger than it is
    )
    def begin(self, depth, look_ahead, in_step, sizes, max_bytes, num_buffers, surplus):
        self.depth, self.look_ahead, self.in_step, self.max_bytes = depth, look_ahead, in_step, max_bytes
        self.sizes, self.free = sizes, max(num_buffers, depth)
        self.pipeline = Pipeline(depth, max_bytes, look_ahead, in_step, self.free + surplus)
        self.todo, self.messages = [], []
        self.asked, self.delivered, self.held = 0, 0, 0
        self.pulled, self.staged, self.ready = [], [], []
        self.count = 0  # batches pulled
        self.stays, self.keeps_source, self.is_closed, self.has_ended = False, False, False, False
        self.num_sent, self.has_failed = 0, False
        self.plant(self.pipeline)

    @property
    def waits(self):
        return self.asked > self.delivered

    # --- the worker

    @precondition(lambda self: not self.has_ended and (not self.todo or self.todo[0] is not Do.WAIT))
    @rule(fate=st.sampled_from(["well"] * 12 + ["fails"]), keeps_source=st.booleans())
    def work(self, fate, keeps_source):
        if not self.todo:
            messages, self.messages = self.messages, []
            self.todo = [*self.pipeline.next(messages)]
            assert self.todo
            return
        do = self.todo.pop(0)
        if do is Do.END:
            self.has_ended = True
            return
        left = [do, *self.todo]
        if fate == "fails":
            self.has_failed = True
            self.pipeline.take_back(left)
            self.pipeline.end(do)
            if do is Do.STAGE:
                self.pulled.clear()
            elif do is Do.SEND:
                self.staged.clear()
                self.pulled.clear()
            self.todo.clear()
            return
        getattr(self, f"do_{do.name.lower()}")(left, keeps_source=keeps_source or self.always_keeps)

    def give_up(self, left, **why):
        self.pipeline.take_back(left, **why)
        self.todo.clear()

    def do_pull(self, left, *, keeps_source):
        assert not self.pulled
        if self.staged and keeps_source:
            assert not self.keeps_source  # it is known, then
            self.keeps_source = True
            self.give_up(left, keeps_source=True)
            return
        assert not self.keeps_source
        may_ahead = 0 if self.stays or self.count < self.in_step else self.look_ahead
        assert may_ahead is None or self.count < self.asked + may_ahead
        if self.count == len(self.sizes):
            self.give_up(left)
            self.pipeline.end()
            return
        self.pulled.append(self.count)
        try:
            self.pipeline.pulled_bytes(self.sizes[self.count])
        except ArgumentError:
            assert self.sizes[self.count] > self.max_bytes
            self.pulled.clear()
            self.give_up(left)
            self.pipeline.end()
            self.has_failed = True
            return
        self.count += 1

    def do_stage(self, left, **_):
        assert len(left) > 1
        assert not self.staged
        self.staged.append(self.pulled.pop())
        handed = min(self.asked, self.staged[0])  # the batch that is waited for does not count
        under_way = range(handed, self.staged[0] + 1)
        assert len(under_way) <= max(self.depth, 1)
        if self.max_bytes is not None and len(under_way) > 1:
            assert sum(self.sizes[i] for i in under_way) <= self.max_bytes

    def do_send(self, left, **_):
        assert self.look_ahead is None or self.staged[0] < self.asked
        if not self.free:
            self.give_up(left, no_room=True)
            return
        self.free -= 1
        self.keeps_source = False
        self.ready.append(self.staged.pop())
        self.num_sent += 1

    @precondition(lambda self: self.todo[:1] == [Do.PULL] and self.staged)
    @rule()
    def send_while_the_source_is_asked(self):
        if self.keeps_source or not self.pipeline.send_meanwhile():
            return
        assert self.look_ahead is None or self.staged[0] < self.asked
        if self.free:
            self.do_send([])
        else:
            self.pipeline.take_back([Do.SEND], no_room=True)

    @precondition(lambda self: self.todo and self.todo[0] is Do.WAIT)
    @rule()
    def wake(self):
        if self.messages:
            self.todo.clear()

    # --- the consumer

    @precondition(lambda self: not self.waits and not self.is_closed)
    @rule()
    def ask(self):
        self.asked += 1
        self.messages.append(Message.ASKED)

    @precondition(lambda self: self.waits and self.ready)
    @rule()
    def take(self):
        assert self.ready.pop(0) == self.delivered  # in order, none lost
        self.delivered += 1
        self.held += 1

    @precondition(lambda self: self.held > 1)
    @rule()
    def drop(self):
        self.held -= 1
        self.free += 1
        self.messages.append(Message.FREED)

    @precondition(lambda self: not self.is_closed)
    @rule(closes=st.sampled_from([False] * 15 + [True]))
    def close(self, closes):
        if closes:
            self.is_closed = True
            self.messages.append(Message.CLOSED)

    @precondition(lambda self: not self.todo or self.todo[0] is Do.WAIT)
    @rule(stays=st.booleans())
    def stay_in_step(self, stays):
        self.stays = stays
        self.pipeline.stays_in_step = stays

    # --- what must hold

    @invariant()
    def no_more_is_pulled_than_promised(self):
        if hasattr(self, "pipeline"):
            assert self.count - self.delivered <= self.depth + 2

    @invariant()
    def nobody_waits_for_ever(self):
        """Where the worker waits and no message is on its way, the consumer has what it asked for, or holds memory."""
        if not hasattr(self, "pipeline") or self.todo[:1] != [Do.WAIT] or self.messages or self.is_closed:
            return
        assert not self.waits or self.ready or not self.free

    def teardown(self):
        """Let everybody go on: what was pulled is delivered, and the pass ends."""
        if not hasattr(self, "pipeline"):
            return
        for _ in range(500):
            if self.has_ended:
                break
            if self.todo and self.todo[0] is Do.WAIT:
                if self.held > 1:
                    self.drop()
                elif self.waits and self.ready:
                    self.take()
                elif not self.waits and not self.is_closed:
                    self.ask()
                else:
                    assert self.messages or self.is_closed, "both wait for each other"
                self.wake()
            else:
                self.work("well", False)
        assert self.has_ended
        if not self.is_closed:
            while self.ready:
                self.asked = max(self.asked, self.delivered + 1)
                self.take()
            assert self.delivered == self.num_sent
            assert self.has_failed or self.delivered == len(self.sizes)


TestPass = PassModel.TestCase
TestPass.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


# --- planted faults: the model finds each rule that is left out


FAULTS = {
    "room for one more": lambda pipeline: setattr(pipeline, "_depth", pipeline._depth + 1),
    "any number of bytes": lambda pipeline: setattr(pipeline, "max_bytes", 10**9),
    "ahead from the first": lambda pipeline: setattr(pipeline, "_in_step", 0),
    "pulled although the source's memory is needed": lambda pipeline: setattr(
        pipeline, "take_back", lambda left, *, no_room=False, **_: Pipeline.take_back(pipeline, left, no_room=no_room)
    ),
    "sent although nothing was freed": lambda pipeline: setattr(
        pipeline, "take_back", lambda left, **why: Pipeline.take_back(pipeline, [], **why)
    ),
    "what was left out counts as done": lambda pipeline: setattr(pipeline, "take_back", lambda left, **_: None),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_model_finds_a_rule_that_is_left_out(fault):
    faulty = type("Faulty", (PassModel,), {"plant": staticmethod(fault), "always_keeps": True})
    found = settings(max_examples=3000, stateful_step_count=60, deadline=None, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(faulty, settings=found)
