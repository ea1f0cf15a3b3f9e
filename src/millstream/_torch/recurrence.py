"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, recorded as the operators that they consist of.

On the CPU, oneDNN's operator for a whole layer has a backward pass that cannot be run from a graph: it gives no
workspace to fake tensors. PyTorch's decomposition asks a function whether to use that operator: here it does not.

The decomposition compares a layer's number with that of all layers the wrong way round, and never drops anything out.
So each layer is recorded as a network of one layer, with the dropout between them.

Private APIs, tried on torch 2.11 and 2.13. ``MILLSTREAM_WITHOUT=rnn-dropout`` switches the dropout off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions

from millstream._torch.workarounds import Workaround, replaced

WORKAROUND = Workaround("rnn-dropout", "no dropout between the layers of LSTM, GRU and RNN")


@contextlib.contextmanager
def plain_recurrence() -> Iterator[None]:
    """Record the operators of recurrent networks inside the ``with`` block. Not for several threads at once."""
    with contextlib.ExitStack() as stack:
        one_layer = decompositions.one_layer_lstm
        stack.enter_context(replaced(decompositions, "select_one_layer_lstm_function", lambda *_: one_layer))
        if WORKAROUND.applies:
            stack.enter_context(replaced(decompositions, "_rnn_helper", _one_by_one))
        yield


_layers = decompositions._rnn_helper


def _one_by_one(  # noqa: PLR0913 - as PyTorch calls it
    x: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Any,
) -> tuple[Tensor, list[Any]]:
    """Run all layers; ``hidden`` and ``params`` have one item for each layer and direction."""
    finals: list[Any] = []
    directions = 2 if bidirectional else 1
    for first in range(0, num_layers * directions, directions):
        own = slice(first, first + directions)
        if first and train and dropout:
            x = torch.dropout(x, dropout, train=True)
        x, final = _layers(x, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, batch_first, layer)
        finals += final
    return x, finals
