"""Recipes for packages of models: sentence-transformers, torch_geometric."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.api import executables


def test_sentence_transformers():
    pytest.importorskip("sentence_transformers")
    transformers = pytest.importorskip("transformers")
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer import modules

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes))
    pooling = modules.Pooling(16)
    pair = [{"input_ids": torch.randint(50, (4, 6)), "attention_mask": torch.ones(4, 6, dtype=torch.long)}] * 2
    optimizer = torch.optim.AdamW(bert.parameters(), lr=1e-3)

    # shown: sentence_transformers
    def embed(features):
        tokens = bert(**features).last_hidden_state
        return pooling({**features, "token_embeddings": tokens})["sentence_embedding"]

    @ms.step
    def train_step(anchors, positives):
        similarities = 20 * util.cos_sim(embed(anchors), embed(positives))
        loss = F.cross_entropy(similarities, torch.arange(len(similarities), device=similarities.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    # end of shown
    for _ in range(4):
        loss = train_step(*pair)
    assert loss.isfinite()
    assert len(executables(train_step)) == 1


def test_graph_network():
    pytest.importorskip("torch_geometric")
    from torch_geometric import transforms
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    def graph():
        return Data(x=torch.randn(6, 8), edge_index=torch.randint(6, (2, 12)), y=torch.randint(3, (1,)))

    # shown: graph_network
    normalize = transforms.GCNNorm()  # once for each graph, as a dataset's transform, and not in each layer

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = GCNConv(8, 16, normalize=False)
            self.second = GCNConv(16, 3, normalize=False)

        def forward(self, data):
            hidden = self.first(data.x, data.edge_index, data.edge_weight).relu()
            out = self.second(hidden, data.edge_index, data.edge_weight)
            return global_mean_pool(out, data.batch, len(data.y))

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    @ms.step
    def train_step(data):
        loss = F.cross_entropy(net(data), data.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    # end of shown
    for _ in range(4):
        loss = train_step(Batch.from_data_list([normalize(graph()) for _ in range(2)]))
    assert loss.isfinite()
    assert len(executables(train_step)) <= 2  # numbers of edges differ: one for those seen first, one for all
