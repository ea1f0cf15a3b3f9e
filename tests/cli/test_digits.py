"""The job digits: its images and its batches."""

from itertools import islice

import pytest
import torch

from millstream.cli.training.digits import HELD_OUT, draw_batches, load_images, make_model, measure_accuracy


@pytest.fixture(scope="module")
def images():
    return load_images()


def test_images_are_split(images):
    assert images.pictures.shape == (1797 - HELD_OUT, 1, 8, 8)
    assert images.test_pictures.shape == (HELD_OUT, 1, 8, 8)
    assert images.pictures.min() == 0
    assert images.pictures.max() == 1
    assert images.digits.unique().tolist() == images.test_digits.unique().tolist() == list(range(10))


@pytest.mark.parametrize("start", [1, 9, 10, 25])
def test_batches_depend_on_the_step_alone(images, start):
    behind = list(islice(draw_batches(images, 140, seed=5, start=0), start, start + 3))
    torch.testing.assert_close(list(islice(draw_batches(images, 140, seed=5, start=start), 3)), behind)


def test_an_epoch_shows_no_image_twice_and_the_next_has_another_order(images):
    batches = list(islice(draw_batches(images, 143, seed=0, start=0), 20))
    first, second = (torch.cat([pictures for pictures, _ in batches[i : i + 10]]).flatten(1) for i in (0, 10))
    assert len(first.unique(dim=0)) == len(first)
    assert not torch.equal(first, second)


def test_accuracy_leaves_mode_and_statistics_alone(images):
    model = make_model(width=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert 0 <= measure_accuracy(model, images, torch.device("cpu")) <= 1
    assert model.training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
