"""Recipes for packages of models: diffusers, sentence-transformers, graphs, segmentation, detection; and RL loops."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import millstream as ms
from millstream.api import executables


def test_diffusers():
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    unet = diffusers.UNet2DModel(8, layers_per_block=1, norm_num_groups=4, attention_head_dim=4, **blocks)
    batches = [torch.randn(2, 3, 8, 8) for _ in range(4)]
    # shown: diffusers
    scheduler = diffusers.DDPMScheduler()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    ema = diffusers.training_utils.EMAModel(unet.parameters())

    @ms.step
    def train_step(images):
        noise = torch.randn_like(images)
        times = torch.randint(scheduler.config.num_train_timesteps, (len(images),), device=images.device)
        predicted = unet(scheduler.add_noise(images, noise, times), times).sample
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for images in batches:
        loss = train_step(images)
        ema.step(unet.parameters())
    # end of shown
    assert loss.isfinite()
    assert len(executables(train_step)) == 1


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


def test_segmentation():
    smp = pytest.importorskip("segmentation_models_pytorch")
    images, masks = torch.randn(2, 3, 32, 32), torch.randint(0, 2, (2, 1, 32, 32)).float()
    # shown: segmentation
    model = smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=1)
    dice, bce = smp.losses.DiceLoss("binary"), smp.losses.SoftBCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    @ms.step
    def train_step(images, masks):
        logits = model(images)
        loss = dice(logits, masks) + bce(logits, masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts = smp.metrics.get_stats(logits.sigmoid(), masks.long(), mode="binary", threshold=0.5)
        return loss, counts

    # end of shown
    for _ in range(4):
        loss, counts = train_step(images, masks)
    assert loss.isfinite()
    assert 0 <= smp.metrics.iou_score(*counts, reduction="micro") <= 1
    assert len(executables(train_step)) == 1


def test_detection():
    detection = pytest.importorskip("torchvision.models.detection")
    target = {"boxes": torch.tensor([[5.0, 5.0, 30.0, 30.0]]), "labels": torch.tensor([1])}
    batches = [(torch.rand(2, 3, 64, 64), [target, target]) for _ in range(2)]
    # shown: detection
    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    model.backbone = ms.compile(model.backbone)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for images, targets in batches:
        loss = sum(model(list(images), targets).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # end of shown
    assert loss.isfinite()
    assert len(executables(model.backbone)) == 2  # forward and backward


def test_preference_loss_of_trl():
    pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    from trl.trainer.utils import selective_log_softmax

    config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=16, n_layer=1, n_head=2, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    beta, optimizer = 0.1, torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = copy.deepcopy(model).eval()

    # shown: preference
    def log_probability(network, tokens):
        logits = network(input_ids=tokens).logits[:, :-1]
        return selective_log_softmax(logits, tokens[:, 1:]).sum(-1)

    @ms.step
    def train_step(chosen, rejected):
        with torch.no_grad():
            expected = log_probability(reference, chosen) - log_probability(reference, rejected)
        margin = log_probability(model, chosen) - log_probability(model, rejected)
        loss = -F.logsigmoid(beta * (margin - expected)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    # end of shown
    for _ in range(4):
        loss = train_step(torch.randint(60, (2, 8)), torch.randint(60, (2, 8)))
    assert loss.isfinite()
    assert len(executables(train_step)) == 1


def test_ppo():
    actor, critic = (nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, size)) for size in (2, 1))
    parameters = [*actor.parameters(), *critic.parameters()]
    size, minibatch_size = 32, 8
    rollout = {name: torch.randn(size) for name in ("log_probs", "advantages", "returns")}
    rollout |= {"observations": torch.randn(size, 4), "actions": torch.randint(2, (size,))}
    # shown: ppo
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)
    clip_fractions = []

    @ms.step
    def update(rollout, rows):
        batch = {name: values[rows] for name, values in rollout.items()}
        choice = torch.distributions.Categorical(logits=actor(batch["observations"]))
        ratio = (choice.log_prob(batch["actions"]) - batch["log_probs"]).exp()
        clip_fractions.append(((ratio - 1).abs() > 0.2).float().mean().item())
        gains = batch["advantages"]
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        policy_loss = torch.max(-gains * ratio, -gains * ratio.clamp(0.8, 1.2)).mean()
        value_loss = 0.5 * (critic(batch["observations"]).flatten() - batch["returns"]).square().mean()
        loss = policy_loss - 0.01 * choice.entropy().mean() + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        return loss

    for _ in range(4):  # epochs
        for rows in torch.randperm(size).split(minibatch_size):
            loss = update(rollout, rows)
    # end of shown
    assert loss.isfinite()
    assert len(clip_fractions) == 16
    assert len(executables(update)) == 1
