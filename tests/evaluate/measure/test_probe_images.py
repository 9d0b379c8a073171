"""Images of probe, health and audit: squares of files as the model gets them, noise and textures by a seed."""

import numpy as np
import pytest
import torch
from PIL import Image

from vispe.errors import ShapeError
from vispe.evaluate.evaluated import load_evaluated_model
from vispe.evaluate.measure.probe_images import load_images


@pytest.fixture(scope="module")
def subject():
    return load_evaluated_model("test_vit", weights="random", img_size=64, device="cpu")


def test_files_are_cropped_to_the_centre_and_normalised(subject, tmp_path):
    page = np.zeros((64, 100), np.uint8)
    page[:, 18:82] = 255
    Image.fromarray(page).save(tmp_path / "wide.png")
    small = np.random.default_rng(0).integers(0, 255, (30, 31, 3), np.uint8)
    Image.fromarray(small).save(tmp_path / "small.png")
    files = [tmp_path / "wide.png", tmp_path / "small.png"]
    images, names, _ = load_images(subject, files)
    assert names == ("wide.png", "small.png")
    torch.testing.assert_close(images[0], (torch.ones(3, 64, 64) - subject.mean) / subject.std)
    assert images[1].shape == (3, 64, 64)
    with pytest.raises(ShapeError, match="Convert the image first"):
        subject.tensor(np.zeros((8, 8, 2)))


@pytest.mark.parametrize("kind", ["noise", "textures"])
def test_made_images_differ_and_follow_the_seed(subject, kind):
    one, two, other = (list(load_images(subject, (), **{kind: 4}, seed=seed)[0]) for seed in (0, 0, 1))
    assert [tuple(image.shape) for image in one] == [(3, 64, 64)] * 4
    for k in range(4):
        assert torch.equal(one[k], two[k])
        assert all(not torch.equal(one[k], one[j]) for j in range(k))
        assert not torch.equal(one[k], other[k])
        raw = one[k] * subject.std + subject.mean
        assert raw.min() > -1e-5
        assert raw.max() < 1 + 1e-5
        assert raw.max() - raw.min() > 0.3
