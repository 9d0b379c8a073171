"""Coarse features: interpolated to pixels, at selected pixels, and projected before interpolation."""

import numpy as np
import torch

from tests.cases import cases
from vispe.segment.features.coarse_features import CoarseMaps
from vispe.segment.features.spill_cache import SpillCache
from vispe.segment.features.tiles import Region


class Maps(CoarseMaps):
    """Maps of one tile of 3 x stride by 5 x stride pixels; the page covers its centre."""

    def __init__(self, stride, offset, frame, dtype=torch.float32):
        super().__init__([Region(0, 3 * stride, 0, 5 * stride)], offset, frame)
        self.values = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)

    def coarse(self, number, again=False):
        return self.values


CASES = [(2, (0, 0), (6, 10)), (7, (3, 2), (15, 29)), (16, (5, 8), (43, 71))]


@cases(("stride", "offset", "frame"), CASES)
def test_planes_are_interpolated_bilinearly(stride, offset, frame):
    maps = Maps(stride, offset, frame)
    actual = maps.planes(0)
    assert actual.shape == (4, *frame)
    hats = []  # weight of each cell at each pixel, along rows and columns
    for pixels, start, cells in zip(frame, offset, (3, 5), strict=True):
        position = ((np.arange(pixels) + start + 0.5) / stride - 0.5).clip(0, cells - 1)
        hats.append((1 - np.abs(position[:, None] - np.arange(cells))).clip(0, None))
    expected = np.einsum("yr,xc,frc->fyx", *hats, maps.values.numpy())
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@cases(("stride", "offset", "frame"), CASES)
def test_selected_pixels_and_projections_equal_those_of_the_planes(stride, offset, frame):
    maps = Maps(stride, offset, frame)
    planes = maps.planes(0)
    y, x = np.nonzero(np.random.default_rng(0).random(frame) < 0.5)
    np.testing.assert_allclose(maps.at(0, y, x), planes[:, y, x].T, atol=1e-6)
    weight, mean = torch.randn(3, 4), torch.randn(4)
    expected = torch.einsum("kf,fyx->kyx", weight, torch.from_numpy(planes) - mean[:, None, None])
    torch.testing.assert_close(maps.project(0, weight, mean), expected, atol=1e-5, rtol=1e-5)


@cases("room", ["memory", "file", "none"])
def test_a_spill_cache_returns_each_tensor_once(room):
    cache = SpillCache(400 if room == "memory" else 40, disk=0 if room == "none" else 4000)
    values = [torch.randn(2, 5, n) for n in (1, 3, 2, 4)]
    for number, value in enumerate(values):
        cache.put(bytes([number]), value)
        cache.put(bytes([number]), value + 1)  # ignored: the first value is stored
    for number in (2, 0, 3, 1):
        actual = cache.take(bytes([number]))
        if room == "none" and number:
            assert actual is None
        else:
            assert torch.equal(actual, values[number])
        assert cache.take(bytes([number])) is None
    cache.put(b"again", values[1])
    assert (cache.take(b"again") is None) == (room == "none")
    file = cache._file
    del cache
    assert file is None or file.closed
