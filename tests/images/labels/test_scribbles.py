"""Rasterization of strokes: a disk drawn along each line, for every width and at bounded cost."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from skimage.draw import disk, line

from tests.cases import cases
from vispe.errors import InputError
from vispe.images.labels import scribbles
from vispe.images.labels.scribbles import draw_strokes
from vispe.images.labels.stroke_pixels import Stroke, check_work, stroke_pixels


def reference_mask(points, width, h, w):
    """Return the mask of a disk drawn at every pixel of the lines of `skimage.draw.line`."""
    mask = np.zeros((h, w), bool)
    ends = np.floor(points + 0.5).astype(int)
    middle = 0.0 if width % 2 else 0.5
    pen = disk((middle, middle), width / 2)
    for (x0, y0), (x1, y1) in pairwise(np.repeat(ends, 2, 0) if len(ends) == 1 else ends):
        rows, columns = (p[:, None] + t for p, t in zip(line(y0, x0, y1, x1), pen, strict=True))
        inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
        mask[rows[inside], columns[inside]] = True
    return mask


@cases("seed", range(60))
def test_stroke_pixels_equal_a_disk_drawn_along_the_lines(seed):
    rng = np.random.default_rng(seed)
    h, w = rng.integers(5, 60, 2)
    points = rng.uniform(-30, 80, (rng.integers(1, 5), 2)).round(2)
    if seed % 3 == 0:
        points[:, seed % 2] = points[0, seed % 2]  # along an axis
    width = int(rng.integers(1, 70))
    mask = np.zeros((h, w), bool)
    mask[stroke_pixels(Stroke((1,), width, points, 0), h, w)] = True
    assert np.array_equal(mask, reference_mask(points, width, h, w))


def test_repeated_and_distant_points_are_drawn_within_seconds():
    start = time.process_time()
    zigzag = np.array([[1, 1], [250, 250]] * 200, float)
    assert (
        len(np.unique(np.stack(stroke_pixels(Stroke((1,), 1024, zigzag, 0), 256, 256)), axis=1)[0]) == 256**2
    )
    rows, _ = stroke_pixels(Stroke((1,), 3, np.array([[0.0, 0.0], [1e9, 1e9]]), 0), 256, 256)
    assert rows.max() == 255
    assert time.process_time() - start < 10  # each took minutes without a bound


def test_strokes_of_excessive_area_raise_before_drawing(monkeypatch):
    large_strokes = [
        Stroke((k % 2 + 1,), 1024, np.array([[1, 1], [4000, 4000]] * 50, float), 0) for k in range(50)
    ]
    monkeypatch.setattr(scribbles, "stroke_pixels", None)
    with pytest.raises(
        InputError, match=r"a\.json: strokes must cover at most .* Use fewer strokes, or a narrower pen"
    ):
        draw_strokes(Path("a.json"), large_strokes, (1, 4096, 4096))
    small_strokes = [Stroke((1,), 16, np.cumsum(np.ones((500, 2)), 0), 0)] * 500
    check_work("a.json", small_strokes, 4096, 4096)
