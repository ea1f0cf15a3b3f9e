"""Steps with a model under ``fully_shard``, against the same run eagerly."""

import pytest

from tests.parallel import fsdp_checks as checks


@pytest.mark.parametrize("kind", [each for each in checks.KINDS if each != "replicas of shards"])
def test_training_is_as_with_eager_fully_shard(pair, kind):
    first, second = pair.run(checks.same_as_eager, kind, 5)
    assert first == second == checks.NUM_EXCHANGES.get(kind, first)


def test_eager_calls_go_on_between_replays(pair):
    assert pair.run(checks.alternating, 9) == [[1, 5]] * 2


def test_one_process_clips_what_it_has(pair):
    assert pair.run(checks.of_one_process, 4) == [True, True]


def test_checkpoints_are_those_of_eager_steps(pair, tmp_path):
    assert pair.run(checks.through_checkpoint, str(tmp_path)) == [1, 1]


def test_processes_may_replay_capture_or_run_plain_python(pair):
    assert pair.run(checks.one_rank_apart, 9) == [2, 2]


def test_step_is_one_program_with_its_collectives(agreeing_pair):
    assert agreeing_pair.run(checks.one_program, 8) == [[True, True, True]] * 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("placement", "shard_placement_fn"),
        ("mesh", "a mesh of two dimensions without all processes"),
        ("offload", "an offload policy"),
        ("group", "several modules in one group"),
        ("block", "a block under torch.compile"),
        ("hook", "a collective of its own"),
        ("norm", "of which each process has some rows"),
        ("reads", "of which each process has some rows"),
        ("scaler", "a GradScaler"),
    ],
)
def test_what_is_not_built_runs_as_plain_python(pair, kind, reason):
    for told in pair.run(checks.refused, kind):
        assert len(told) == 1
        assert reason in told[0]


def test_models_without_a_wrapper_are_divided(pair):
    assert pair.run(checks.without_wrapper, 6) == [["scale", "other"]] * 2


def test_models_that_cannot_be_divided_are_refused(pair):
    for held, optimizer in pair.run(checks.cannot_be_divided):
        assert "would be left with the whole parameter" in held
        assert "is Norms, which shard_parameters does not know" in optimizer


def test_four_processes(many):
    """Some have no row of a parameter."""
    assert len({*many.run(checks.same_as_eager, "several passes", 4)}) == 1


def test_replicas_of_shards_are_one_program(many):
    assert many.run(checks.one_program, 6, "replicas of shards") == [[True, True, True]] * many.size
