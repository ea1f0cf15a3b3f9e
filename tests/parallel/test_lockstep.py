"""What all processes decide alike, each from its own kernels and clocks: two of them in threads, without a device."""

import json
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

from millstream._torch.distributed import shutdown
from millstream._torch.modes.switches import present
from millstream.cost import Costs, KernelCost, Roofline
from millstream.data_parallel import agreement, communicators
from millstream.data_parallel.agreement import NO, Agreement, collectives_wanted
from millstream.data_parallel.board import NotTogetherError
from millstream.data_parallel.hyperparameters import NOT_KNOWN, Hyperparameters, differing, marks_differ, optimizers_of
from millstream.engine.parallel import lockstep
from millstream.engine.parallel.communicator_trial import choose_communicator
from millstream.engine.parallel.lockstep import LockstepTrials, propose_together, recall_together, together
from millstream.engine.planning import trial
from millstream.errors import ArgumentError, DataParallelError
from millstream.graph import CHOSEN, Buffer, Kernel, KernelGraph, KernelKind, Role
from millstream.schedule import Scheduling, plan_serial
from millstream.schedule import choose as choice
from millstream.schedule.choose import choose
from tests.parallel.threads import in_both


def towers(rank, num_towers=4, length=3):
    """Some chains of kernels, longer in the second process."""
    device, kernels, buffers, outputs = f"cuda:{rank}", [], [Buffer("x", 64, f"cuda:{rank}", Role.INPUT)], []
    for tower in range(num_towers):
        before = "x"
        for number in range(length + rank):
            name = f"t{tower}_{number}"
            is_last = number == length + rank - 1
            buffers.append(Buffer(name, 64, device, Role.OUTPUT if is_last else Role.TEMPORARY))
            kernels.append(Kernel(len(kernels), "k", KernelKind.FUSED, device, (before,), (name,), num_bytes=128))
            before = name
        outputs.append(before)
    return KernelGraph("towers", tuple(kernels), tuple(buffers), ("x",), tuple(outputs))


def costs_of(graph, rank):
    return Costs(tuple(KernelCost(10_000 + 500 * rank, 0.1, 0.1) for _ in graph.kernels), wait_ns=100)


@pytest.fixture
def pair(boards):
    return [Agreement(board) for board in boards]


def in_both_processes(pair, act):
    by_board = {agreement.board: agreement for agreement in pair}
    return in_both([each.board for each in pair], lambda board: act(by_board[board], board.rank))


def test_each_plans_its_own_kernels_by_the_same_recipes(pair):
    def act(agreement, rank):
        graph = towers(rank)
        return propose_together(agreement, graph, costs_of(graph, rank), Scheduling())

    first, second = in_both_processes(pair, act)
    assert len(first) > 2
    assert [each.recipe for each in first] == [each.recipe for each in second]
    assert [each.predicted_ns for each in first] == [each.predicted_ns for each in second]
    for candidate_plans, rank in ((first, 0), (second, 1)):
        assert all(each.plan.graph == towers(rank) for each in candidate_plans)


def test_what_the_first_process_noted_is_made_again_in_each_of_its_own_kernels(pair):
    scheduling = Scheduling()
    best = choice.propose(towers(0), costs_of(towers(0), 0), scheduling)[2]
    noted = json.loads(json.dumps(choice.to_json(best, [best.describe(CHOSEN)])))

    def act(agreement, rank):
        graph = towers(rank)
        costs = replace(costs_of(graph, rank), wait_ns=90)  # measured anew
        own = noted if rank == 0 else {"recipe": None}
        return recall_together(agreement, own, graph, costs, scheduling)

    found = in_both_processes(pair, act)
    for rank, (candidate, candidates) in enumerate(found):
        assert candidate.recipe == best.recipe
        assert candidate.plan.graph == towers(rank)
        assert [each.outcome for each in candidates] == [CHOSEN]


@pytest.mark.parametrize("noted", [None, {}, {"recipe": ["no such", 2, 1.0, True], "candidates": []}])
def test_nothing_usable_was_noted(noted, pair):
    def act(agreement, rank):
        graph = towers(rank)
        return recall_together(agreement, noted, graph, costs_of(graph, rank), Scheduling())

    assert in_both_processes(pair, act) == [None, None]


def choose_in_both(pair, monkeypatch, ns_of, capture=lambda rank, plan: plan):
    """What each process chooses when a plan on so many streams takes ``ns_of(rank, streams)``."""
    ranks = {}

    def prepare(self, stack, plan, best):
        return self._capture(plan), self._capture(best), None

    def clock(own, base, rewind, agree):  # given what the captured have as their graphs: plans
        agree(5)
        rank = ranks[own.graph.kernels[0].device]
        return ns_of(rank, own.num_streams), ns_of(rank, base.num_streams)

    monkeypatch.setattr(trial.Trials, "_prepare", prepare)
    monkeypatch.setattr(lockstep, "compare", clock)
    monkeypatch.setattr(choice, "HOPEFUL", 100.0)  # all are tried

    def act(agreement, rank):
        graph = towers(rank)
        ranks[f"cuda:{rank}"] = rank
        candidate_plans = propose_together(agreement, graph, costs_of(graph, rank), Scheduling())
        trials = LockstepTrials(
            agreement, lambda plan: SimpleNamespace(graph=capture(rank, plan)), candidate_plans[0].plan, None, None
        )
        best, _ = choose(candidate_plans, trials, inf)
        return best.recipe, str(trials.error or "")

    return in_both_processes(pair, act)


def test_slowest_process_counts(pair, monkeypatch):
    def ns_of(rank, streams):  # 4 streams are best in the first process, and worst in the second
        return {1: 100, 2: 90}.get(streams, 50 if rank == 0 else 200)

    first, second = choose_in_both(pair, monkeypatch, ns_of)
    assert first == second
    assert first[0].streams == 2


def test_capture_that_fails_in_one_process_fails_in_all(pair, monkeypatch):
    def capture(rank, plan):
        if rank == 1 and plan.num_streams > 2:
            raise RuntimeError("no room")
        return plan

    (recipe, error), (other, own_error) = choose_in_both(
        pair, monkeypatch, lambda rank, streams: 100 - streams, capture
    )
    assert recipe == other
    assert recipe is None or recipe.streams <= 2
    assert "rank 1 could not capture" in error
    assert "no room" in own_error


def test_failure_in_one_process_is_told_to_all(pair):
    def act(agreement, rank):
        def fails():
            if rank == 1:
                raise RuntimeError("no room")

        with pytest.raises(NotTogetherError, match="rank 1 could not"):
            together(agreement, fails)
        return together(agreement, lambda: rank)

    assert in_both_processes(pair, act) == [0, 1]


def test_a_switch_that_another_thread_sets_meanwhile_is_a_failure(pair):
    switches, before = present(), torch.backends.cudnn.benchmark

    def set_one():
        torch.backends.cudnn.benchmark = not before

    def act(agreement, rank):
        assert together(agreement, lambda: rank, switches) == rank
        agreement.board.gather(0, "see the same")
        with pytest.raises(NotTogetherError, match=r"could not capture .*switches meanwhile"):
            together(agreement, set_one, switches)

    try:
        in_both_processes(pair, act)
    finally:
        torch.backends.cudnn.benchmark = before


def test_candidate_plans_can_be_made_again_from_their_recipes():
    graph = towers(0)
    costs = Roofline().estimate(graph)
    budget = Scheduling().budget_bytes(plan_serial(graph))
    serial, *others = choice.propose(graph, replace(costs, wait_ns=100), Scheduling())
    assert serial.recipe is None
    for each in others:
        assert choice.plan_by(each.recipe, graph, replace(costs, wait_ns=100), budget) == each.plan


@pytest.mark.parametrize("known", ["both", "one"])
def test_other_hyperparameters_are_heard_by_who_asks_and_who_declines(pair, known, monkeypatch):
    monkeypatch.setattr(agreement, "differing", lambda told, group: DataParallelError(f"here {told}"))

    def act(own, rank):
        if known == "both" or rank == 0:
            own.hyperparameters = Hyperparameters([f"lr = 0.{rank}"])
        try:
            return own.ask(5, "begin") if rank == 0 else own.decline("begin")
        except DataParallelError as error:
            own.hyperparameters = NOT_KNOWN
            return str(error), own.ask(7, "begin")

    first, second = in_both_processes(pair, act)
    if known == "both":
        assert first == ("here ['lr = 0.0']", [7, 7])
        assert second == ("here ['lr = 0.1']", [7, 7])
    else:
        assert (first, second) == ([5, NO], None)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([["a = 1", "b = 2"], ["a = 1"], ["b = 2"]], None),
        ([[], ["a = 1"], ["a = 2"]], "rank 1 has a = 1 where rank 2 has a = 2"),
        ([["a = 1"], ["a = 2"], ["a = 1"]], "ranks 0, 2 have a = 1 where rank 1 has a = 2"),
        ([["a = 1", "a = 2"], ["a = 1", "a = 3"]], "rank 0 has a = 2 where rank 1 has a = 3"),
    ],
)
def test_numbers_that_not_all_processes_have_are_not_compared(told, says, monkeypatch):
    def gather(into, mine, group):
        into[:] = told

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(told))
    error = differing(told[0], None)
    assert (error is None) if says is None else (says in str(error))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((["a = 1"], ["b = 1"]), (["a = 1"], []), False),  # one does not know its updates
        ((["a = 1"], ["b = 1"]), (["a = 1"], ["b = 2"]), True),
        ((["a = 1"], ["b = 1"]), (["a = 2"], ["b = 1"]), True),
        ((["a = 1"], []), ([], ["a = 1"]), False),
    ],
)
def test_what_both_know_is_compared(left, right, expected):
    assert marks_differ([Hyperparameters(*left).mark, NOT_KNOWN.mark, Hyperparameters(*right).mark]) is expected


def test_comparison_is_left_out_where_it_is_not_wanted(pair, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_WITHOUT", agreement.COMPARISON)

    def act(own, rank):
        own = Agreement(own.board)
        own.hyperparameters = Hyperparameters([f"lr = {rank}"])
        return own.ask(5, "begin")

    assert in_both_processes(pair, act) == [[5, 5], [5, 5]]


def test_processes_whose_graphs_read_other_numbers_go_on(pair, monkeypatch):
    monkeypatch.setattr(agreement, "differing", lambda told, group: None)

    def act(own, rank):
        own.hyperparameters = Hyperparameters([f"{rank} = 1"])
        return own.ask(5, "begin"), own.hyperparameters.mark

    (first, mark), (second, other) = in_both_processes(pair, act)
    assert first == second == [5, 5]
    assert mark != other


def test_an_optimizer_within_another_is_not_compared():
    weight = torch.nn.Parameter(torch.ones(2))
    outer, inner = torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight], 0.1)
    outer.inner = inner
    assert optimizers_of([weight], []) == [outer]


# --- around it --------------------------------------------------------------------------------------------------------


class Named:
    """A capture or a process group."""

    def __init__(self, name, done):
        self.name, self.done = name, done

    def release(self):
        self.done.append(f"released {self.name}")


@pytest.fixture
def done(monkeypatch):
    """What has ended, in order."""
    ended = []

    def destroy_process_group(group=None):
        ended.append(f"destroyed {'all' if group is None else group.name}")

    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "destroy_process_group", destroy_process_group)
    monkeypatch.setattr(shutdown, "_captures", WeakKeyDictionary())
    monkeypatch.setattr(shutdown, "_beside", WeakKeyDictionary())
    return ended


def test_captures_are_released_before_the_group_ends(done):
    original, group = dist.destroy_process_group, Named("group", done)
    captures = [Named(number, done) for number in range(2)]
    for capture in captures:
        shutdown.release_before_shutdown(capture, group)
    dist.destroy_process_group()
    assert done == ["released 0", "released 1", "destroyed all"]
    assert dist.destroy_process_group is dist.distributed_c10d.destroy_process_group is original


def test_another_group_ends_alone_and_one_ends_after_what_is_beside_it(done):
    group, other, beside, unused = (Named(name, done) for name in ("group", "other", "beside", "unused"))
    capture = Named("capture", done)
    shutdown.release_before_shutdown(capture, group)
    for each in (beside, unused):
        shutdown.end_with(group, each)
    dist.destroy_process_group(other)
    shutdown.destroy(group, unused)
    assert done == ["destroyed other", "destroyed unused"]
    del done[:]
    dist.destroy_process_group(group)
    assert done == ["released capture", "destroyed beside", "destroyed group"]
    dist.destroy_process_group()


# --- which communicator -----------------------------------------------------------------------------------------------


class Collective:
    """Of a step, in one of the processes."""

    operation = "all_reduce"

    def __init__(self, done):
        self.group, self.memory, self.held = Named("group", done), torch.ones(2), SimpleNamespace(make_ready=int)
        self.memories = (self.memory,)
        self.issued_on = []

    def perform(self, memory):
        current = communicators.communicators_of(self.group).current
        self.issued_on.append(None if current is None else current.group.name)


def settle_in_both(pair, monkeypatch, done, ns_of, opens=lambda rank, ctas: None, noted=None):
    """What each process settles on when the step takes ``ns_of(rank, ctas)``, ``"group"`` on the process group."""

    def new(group, device, max_ctas):
        opens(ranks[group], max_ctas)
        return Named(max_ctas, done)

    def compare(own, base, rewind, agree):
        agree(5)
        return ns_of(*own), ns_of(*base)

    monkeypatch.setattr(communicators, "new_communicator", new)
    monkeypatch.setattr(lockstep, "compare", compare)
    monkeypatch.setattr(trial.Trials, "_prepare", lambda self, stack, *ways: (*map(self._capture, ways), None))
    ranks, collectives = {}, [Collective(done) for _ in pair]

    def act(agreement, rank):
        collective = collectives[rank]
        ranks[collective.group] = rank

        def capture(communicator):
            return SimpleNamespace(graph=(rank, "group" if communicator is None else communicator.max_ctas))

        trials = LockstepTrials(agreement, capture, None, None, None)
        settled = choose_communicator(agreement, [collective], trials, noted if rank == 0 else None)
        current = communicators.communicators_of(collective.group).current
        assert current is settled.communicator
        return settled.noted, settled.told, collective.issued_on

    return in_both_processes(pair, act)


def test_quickest_communicator_is_taken_and_others_are_closed(pair, monkeypatch, done):
    def ns_of(rank, ctas):
        return {"group": 100, None: 101, 16: 90, 8: 80 if rank == 0 else 95}[ctas] * 10**6

    first, second = settle_in_both(pair, monkeypatch, done, ns_of)
    assert first == second
    noted, told, issued_on = first
    assert noted == {"is_own": True, "max_ctas": 16}
    assert "of at most 16 CTAs (the process group itself 100.000 ms," in told
    assert issued_on == [None, 16, 8]  # each warmed up; the one without a number has the name ``None``
    assert sorted(done) == ["destroyed 8", "destroyed 8", "destroyed None", "destroyed None"]


def test_process_group_is_kept_where_nothing_is_clearly_faster(pair, monkeypatch, done):
    for noted, told, _ in settle_in_both(pair, monkeypatch, done, lambda _, ctas: 1000 if ctas == "group" else 995):
        assert noted == {"is_own": False, "max_ctas": None}
        assert told.startswith("collectives on the process group itself (")
    assert len(done) == 6


def test_communicator_that_cannot_be_opened_in_one_process_is_used_in_none(pair, monkeypatch, done):
    def opens(rank, ctas):
        if rank == 1 and ctas == 16:
            raise RuntimeError("no room")

    for noted, told, _ in settle_in_both(pair, monkeypatch, done, lambda *_: 1, opens):
        assert not noted["is_own"]
        assert "the process group itself: rank 1 could not" in told


@pytest.mark.parametrize(
    ("asked", "noted", "issued_on"),
    [
        ("group", None, []),
        ("own", None, [None]),
        ("6", None, [6]),
        ("auto", {"is_own": True, "max_ctas": 4}, [4]),
        ("auto", {"is_own": False, "max_ctas": None}, []),
        ("auto", {"is_own": "no such"}, [None, 16, 8]),
    ],
)
def test_communicator_that_is_asked_for_or_was_chosen_before_is_not_tried(
    asked, noted, issued_on, pair, monkeypatch, done
):
    monkeypatch.setenv("MILLSTREAM_COMMUNICATOR", asked)
    tried = []
    for settled, _, seen in settle_in_both(pair, monkeypatch, done, lambda *who: tried.append(who) or 1, noted=noted):
        assert seen == issued_on
        assert settled["is_own"] is (len(issued_on) == 1)
    assert bool(tried) is (len(issued_on) > 1)


@pytest.mark.parametrize("asked", ["0", "-1", "many", "²"])
def test_unknown_communicator_is_an_error(asked, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_COMMUNICATOR", asked)
    with pytest.raises(ArgumentError, match="is none of 'auto', 'group', 'own'"):
        communicators.communicator_wanted()


# --- where collectives go ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["", "auto", "between", "captured"])
def test_where_collectives_go_can_be_asked_for(monkeypatch, asked):
    monkeypatch.setenv("MILLSTREAM_COLLECTIVES", asked)
    assert collectives_wanted() == (asked or "auto")


def test_unknown_place_for_collectives_is_an_error(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_COLLECTIVES", "nowhere")
    with pytest.raises(ArgumentError, match="'nowhere' is none of 'auto', 'captured', 'between'"):
        collectives_wanted()
