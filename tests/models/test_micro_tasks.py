"""Tasks that vispe_micro learns from: exact, repeatable, and solvable."""

import numpy as np
import pytest
import torch

from models.micro.episode import Episode, intersection_over_union, sample
from models.micro.geometry import FAMILIES, scene
from models.micro.tasks import task, window


@pytest.mark.parametrize("name", FAMILIES)
def test_families_fill_the_image(name):
    labels, objects, relief = FAMILIES[name][1](np.random.default_rng(3), 96)
    assert labels.shape == objects.shape == relief.shape == (96, 96)
    assert labels.dtype == np.uint8
    assert 0 <= relief.min() <= relief.max() <= 1


def test_tasks_depend_on_the_seed_alone():
    real = [np.random.default_rng(0).integers(0, 255, (3, 70, 90), dtype=np.uint8) for _ in range(3)]
    for seed in range(12):
        one, other = (task(np.random.default_rng(seed), 64, real) for _ in range(2))
        assert one.kind == other.kind
        for name in ("image", "labels", "scribbles"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert one.image.shape == (3, 64, 64)
        assert one.image.dtype == np.float32
        assert 0 <= one.image.min() <= one.image.max() <= 1
        classes = np.unique(one.labels[one.scribbles])
        assert np.array_equal(classes, np.arange(one.labels.max() + 1))  # every phase is shown


def test_scenes_number_their_phases():
    for seed in range(20):
        sample = scene(np.random.default_rng(seed), 64)
        assert np.array_equal(np.unique(sample.labels), np.arange(sample.labels.max() + 1))
        assert sample.labels.max() >= 1


def test_windows_are_cut_from_small_images_too():
    real = [np.full((3, 20, 30), 51, np.uint8)]
    crop = window(np.random.default_rng(0), real, 64)
    assert crop.shape == (3, 64, 64)
    assert np.allclose(crop, 0.2)


def test_sampling_reads_pixels_between_cells():
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")
    maps = torch.stack([2 * y + 0.5, 2 * x + 0.5])  # centres of cells of 2 x 2 pixels
    index = torch.tensor([5 * 24 + 7, 9 * 24 + 20])
    assert torch.allclose(sample(maps, index, 2), torch.tensor([[5.0, 7.0], [9.0, 20.0]]), atol=1e-4)


def test_episode_solves_what_is_linear_and_has_gradients():
    torch.manual_seed(0)
    phases = torch.arange(3).repeat(30)
    centres = 3 * torch.randn(3, 6)
    samples = (centres[phases] + 0.3 * torch.randn(90, 6)).requires_grad_()
    requested = centres[phases] + 0.3 * torch.randn(90, 6)
    episode = Episode()
    scores = episode(samples, phases, requested)
    assert intersection_over_union(scores.argmax(1), phases) > 0.95
    torch.nn.functional.cross_entropy(scores, phases).backward()
    assert float(samples.grad.abs().max()) > 0
    assert all(p.grad is not None for p in episode.parameters())
    assert intersection_over_union(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])) == pytest.approx(
        (1 / 2 + 2 / 3) / 2
    )
