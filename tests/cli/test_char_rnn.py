"""The job char-rnn: its cell, its text and its batches."""

from itertools import islice

import pytest
import torch

from millstream.cli.training.char_rnn import (
    UNKNOWN,
    CharRnn,
    LstmCell,
    Sample,
    Sizes,
    cut_batches,
    make_corpus,
    make_job,
    read_text,
    write_text,
)
from millstream.cli.training.job import count_parameters

SIZES = Sizes(layers=2, hidden=4, sequence=3, batch=2)


def test_classic_size_has_the_classic_number_of_parameters():
    assert count_parameters(CharRnn(vocabulary=65, hidden=128, layers=2)) == 240_321


def test_cell_equals_torch():
    ours, theirs = LstmCell(3, 5), torch.nn.LSTMCell(3, 5)
    order = torch.tensor([0, 1, 3, 2])  # torch has the value before the output gate
    with torch.no_grad():
        for mine, weight, bias in (
            (ours.input_map, theirs.weight_ih, theirs.bias_ih),
            (ours.hidden_map, theirs.weight_hh, theirs.bias_hh),
        ):
            mine.weight.copy_(weight.view(4, 5, -1)[order].view(20, -1))
            mine.bias.copy_(bias.view(4, 5)[order].view(20))
    x, h, c = torch.randn(7, 3), torch.randn(7, 5), torch.randn(7, 5)
    torch.testing.assert_close(ours(x, h, c), theirs(x, (h, c)))


def test_state_carries_over_a_cut():
    model = CharRnn(vocabulary=6, hidden=4, layers=2)
    codes = torch.randint(6, (2, 10))
    whole, last = model(codes, model.first_state(2))
    first, state = model(codes[:, :4], model.first_state(2))
    second, state = model(codes[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(state, last)


def test_rare_characters_become_unknown():
    corpus = make_corpus("aaaabbbccd", max_vocabulary=3)
    assert corpus.vocabulary == "ab" + UNKNOWN
    assert corpus.codes.tolist() == [0] * 4 + [1] * 3 + [2] * 3


def test_ties_go_to_the_smaller_character():
    assert make_corpus("cba", max_vocabulary=2).vocabulary == "a" + UNKNOWN


def test_a_text_that_fits_keeps_all_its_characters():
    corpus = make_corpus("hello", max_vocabulary=9)
    assert corpus.vocabulary == "ehlo"
    assert "".join(corpus.vocabulary[code] for code in corpus.codes) == "hello"


def test_an_unknown_of_the_text_itself_keeps_one_place():
    assert make_corpus(UNKNOWN * 5 + "aab", max_vocabulary=2).vocabulary == "a" + UNKNOWN


def test_targets_are_the_next_characters_and_rows_go_on():
    codes = torch.arange(20)
    steps = list(islice(cut_batches(codes, SIZES, 0), 3))
    assert [inputs.tolist() for inputs, _ in steps] == [
        [[0, 1, 2], [9, 10, 11]],
        [[3, 4, 5], [12, 13, 14]],
        [[6, 7, 8], [15, 16, 17]],
    ]
    assert all((targets == inputs + 1).all() for inputs, targets in steps)


@pytest.mark.parametrize("start", [1, 2, 3, 7])
def test_batches_depend_on_the_step_alone(start):
    codes = torch.randint(9, (25,))
    behind = list(islice(cut_batches(codes, SIZES, 0), start, start + 5))
    torch.testing.assert_close(list(islice(cut_batches(codes, SIZES, start), 5)), behind)


def test_shortest_text_makes_one_batch():
    inputs, targets = next(cut_batches(torch.arange(7), SIZES, 5))
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_sample_depends_on_the_seed_alone():
    model = CharRnn(vocabulary=5, hidden=4, layers=1)
    sample = Sample(length=30, temperature=1.0)
    first = write_text(model, "abcd\n", sample, seed=1)
    torch.manual_seed(99)
    assert write_text(model, "abcd\n", sample, seed=1) == first
    assert write_text(model, "abcd\n", sample, seed=2) != first
    assert len(first) == 30


def test_default_text_is_source_and_the_same_each_time():
    text = read_text(None)
    assert "import" in text
    assert read_text(None) == text


def test_same_seed_same_weights():
    corpus = make_corpus("some text to learn", 65)
    device, sample = torch.device("cpu"), Sample(0, 1.0)
    states = [make_job(corpus, SIZES, sample, device, seed).model.state_dict() for seed in (3, 3, 4)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert not torch.equal(states[0]["decoder.weight"], states[2]["decoder.weight"])
