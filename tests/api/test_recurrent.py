"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` in ``ms.compile``: values and gradients of eager PyTorch."""

import copy

import pytest
import torch
from torch import nn

import millstream as ms
from millstream._torch.workarounds import torch_version
from millstream.passes import rolling

pytestmark = pytest.mark.skipif(torch_version() < (2, 12), reason="Dynamo traces them for all threads or for none")


@pytest.fixture(autouse=True)
def _quick():
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.simdlen": 1}):  # which is written in half the time
        yield


@pytest.mark.parametrize(
    "network",
    [nn.LSTM(3, 2, bidirectional=True), nn.GRU(3, 2, batch_first=True), nn.RNN(3, 2, num_layers=2, bias=False)],
    ids=["LSTM", "GRU", "RNN"],
)
def test_training_is_that_of_eager(network):
    network = network.double()
    x, results = torch.randn(3, 4, 3, dtype=torch.float64), []
    for module, run in ((network, network), (other := copy.deepcopy(network), ms.compile(other, strict=True))):
        values, state = run(x)
        (values.square().sum() + sum(each.sum() for each in state)).backward()
        results.append([values.detach(), *(each.grad for each in module.parameters())])
    torch.testing.assert_close(*results)


def test_a_long_sequence_has_one_turn_lowered(monkeypatch):
    monkeypatch.setattr(rolling, "FEWEST_SAVED", 50)
    network = nn.RNN(3, 2)
    compiled = ms.compile(network, strict=True)
    with torch.no_grad():
        x = torch.randn(40, 1, 3)
        torch.testing.assert_close(compiled(x), network(x))
    assert "equal iterations of a loop" in str(ms.explain(compiled))


def test_sequences_of_hundreds_stay_with_python(monkeypatch):
    monkeypatch.setattr("millstream.capture.model.MOST_TURNS", 8)
    network = nn.GRU(3, 2)
    compiled, (short, long) = ms.compile(network), (torch.randn(length, 1, 3) for length in (8, 9))
    with torch.no_grad():
        torch.testing.assert_close(compiled(short), network(short))
        with pytest.warns(ms.FallbackWarning, match="for sequences and batches of up to 128; ms.step traces all"):
            torch.testing.assert_close(compiled(long), network(long))
        assert len(ms.explain(compiled).programs) == 1


def test_packed_sequences_stay_with_python():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.GRU(3, 2)

        def forward(self, x, lengths):
            return self.network(nn.utils.rnn.pack_padded_sequence(x, lengths))[1]

    model, x, lengths = Packed(), torch.randn(4, 2, 3), torch.tensor([4, 2])
    with pytest.warns(ms.FallbackWarning, match="marked as skipped"):
        found = ms.compile(model)(x, lengths)
    torch.testing.assert_close(found, model(x, lengths))


def test_many_lengths_run_as_plain_python_in_the_end(monkeypatch):
    monkeypatch.setattr("millstream.capture.model.RECURRENT_LIMIT", 2)
    network = nn.RNN(2, 2)
    compiled = ms.compile(network)
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.warns(ms.FallbackWarning, match="takes 2 forms"),
    ):
        for length in range(1, 5):
            x = torch.randn(length, 1, 2)
            torch.testing.assert_close(compiled(x), network(x))
