"""Rotation of images by any angle: the smallest images."""

import pytest
import torch

from vispe.errors import ShapeError
from vispe.images.symmetry.warp import rotate


def test_images_of_2_by_2_pixels_rotate_and_smaller_ones_raise():
    image = torch.rand(1, 1, 2, 2)
    for turns in range(4):
        assert torch.equal(rotate(image, 90 * turns), torch.rot90(image, turns, (-2, -1)))
    with pytest.raises(ShapeError, match=r"at least 2 x 2 pixels, got \(1, 1, 1, 5\)"):
        rotate(torch.rand(1, 1, 1, 5), 90)
