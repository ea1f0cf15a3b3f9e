"""Loops that go on behind Ctrl-C, which came at any moment: nothing hangs, no batch is lost or comes twice."""

import contextlib
import sys
import threading

import pytest
import torch

from millstream.feed import feeder
from millstream.feed.ledger import Ledger
from tests.feed.conftest import WAYS
from tests.feed.interrupts import interrupt_everywhere

DEADLINE_S = 20
FILES = (
    "/contextlib.py",
    "/device/context.py",
    *(
        f"/feed/{name}.py"
        for name in ("budget", "channel", "copy_lane", "feeder", "lane", "ledger", "pace", "ring", "session")
    ),
)


def take_rest(passing, batches):
    """Go on with the loop; whether it ended as the source did."""
    ends = []

    def work():
        try:
            batches.extend(passing)
        except KeyboardInterrupt:
            ends.append("interrupted")
        else:
            ends.append("exhausted")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert ends, "it hangs"
    return ends == ["exhausted"]


# The interpreter of Python 3.11 itself crashes where a profiler has raised in some of the last way's functions.
@pytest.mark.parametrize("make_feed", WAYS if sys.version_info >= (3, 12) else WAYS[:3], indirect=True)
@pytest.mark.parametrize("is_there", [True, False], ids=["the batch is there", "it is waited for"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_loop_goes_on_behind_ctrl_c_at_any_moment(make_feed, monkeypatch, depth, is_there):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # Python drops what meets a finalizer
    ask = Ledger.ask
    may_go_on = threading.Event()

    def ask_and_go_on(*arguments):
        ask(*arguments)
        may_go_on.set()

    monkeypatch.setattr(Ledger, "ask", ask_and_go_on)

    def source():
        for i in range(4):
            yield torch.tensor([float(i)])
            may_go_on.wait(DEADLINE_S)

    def run(interrupter):
        may_go_on.set()
        fed = make_feed(source(), depth)
        passing = iter(fed)
        if not (is_there or make_feed.alone):
            may_go_on.clear()
        batches = [next(passing)]
        while is_there and not (make_feed.alone or passing.session._sent.qsize()):
            pass
        try:
            batches.append(interrupter.run(lambda: next(passing)))
        except KeyboardInterrupt:
            assert fed.state_dict()["position"] == 1
        may_go_on.set()
        is_whole = take_rest(passing, batches)
        assert [batch.item() for batch in batches] == list(range(4 if is_whole else len(batches)))
        assert is_whole or (make_feed.alone and len(batches) < 3)  # where the interrupt came while a batch was made
        fed.close()

    places = interrupt_everywhere(run, *FILES)
    asking = {"_Pass.__next__", "Session.next_batch", "Pace.ask", "Ledger.ask"}  # what comes behind differs with time
    assert asking | {"Session._make_alone" if make_feed.alone else "Session._receive"} <= set(places)
    assert len(places) > (30 if make_feed.alone or "CopyLane.deliver" in places else 20)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 crashes, see above")
@pytest.mark.parametrize("make_feed", WAYS[3:], indirect=True)
def test_who_is_alone_goes_on_behind_ctrl_c_at_any_moment_of_looking_ahead(make_feed, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)

    def run(interrupter):
        fed = make_feed([torch.full((50_000,), float(i)) for i in range(5)])
        passing = iter(fed)
        batches = [next(passing)]
        with contextlib.suppress(KeyboardInterrupt):
            batches.append(interrupter.run(lambda: next(passing)))
        is_whole = take_rest(passing, batches)
        assert [batch[-1].item() for batch in batches] == list(range(5 if is_whole else len(batches)))
        assert is_whole or len(batches) < 3
        assert fed.state_dict()["position"] == (0 if is_whole else len(batches))
        fed.close()

    assert len(interrupt_everywhere(run, *FILES, "/feed/staging.py")) > 30


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 crashes, see above")
@pytest.mark.parametrize("make_feed", ["virtual"], indirect=True)
def test_who_keeps_all_batches_goes_on_behind_ctrl_c_at_any_moment_of_giving_them_up(make_feed, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)

    def run(interrupter):
        fed = make_feed([torch.full((500,), float(i)) for i in range(8)])
        passing = iter(fed)
        batches = [next(passing), next(passing)]
        with contextlib.suppress(KeyboardInterrupt):
            batches.append(interrupter.run(lambda: next(passing)))
        assert take_rest(passing, batches)
        assert [batch[-1].item() for batch in batches] == list(range(8))
        fed.close()

    assert len(interrupt_everywhere(run, "/feed/ring.py")) > 20


@pytest.mark.parametrize("make_feed", WAYS if sys.version_info >= (3, 12) else WAYS[:3], indirect=True)
@pytest.mark.parametrize("leave", ["end", "close", "begin anew"])
def test_another_pass_begins_behind_ctrl_c_at_any_moment_of_the_end_of_one(make_feed, monkeypatch, leave):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)

    def run(interrupter):
        fed = make_feed([torch.tensor([float(i)]) for i in range(3)])
        passes = [iter(fed)]
        batches = [next(passes[0]) for _ in range(3)]
        ways = {
            "end": lambda: next(passes[0], None),
            "close": passes[0].session.close,
            "begin anew": lambda: iter(fed),
        }
        with contextlib.suppress(KeyboardInterrupt):
            interrupter.run(ways[leave])
        passes.clear()
        again = []

        def begin():
            again.append(iter(fed))

        thread = threading.Thread(target=begin, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert again, "it hangs"
        assert take_rest(again[0], batches)
        assert [batch.item() for batch in batches] == [0.0, 1.0, 2.0] * 2
        fed.close()

    assert len(interrupt_everywhere(run, *FILES)) > 10


@pytest.mark.parametrize("make_feed", WAYS if sys.version_info >= (3, 12) else WAYS[:3], indirect=True)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_pass_begins_again_where_it_was_to_behind_ctrl_c_at_any_moment_of_its_beginning(
    make_feed, monkeypatch, is_resumed
):
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)

    def run(interrupter):
        fed = make_feed([torch.full((500,), float(i)) for i in range(3)])
        passing = iter(fed)
        batches = [next(passing)]
        if is_resumed:
            fed.load_state_dict(fed.state_dict())
        else:
            batches.extend(passing)
        del passing
        with contextlib.suppress(KeyboardInterrupt):
            interrupter.run(lambda: iter(fed))
        assert fed.state_dict()["position"] == (1 if is_resumed else 0)
        assert take_rest(iter(fed), batches)
        assert [batch[0].item() for batch in batches] == ([0.0, 1.0, 2.0] if is_resumed else [0.0, 1.0, 2.0] * 2)
        fed.close()
        assert feeder.context(fed.place)._arena.num_lent == 0

    assert len(interrupt_everywhere(run, *FILES, "/feed/progress.py")) > 20
