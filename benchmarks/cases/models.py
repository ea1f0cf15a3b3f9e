"""All cases: which network, on which inputs, in which precision, trained how.

Every network has random weights and random statistics (``networks.settle``), every input is random; timm and
torchvision give the networks that they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.cases.networks import (
    Gpt2,
    Recommender,
    Towers,
    Transformer,
    char_rnn,
    fold_batch_norm,
    gate_lstm,
    mlp,
    normalised_mlp,
    settle,
    small_cnn,
    small_inception,
    small_mobile,
)

Batch = tuple[Tensor, ...]
MakeModel = Callable[[bool], nn.Module]  # the argument asks for a tiny one
MakeBatch = Callable[[bool], Batch]


def shape(*full: int, tiny: tuple[int, ...] | None = None) -> MakeBatch:
    """Return a maker of one normally distributed input."""
    return lambda small: (torch.randn(tiny if small and tiny else full),)


def tokens(vocab: int, *full: int, tiny: tuple[int, ...] | None = None) -> MakeBatch:
    """Return a maker of one input of random tokens."""
    return lambda small: (torch.randint(vocab, tiny if small and tiny else full),)


def to_channels_last(model: nn.Module) -> None:
    """Lay out the weights of convolutions with the channels last."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def labelled(batch: MakeBatch, classes: int) -> MakeBatch:
    """Return a maker of images and classes."""
    return lambda small: (x := batch(small)[0], torch.randint(classes, (len(x),)))


def language(vocab: int, *full: int, tiny: tuple[int, ...]) -> MakeBatch:
    """Return a maker of tokens and the tokens to predict."""
    make = tokens(vocab, *full, tiny=tiny)
    return lambda small: (*make(small), *make(small))


def timm_model(name: str, small: bool) -> nn.Module:
    """A network of timm; a tiny one differs only by its images."""
    del small
    import timm

    return timm.create_model(name, pretrained=False)


def torchvision_model(name: str, small: bool) -> nn.Module:
    """A network of torchvision."""
    del small
    import torchvision

    return torchvision.models.get_model(name, weights=None)


# --- inference -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inference:
    """A model in evaluation mode and two batches of inputs, on a device."""

    model: nn.Module
    first: Batch
    second: Batch
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class InferenceCase:
    """A network to be run without gradients.

    Attributes:
        name: As in the results.
        model: Makes the network.
        batch: Makes a batch of inputs.
        dtype: Precision of weights and floating inputs.
        estimate_s: Seconds the whole case takes on an H200.
    """

    name: str
    model: MakeModel
    batch: MakeBatch
    dtype: torch.dtype = torch.float16
    estimate_s: float = 60.0

    def make(self, device: torch.device, *, tiny: bool = False, channels_last: bool = False) -> Inference:
        """Make the model, with BatchNorm folded into convolutions, and its inputs."""
        torch.manual_seed(0)
        model = self.model(tiny).to(device).eval()
        images = self.batch(tiny)[0].dim() == 4
        if images:
            samples = torch.cat([self.batch(tiny)[0] for _ in range(4)])[:8].to(device)
            settle(model, samples)
            fold_batch_norm(model, samples)
        model = model.to(self.dtype)
        layout = torch.preserve_format
        if images and channels_last:
            layout = torch.channels_last
            to_channels_last(model)
        batches = [tuple(self._place(x, device, layout) for x in self.batch(tiny)) for _ in range(2)]
        return Inference(model, batches[0], batches[1], device, self.dtype)

    def _place(self, x: Tensor, device: torch.device, layout: torch.memory_format) -> Tensor:
        return x.to(device, self.dtype, memory_format=layout) if x.is_floating_point() else x.to(device)


def image_case(name: str, batch: int, size: int, tiny_size: int, estimate_s: float) -> InferenceCase:
    """Case of a timm network on images."""
    make = shape(batch, 3, size, size, tiny=(min(batch, 2), 3, tiny_size, tiny_size))
    return InferenceCase(f"{name} b{batch}", partial(timm_model, name), make, estimate_s=estimate_s)


def tower_model(small: bool) -> nn.Module:
    return Towers(width=32) if small else Towers()


INFERENCE = (
    InferenceCase("towers", tower_model, shape(16, 512, tiny=(16, 32)), torch.bfloat16, estimate_s=40),
    image_case("inception_v3", 1, 299, 128, estimate_s=90),
    image_case("inception_v3", 32, 299, 128, estimate_s=100),
    image_case("hrnet_w18", 1, 224, 64, estimate_s=180),
    image_case("nasnetalarge", 1, 331, 96, estimate_s=300),
    image_case("resnet50", 1, 224, 64, estimate_s=60),
    InferenceCase(
        "squeezenet1_1 b1",
        partial(torchvision_model, "squeezenet1_1"),
        shape(1, 3, 224, 224, tiny=(1, 3, 64, 64)),
        estimate_s=40,
    ),
    InferenceCase(
        "lstm 2x512 b8",
        lambda small: gate_lstm(hidden=32 if small else 512),
        tokens(96, 8, 32, tiny=(8, 4)),
        estimate_s=150,
    ),
)


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingCase:
    """A network, its batches and its optimizer.

    Attributes:
        name: As in the results.
        model: Makes the network.
        batch: Makes inputs and targets.
        optimizer: Class of the optimizer.
        arguments: Its arguments.
        autocast: Type for autocast, or ``None`` to compute in single precision (with TF32).
        clip: Largest norm of the gradient, or ``None``.
        estimate_s: Seconds the whole case takes on an H200.
    """

    name: str
    model: MakeModel
    batch: MakeBatch
    optimizer: type[Optimizer]
    arguments: dict[str, Any]
    autocast: torch.dtype | None = torch.bfloat16
    clip: float | None = None
    estimate_s: float = 120.0

    def make(self, device: torch.device, *, tiny: bool = False) -> Training:
        """Make the model in training mode and three batches; images and their networks are channels_last."""
        torch.manual_seed(0)
        model = self.model(tiny).to(device).train()
        batches = [tuple(x.to(device) for x in self.batch(tiny)) for _ in range(3)]
        settle(model, batches[0][0], shift=OPEN_RELU)
        if batches[0][0].dim() == 4:
            to_channels_last(model)
            batches = [(x.to(memory_format=torch.channels_last), *rest) for x, *rest in batches]
        return Training(self, model, batches, device)


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy, in single precision at least."""
    out = out.float() if out.dtype in (torch.bfloat16, torch.float16) else out
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


@dataclass(frozen=True)
class Training:
    """A model at its start and three batches, on a device. Every side trains its own copy of the model."""

    case: TrainingCase
    model: nn.Module
    batches: list[Batch]
    device: torch.device

    loss_of = staticmethod(loss_of)

    @property
    def dtype(self) -> torch.dtype:
        """Lowest precision in use."""
        return self.case.autocast or torch.float32

    @property
    def has_fused_optimizer(self) -> bool:
        """Whether PyTorch has a fused form of the optimizer."""
        return self.case.optimizer in FUSED

    def make_optimizer(self, model: nn.Module, *, fused: bool = False, capturable: bool = False) -> Optimizer:
        """Make the optimizer, as a user would, or in its fused form where it has one, or fit for a CUDA graph."""
        extra: dict[str, Any] = {}
        if fused and self.has_fused_optimizer:
            extra["fused"] = True
        if capturable and self.device.type == "cuda" and self.case.optimizer is not torch.optim.SGD:
            extra["capturable"] = True
        return self.case.optimizer(model.parameters(), **self.case.arguments, **extra)

    def make_step(self, model: Any, optimizer: Optimizer, *, precise: bool = False) -> Callable[..., Tensor]:
        """Return the training step as a user would write it; ``precise`` leaves autocast out."""
        kind, dtype, clip, loss_of = self.device.type, self.dtype, self.case.clip, self.loss_of
        autocast = self.case.autocast is not None and not precise

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(kind, dtype if autocast else torch.bfloat16, enabled=autocast):
                out = model(x)
            loss = loss_of(out, y)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step


FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
SGD = {"lr": 1e-4, "momentum": 0.9}
OPEN_RELU = 2.0


def image_training(name: str, batch: int, size: int, tiny_size: int, estimate_s: float) -> TrainingCase:
    """Case of a timm network, trained with SGD and momentum."""
    images = shape(batch, 3, size, size, tiny=(8, 3, tiny_size, tiny_size))
    return TrainingCase(
        f"{name} b{batch}",
        partial(timm_model, name),
        labelled(images, 1000),
        torch.optim.SGD,
        SGD,
        estimate_s=estimate_s,
    )


def transformer(small: bool) -> nn.Module:
    return Transformer(2, 64, 4) if small else Transformer()


TRAINING = (
    image_training("resnet50", 8, 224, 64, estimate_s=240),
    image_training("resnet50", 32, 224, 64, estimate_s=240),
    image_training("inception_v3", 16, 299, 128, estimate_s=360),
    TrainingCase(
        "char-rnn lstm 2x128 b50",
        lambda small: char_rnn(hidden=32 if small else 128),
        language(65, 50, 50, tiny=(8, 5)),
        torch.optim.RMSprop,
        {"lr": 2e-3, "alpha": 0.95},
        autocast=None,
        estimate_s=300,
    ),
    TrainingCase(
        "char-rnn lstm 2x512 b50",
        lambda small: char_rnn(hidden=32 if small else 512),
        language(65, 50, 50, tiny=(8, 5)),
        torch.optim.Adam,
        {"lr": 1e-3},
        autocast=None,
        estimate_s=300,
    ),
    TrainingCase(
        "transformer 4x512 b16",
        transformer,
        language(1024, 16, 128, tiny=(2, 16)),
        torch.optim.AdamW,
        {"lr": 3e-4, "weight_decay": 0.1},
        clip=1.0,
        estimate_s=120,
    ),
)


def gpt2(small: bool) -> nn.Module:
    return Gpt2(2, 64, 4, vocab=128, length=32) if small else Gpt2()


def vit_base(small: bool) -> nn.Module:
    """ViT-base with patches of 16; its last layer is zero as it comes, and would hide every other gradient."""
    from torchvision.models import VisionTransformer

    model = (
        VisionTransformer(32, 16, 2, 4, 64, 128, num_classes=1000) if small else torchvision_model("vit_b_16", small)
    )
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


ADAMW = {"lr": 3e-4, "weight_decay": 0.1}

LARGE = (
    TrainingCase(
        "gpt2 small b8 T1024",
        gpt2,
        lambda small: language(128 if small else 50304, 8, 1024, tiny=(2, 32))(small),
        torch.optim.AdamW,
        ADAMW,
        clip=1.0,
        estimate_s=150,
    ),
    TrainingCase(
        "vit_b_16 b64",
        vit_base,
        labelled(shape(64, 3, 224, 224, tiny=(4, 3, 32, 32)), 1000),
        torch.optim.AdamW,
        ADAMW,
        estimate_s=150,
    ),
    TrainingCase(
        "resnet50 b256",
        partial(torchvision_model, "resnet50"),
        labelled(shape(256, 3, 224, 224, tiny=(8, 3, 64, 64)), 1000),
        torch.optim.SGD,
        SGD,
        estimate_s=150,
    ),
)

# --- small ones ------------------------------------------------------------------------------------------------------


def small(make: Callable[[], nn.Module]) -> MakeModel:
    """A network that is small already."""
    return lambda _: make()


small_mlp = small(lambda: mlp([256, 512, 512, 512, 10]))
small_lstm = small(lambda: char_rnn(hidden=64))
small_transformer = small(lambda: Transformer(2, 128, 4, vocab=256, length=64))

CPU_INFERENCE = (
    InferenceCase("mlp b32", small_mlp, shape(32, 256), torch.float32, estimate_s=60),
    InferenceCase("cnn b8", small(small_cnn), shape(8, 3, 32, 32), torch.float32, estimate_s=90),
    InferenceCase("inception-like b1", small(small_inception), shape(1, 3, 64, 64), torch.float32, estimate_s=120),
    InferenceCase("transformer 2x128 b4", small_transformer, tokens(256, 4, 64), torch.float32, estimate_s=90),
    InferenceCase("char-rnn lstm 2x64 b8", small_lstm, tokens(65, 8, 16), torch.float32, estimate_s=120),
)

CPU_BRANCHING = (
    InferenceCase("towers 8x512 b16", small(Towers), shape(16, 512), torch.float32, estimate_s=120),
    InferenceCase(
        "recommender b32",
        small(Recommender),
        lambda _: (torch.randn(32, 13), torch.randint(1000, (32, 16))),
        torch.float32,
        estimate_s=120,
    ),
)

CPU_TRAINING = (
    TrainingCase(
        "mlp b32 step",
        small_mlp,
        labelled(shape(32, 256), 10),
        torch.optim.SGD,
        SGD,
        autocast=None,
    ),
    TrainingCase(
        "cnn b8 step",
        small(small_cnn),
        labelled(shape(8, 3, 32, 32), 10),
        torch.optim.SGD,
        SGD,
        autocast=None,
    ),
    TrainingCase(
        "inception-like b1 step",
        small(small_inception),
        labelled(shape(1, 3, 64, 64), 10),
        torch.optim.SGD,
        SGD,
        autocast=None,
    ),
    TrainingCase(
        "transformer 2x128 b4 step",
        small_transformer,
        language(256, 4, 64, tiny=(4, 64)),
        torch.optim.AdamW,
        {"lr": 3e-4},
        autocast=None,
        clip=1.0,
    ),
    TrainingCase(
        "char-rnn lstm 2x64 b8 step",
        small_lstm,
        language(65, 8, 16, tiny=(8, 16)),
        torch.optim.RMSprop,
        {"lr": 2e-3, "alpha": 0.95},
        autocast=None,
        estimate_s=180,
    ),
)

CPU_START = (  # what a start takes, cold and warm
    TrainingCase(
        "mobilenet v3 small 0.5 b2 step",
        small(small_mobile),
        labelled(shape(2, 3, 64, 64), 100),
        torch.optim.SGD,
        SGD,
        autocast=None,
        estimate_s=400,
    ),
    TrainingCase(
        "gpt2 2 layers b2 step",
        small(lambda: Gpt2(2, 128, 4, vocab=512, length=64)),
        language(512, 2, 64, tiny=(2, 64)),
        torch.optim.AdamW,
        ADAMW,
        autocast=None,
        estimate_s=300,
    ),
)

# --- networks that cost nothing to run, so that only the host's work is left -----------------------------------------

HOST_INFERENCE = (
    InferenceCase("mlp with 10 parameters", small(lambda: mlp([32] * 6)), shape(16, 32), torch.float32, estimate_s=60),
    InferenceCase(
        "mlp with 160 parameters", small(lambda: mlp([32] * 81)), shape(16, 32), torch.float32, estimate_s=90
    ),
)

HOST_TRAINING = (
    TrainingCase(
        "mlp step with 10 parameters",
        small(lambda: mlp([32] * 6)),
        labelled(shape(16, 32), 32),
        torch.optim.SGD,
        SGD,
        autocast=None,
        estimate_s=60,
    ),
    TrainingCase(
        "step with resnet50 state",  # 161 parameters, 159 buffers, 161 momenta
        small(normalised_mlp),
        labelled(shape(16, 64), 10),
        torch.optim.SGD,
        SGD,
        autocast=None,
        estimate_s=120,
    ),
)
