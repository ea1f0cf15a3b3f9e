"""Networks that no model library has, and what makes random networks fit to be compared.

A random network is a poor witness: its signal dies or explodes with depth, and then every output is equal, or none is.
``settle`` gives it signals of ordinary size that depend on the input; ``fold_batch_norm`` removes the BatchNorms that
inference does not need.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

# --- dense -----------------------------------------------------------------------------------------------------------


def mlp(widths: list[int], *, last_relu: bool = False) -> nn.Sequential:
    """Return linear layers with ReLU between them, initialised so that the signal keeps its size."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Towers(nn.Module):
    """Independent MLP towers over one input, joined at the end, as in recommenders."""

    def __init__(self, num_towers: int = 8, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        self.towers = nn.ModuleList(mlp([width] * (depth + 1), last_relu=True) for _ in range(num_towers))
        self.top = nn.Linear(num_towers * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.cat([tower(x) for tower in self.towers], 1))


class Recommender(nn.Module):
    """Multi-gate mixture of experts (Ma et al., KDD 2018): embeddings, experts, a gate and a tower for each task."""

    def __init__(
        self, num_fields: int = 16, vocab: int = 1000, num_dense: int = 13, num_experts: int = 8, num_tasks: int = 2
    ) -> None:
        super().__init__()
        features = 16 * num_fields + num_dense
        self.embeddings = nn.ModuleList(nn.Embedding(vocab, 16) for _ in range(num_fields))
        self.experts = nn.ModuleList(mlp([features, 256, 128], last_relu=True) for _ in range(num_experts))
        self.gates = nn.ModuleList(nn.Linear(features, num_experts) for _ in range(num_tasks))
        self.towers = nn.ModuleList(mlp([128, 64, 1]) for _ in range(num_tasks))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        embedded = (embed(sparse[:, field]) for field, embed in enumerate(self.embeddings))
        x = torch.cat([dense, *embedded], 1)
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = (torch.softmax(gate(x), 1).unsqueeze(2).mul(experts).sum(1) for gate in self.gates)
        return torch.cat([tower(part) for tower, part in zip(self.towers, mixed, strict=True)], 1)


def normalised_mlp(num_layers: int = 53, width: int = 64, classes: int = 10) -> nn.Sequential:
    """Return a network with as many parameters and buffers as ResNet-50 (161 and 159), and hardly any work to do."""
    blocks = [
        nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(num_layers)
    ]
    return nn.Sequential(*blocks, nn.Linear(width, classes))


# --- recurrent -------------------------------------------------------------------------------------------------------

State = tuple[Tensor, Tensor]  # hidden state, cell


class GateCell(nn.Module):
    """LSTM cell with two matrix products for each gate: eight, free to run side by side."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.from_input = nn.ModuleList(nn.Linear(features, hidden) for _ in range(4))
        self.from_state = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, state: State) -> State:
        hidden, cell = state
        i, f, g, o = (
            a(x) + b(hidden) for a, b in zip(self.from_input.children(), self.from_state.children(), strict=True)
        )
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell

    def weights(self) -> list[Tensor]:
        """Weights and biases as ``nn.LSTM`` keeps them: from the input, from the state; gates i, f, g, o stacked."""
        from_input, from_state = (
            torch.cat([gate.get_parameter("weight") for gate in side]) for side in (self.from_input, self.from_state)
        )
        bias = torch.cat([gate.get_parameter("bias") for gate in self.from_input])
        return [from_input, from_state, bias, torch.zeros_like(bias)]


class Cell(nn.Module):
    """LSTM cell of char-rnn: one matrix product from below, one from the past."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(features, 4 * hidden)
        self.from_state = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, state: State) -> State:
        hidden, cell = state
        i, f, g, o = (self.from_input(x) + self.from_state(hidden)).chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell

    def weights(self) -> list[Tensor]:
        """Weights and biases as ``nn.LSTM`` keeps them."""
        return [self.from_input.weight, self.from_state.weight, self.from_input.bias, self.from_state.bias]


class CustomLSTM(nn.Module):
    """A language model whose LSTM is written out, cell by cell and step by step."""

    def __init__(self, source: nn.Module, cells: list[GateCell] | list[Cell], hidden: int, vocab: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.source, self.cells, self.decoder = source, nn.ModuleList(cells), nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.source(tokens)
        states = [(x.new_zeros(len(tokens), self.hidden),) * 2 for _ in self.cells]
        outputs = []
        for step in range(tokens.shape[1]):
            below = x[:, step]
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(below, states[layer])
                below = states[layer][0]
            outputs.append(self.decoder(below))
        return torch.stack(outputs, 1)

    def library_twin(self) -> LibraryLSTM:
        """Return the same function, with the same weights, built on ``nn.LSTM``; embedding and decoder are shared."""
        return LibraryLSTM(self.source, [cell.weights() for cell in self.cells], self.hidden, self.decoder)  # type: ignore[operator]


class LibraryLSTM(nn.Module):
    """A language model on ``nn.LSTM``, which is cuDNN's on a GPU: what a custom cell is measured beside."""

    def __init__(self, source: nn.Module, weights: list[list[Tensor]], hidden: int, decoder: nn.Linear) -> None:
        super().__init__()
        first = weights[0][0]
        self.source, self.decoder = source, decoder
        self.lstm = nn.LSTM(
            first.shape[1], hidden, len(weights), batch_first=True, device=first.device, dtype=first.dtype
        )
        with torch.no_grad():
            for own, given in zip(self.lstm.all_weights, weights, strict=True):
                for parameter, value in zip(own, given, strict=True):
                    parameter.copy_(value)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.source(tokens))[0])


class OneHot(nn.Module):
    """Tokens to unit vectors."""

    units: Tensor

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.register_buffer("units", torch.eye(vocab), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.units)


def gate_lstm(vocab: int = 96, hidden: int = 512, layers: int = 2) -> CustomLSTM:
    """Return an LSTM with its gates apart."""
    return CustomLSTM(nn.Embedding(vocab, hidden), [GateCell(hidden, hidden) for _ in range(layers)], hidden, vocab)


def char_rnn(vocab: int = 65, hidden: int = 128, layers: int = 2) -> CustomLSTM:
    """Return the classic char-rnn: one-hot characters; 240,321 parameters as it comes."""
    cells = [Cell(hidden if layer else vocab, hidden) for layer in range(layers)]
    return CustomLSTM(OneHot(vocab), cells, hidden, vocab)


# --- attention -------------------------------------------------------------------------------------------------------


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP; no dropout, so that two runs can be compared."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """A small GPT."""

    def __init__(self, layers: int = 4, width: int = 512, heads: int = 8, vocab: int = 1024, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Gpt2(Transformer):
    """GPT-2 small: 12 layers of 768, 124 million parameters; the head has the weights of the embedding."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocab: int = 50304, length: int = 1024
    ) -> None:
        super().__init__(layers, width, heads, vocab, length)  # 50257 tokens, padded to a multiple of 64 as is usual
        for embedding in (self.tokens, self.positions):  # of one size, or results would hardly depend on the tokens
            nn.init.normal_(embedding.weight, std=0.02)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight


class VisionTransformer(nn.Module):
    """ViT-small with patches of 16, the mean over all of them in place of a token for the class."""

    def __init__(self, layers: int = 12, width: int = 384, heads: int = 6, image: int = 224, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn((image // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


# --- convolutional ---------------------------------------------------------------------------------------------------


def conv_norm(fan_in: int, fan_out: int, kernel: int | tuple[int, int], stride: int = 1) -> nn.Sequential:
    """Return convolution, BatchNorm and ReLU; the size of the image changes only by the stride."""
    padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(fan_in, fan_out, kernel, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(fan_out), nn.ReLU())


class Squeeze(nn.Module):
    """Each channel scaled by what all of them are on average (Hu et al., CVPR 2018)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = max(8, width // 4)
        self.gate = nn.Sequential(nn.Conv2d(width, inner, 1), nn.ReLU(), nn.Conv2d(inner, width, 1), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3), keepdim=True))


class InvertedResidual(nn.Module):
    """A depthwise convolution between two of one pixel, around a shortcut."""

    def __init__(self, fan_in: int, inner: int, fan_out: int, kernel: int, stride: int, *, squeeze: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if inner != fan_in:
            layers += [nn.Conv2d(fan_in, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish()]
        depthwise = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False)
        layers += [depthwise, nn.BatchNorm2d(inner), nn.Hardswish(), *[Squeeze(inner)] * squeeze]
        layers += [nn.Conv2d(inner, fan_out, 1, bias=False), nn.BatchNorm2d(fan_out)]
        self.layers = nn.Sequential(*layers)
        self.is_residual = stride == 1 and fan_in == fan_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.is_residual else self.layers(x)


MOBILE_BLOCKS = (  # kernel, inner width, width, squeeze, stride: those of MobileNetV3-small (Howard et al., ICCV 2019)
    (3, 16, 16, True, 2),
    (3, 72, 24, False, 2),
    (3, 88, 24, False, 1),
    (5, 96, 40, True, 2),
    (5, 240, 40, True, 1),
    (5, 240, 40, True, 1),
    (5, 120, 48, True, 1),
    (5, 144, 48, True, 1),
    (5, 288, 96, True, 2),
    (5, 576, 96, True, 1),
    (5, 576, 96, True, 1),
)


def small_mobile(scale: float = 0.5, classes: int = 100) -> nn.Sequential:
    """MobileNetV3-small with its widths scaled."""

    def scaled(width: int) -> int:
        return max(8, int(width * scale + 4) // 8 * 8)

    width = 16
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish()]
    for kernel, inner, fan_out, squeeze, stride in MOBILE_BLOCKS:
        layers.append(InvertedResidual(width, scaled(inner), scaled(fan_out), kernel, stride, squeeze=squeeze))
        width = scaled(fan_out)
    top, features = scaled(576), scaled(1024)
    layers += [nn.Conv2d(width, top, 1, bias=False), nn.BatchNorm2d(top), nn.Hardswish(), nn.AdaptiveAvgPool2d(1)]
    layers += [nn.Flatten(), nn.Linear(top, features), nn.Hardswish(), nn.Linear(features, classes)]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(fan_in, fan_out, 3, stride)
        self.second = conv_norm(fan_out, fan_out, 3)[:2]
        self.shortcut = conv_norm(fan_in, fan_out, 1, stride)[:2] if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut, as in ResNet-50."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_norm(fan_in, width, 1), conv_norm(width, width, 3, stride))
        self.last = conv_norm(width, 4 * width, 1)[:2]
        widens = stride > 1 or fan_in != 4 * width
        self.shortcut = conv_norm(fan_in, 4 * width, 1, stride)[:2] if widens else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(self.body(x)) + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> Classifier:
    """Return ResNet-50, or one with other numbers of blocks."""
    layers: list[nn.Module] = [conv_norm(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    fan_in = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(fan_in, width << stage, 2 if stage and not number else 1))
            fan_in = 4 * (width << stage)
    return Classifier(nn.Sequential(*layers), fan_in, 1000)


class Classifier(nn.Module):
    """Features, mean over the image, linear layer."""

    def __init__(self, features: nn.Sequential, width: int, classes: int = 10) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def small_cnn(width: int = 16) -> Classifier:
    """Return a ResNet for 32×32 images."""
    blocks: list[nn.Module] = [conv_norm(3, width, 3)]
    blocks += [ResidualBlock(width * a, width * b, 1 + (a != b)) for a, b in ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4))]
    return Classifier(nn.Sequential(*blocks), 4 * width)


class InceptionBlock(nn.Module):
    """Four branches over one input, concatenated."""

    def __init__(self, fan_in: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                conv_norm(fan_in, width, 1),
                nn.Sequential(conv_norm(fan_in, width, 1), conv_norm(width, width, 3)),
                nn.Sequential(
                    conv_norm(fan_in, width, 1), conv_norm(width, width, (1, 5)), conv_norm(width, width, (5, 1))
                ),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_norm(fan_in, width, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def small_inception(num_blocks: int = 4, width: int = 32) -> Classifier:
    """Return an Inception-like network."""
    blocks = [conv_norm(3, width, 3, 2), InceptionBlock(width, width)]
    blocks += [InceptionBlock(4 * width, width) for _ in range(num_blocks - 1)]
    return Classifier(nn.Sequential(*blocks), 4 * width)


# --- fit to be compared ----------------------------------------------------------------------------------------------


@torch.no_grad()
def settle(model: nn.Module, x: Tensor, *, shift: float = 0.0) -> None:
    """Give every BatchNorm random weights, and statistics near (not at) those of the signal that really passes it.

    Statistics drawn at random, as a loaded checkpoint's seem to be, let a hundred-layer network explode or die in half
    precision; the initial ones (0 and 1) would let a forgotten normalisation pass unseen.

    Args:
        model: Changed in place.
        x: A batch of inputs.
        shift: Mean of what each BatchNorm gives, in standard deviations. A positive one keeps most ReLUs open: with
            half of them closed, gradients of a deep random network are chaotic, and those in bfloat16 have nothing to
            do with those in single precision (ResNet-50 and Inception-v3 differ by 130 % of their length).
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    training, momenta = model.training, [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # the statistics of one batch, nothing of the initial ones
        norm.weight.uniform_(0.7, 1.3)
        norm.bias.normal_(shift, 0.1)
    model.train()
    if norms:
        model(x)
    model.train(training)
    for norm, momentum in zip(norms, momenta, strict=True):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.num_batches_tracked is not None
        norm.momentum = momentum
        norm.running_mean += 0.1 * norm.running_var.sqrt() * torch.randn_like(norm.running_mean)
        norm.running_var *= torch.empty_like(norm.running_var).uniform_(0.8, 1.25)
        norm.num_batches_tracked.zero_()


@torch.no_grad()
@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # the check below asks for more than TF32's three digits
def fold_batch_norm(model: nn.Module, x: Tensor) -> int:
    """Fold each BatchNorm that directly follows a convolution into it, and return how many were folded.

    Contract:
        - The convolution's output goes to the BatchNorm: seen by running the model once on ``x``.
        - The model computes the same: compared on ``x``, for a convolution might have a second reader.

    Raises:
        RuntimeError: The folded model computes something else.
    """
    assert not model.training
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []  # holds the tensors, so that no id is used twice

    def note_call(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((module, inputs[0], output))

    watched = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    hooks = [module.register_forward_hook(note_call) for module in watched]
    before = model(x)
    for hook in hooks:
        hook.remove()
    name_of = {module: name for name, module in model.named_modules()}
    once = {module for module, _, _ in calls if sum(module is other for other, _, _ in calls) == 1}
    producer = {id(output): module for module, _, output in calls if isinstance(module, nn.Conv2d) and module in once}
    num_folded = 0
    for norm, source, _ in calls:
        convolution = producer.get(id(source))
        if not isinstance(norm, nn.BatchNorm2d) or norm not in once or not isinstance(convolution, nn.Conv2d):
            continue
        assert norm.running_mean is not None
        assert norm.running_var is not None
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        parent, _, attribute = name_of[norm].rpartition(".")
        setattr(model.get_submodule(parent), attribute, without_norm(norm))
        num_folded += 1
    error = ((model(x) - before).norm() / before.norm()).item()
    if not error < 1e-3:
        raise RuntimeError(f"folding BatchNorm changed the model's output by {error:.1e}, expected rounding only")
    return num_folded


def without_norm(norm: nn.BatchNorm2d) -> nn.Module:
    """Return what is left of a BatchNorm when its normalisation is gone: timm's carry an activation."""
    rest = [getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)]
    return nn.Sequential(*(module for module in rest if not isinstance(module, nn.Identity)))
