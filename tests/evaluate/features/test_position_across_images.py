import numpy as np
import pytest
import torch

from vispe.errors import OptionError, ShapeError
from vispe.evaluate.features.position_across_images import position_across_images
from vispe.evaluate.probe.targets import ramp


def random(count, seed=0, shape=(9, 11)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(12, *shape, generator=generator) for _ in range(count)]


def position(target, shape=(9, 11)):
    return torch.from_numpy(ramp(target, shape)).permute(2, 0, 1).float()


def test_linear_position_is_found_by_all_and_noise_by_none():
    plain = random(6)
    linear = [torch.cat([m, 3 * position("lr"), 3 * position("ud")]) for m in plain]
    position_probe, none = position_across_images(linear), position_across_images(plain)
    for name in ("ridge", "knn", "mlp"):
        assert none.median(name, "lr") < 0.1
        assert position_probe.median(name, "ud") > (0.95 if name == "ridge" else 0.3)
        assert np.median(position_probe.shuffled[name]) < 0.05
    assert position_probe.to_dict()["images"] == 6
    assert position_probe.tokens == 3 * 99


@pytest.mark.slow
def test_position_that_is_not_linear_is_found_by_the_network_and_by_neighbours_only():
    # a circle that is passed once has the same regression line for every phase, except at its ends
    phase = 6 * (position("lr") - 0.5)
    circle = [torch.cos(2 * phase), torch.sin(2 * phase), torch.cos(phase)]
    maps = [torch.cat([m[:1], *circle]) for m in random(6)]
    result = position_across_images(maps, targets=["lr"])
    assert result.median("ridge", "lr") < 0.2
    assert min(result.median("mlp", "lr"), result.median("knn", "lr")) > 0.5


def test_position_of_single_images_does_not_count():
    # each image encodes its columns along its own direction
    directions = torch.randn(8, 12, generator=torch.Generator().manual_seed(3))
    maps = [m + 5 * d[:, None, None] * position("lr") for m, d in zip(random(8), directions, strict=True)]
    assert position_across_images(maps, ["ridge", "knn"], targets=["lr"]).median("ridge", "lr") < 0.3


@pytest.mark.slow
def test_images_of_several_sizes_and_reproducible():
    maps = [*random(2), *random(2, 1, (7, 5))]
    first, second = (position_across_images(maps, tokens=50, seed=4) for _ in range(2))
    assert all(np.array_equal(first.r2[n], second.r2[n]) for n in first.r2)
    assert first.tokens == 50


def test_too_few_images_and_other_shapes():
    with pytest.raises(OptionError, match="got folds=2 and 1 image"):
        position_across_images(random(1))
    with pytest.raises(ShapeError, match="one number of channels"):
        position_across_images([torch.zeros(3, 4, 4), torch.zeros(4, 4, 4)])
    with pytest.raises(OptionError, match="regressors"):
        position_across_images(random(2), ["forest"])
