"""Networks: folding changes nothing, library twins compute the same, sizes are those that are quoted."""

import pytest
import torch
from torch import nn

from benchmarks.cases.models import CPU_INFERENCE, CPU_TRAINING, HOST_INFERENCE, HOST_TRAINING, INFERENCE, TRAINING
from benchmarks.cases.networks import (
    char_rnn,
    fold_batch_norm,
    gate_lstm,
    normalised_mlp,
    settle,
    small_cnn,
    small_inception,
)

ALL_CASES = (*INFERENCE, *TRAINING, *CPU_INFERENCE, *CPU_TRAINING, *HOST_INFERENCE, *HOST_TRAINING)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_sizes():
    assert count(char_rnn()) == 240_321
    model = normalised_mlp()
    assert (len(list(model.parameters())), len(list(model.buffers()))) == (161, 159)


def test_case_names_can_be_listed_on_a_command_line():
    names = [case.name for case in ALL_CASES]
    assert len(set(names)) == len(names)
    assert not any("," in name for name in names)


@pytest.mark.parametrize("make", [small_cnn, small_inception])
def test_batch_norm_is_folded_away(make):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(4, 3, 16, 16)
    settle(model, x)
    with torch.no_grad():
        before = model(x)
        num_norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        assert fold_batch_norm(model, x) == num_norms
        assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


def test_a_convolution_with_a_second_reader_is_not_folded_wrongly():
    class TwoReaders(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.convolution(x)
            return self.norm(y) + y

    model, x = TwoReaders().eval(), torch.randn(4, 3, 16, 16)
    settle(model, x)
    with pytest.raises(RuntimeError, match="folding BatchNorm changed"):
        fold_batch_norm(model, x)


@pytest.mark.parametrize("model", [char_rnn(hidden=8), gate_lstm(hidden=8)])
def test_library_twins_compute_the_same(model):
    tokens = torch.randint(65, (3, 5))
    torch.testing.assert_close(model.library_twin()(tokens), model(tokens))
