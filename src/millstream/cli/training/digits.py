"""The job ``digits``: a small convolutional network with BatchNorm learns scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from millstream.cli.training.job import Batch, Carry, Job, count_parameters
from millstream.errors import ArgumentError

NUM_CLASSES = 10
HELD_OUT = 360  # of 1,797 images: a fifth
LEARNING_RATE = 0.05
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class Sizes:
    """How large the model and its batches are."""

    batch: int
    width: int


@dataclass(frozen=True)
class Images:
    """Pictures of (images, 1, 8, 8) with values from 0 to 1, and which digit each shows; some are kept for testing."""

    pictures: Tensor
    digits: Tensor
    test_pictures: Tensor
    test_digits: Tensor


def make_model(width: int) -> nn.Sequential:
    """Return three convolutions, each with BatchNorm and ReLU, and a linear classifier."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, width, 1),
        *block(width, 2 * width, 2),
        *block(2 * width, 4 * width, 2),
        nn.Flatten(),
        nn.Linear(4 * width * 2 * 2, NUM_CLASSES),
    )


def make_job(images: Images, sizes: Sizes, device: torch.device, seed: int) -> Job:
    """Make the job; the same arguments give the same weights and batches.

    Raises:
        ArgumentError: There are fewer images than one batch holds.
    """
    if sizes.batch > len(images.digits):
        raise ArgumentError(f"--batch {sizes.batch} is more than the {len(images.digits):,} images to learn from")
    torch.manual_seed(seed)
    model = make_model(sizes.width).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
    )

    def train_step(pictures: Tensor, digits: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
        loss = F.cross_entropy(model(pictures), digits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), carry

    return Job(
        name="digits",
        title=f"3 convolutions from {sizes.width} channels, batch {sizes.batch}, "
        f"{count_parameters(model):,} parameters; {len(images.digits):,} images",
        identity=asdict(sizes) | {"seed": seed},
        device=device,
        unit="images",
        units_per_step=sizes.batch,
        steps=500,
        model=model,
        optimizer=optimizer,
        step=train_step,
        carry=(),
        batches=lambda start: draw_batches(images, sizes.batch, seed, start),
        show=lambda: f"right on {measure_accuracy(model, images, device):.1%} of {HELD_OUT} images it has never seen",
    )


def load_images() -> Images:
    """Load scikit-learn's digits, shuffled once and for all, the last ``HELD_OUT`` kept for testing.

    Raises:
        ArgumentError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ArgumentError("the job digits needs scikit-learn: pip install scikit-learn") from error
    pixels, names = load_digits(return_X_y=True)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(pixels, dtype=torch.float32).div(16).view(-1, 1, 8, 8)[order]  # pixels are 0 to 16
    digits = torch.tensor(names, dtype=torch.int64)[order]
    return Images(pictures[:-HELD_OUT], digits[:-HELD_OUT], pictures[-HELD_OUT:], digits[-HELD_OUT:])


def draw_batches(images: Images, batch: int, seed: int, start: int) -> Iterator[Batch]:
    """Yield pictures and digits from step ``start`` on, without end; each epoch in an order of its own."""
    per_epoch = len(images.digits) // batch
    step = start
    while True:
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed((seed << 31) + epoch)
        order = torch.randperm(len(images.digits), generator=generator)
        chosen = order[place * batch : (place + 1) * batch]
        yield images.pictures[chosen], images.digits[chosen]
        step += 1


@torch.no_grad()
def measure_accuracy(model: nn.Module, images: Images, device: torch.device) -> float:
    """Return the share of held-out images that the model names right; leaves the model in the mode it was in."""
    was_training = model.training
    model.eval()
    guesses = model(images.test_pictures.to(device)).argmax(dim=1).cpu()
    model.train(was_training)
    return (guesses == images.test_digits).float().mean().item()
