"""Placements: shifts by whole patches with an exact inverse; random draws cover all offsets and follow a curriculum."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from vispe.errors import OptionError, ShapeError
from vispe.images.symmetry import Placement, common_part

SIDE = st.integers(1, 5)


def values(h, w, seed=0):
    return torch.randn(2, 3, h, w, generator=torch.Generator().manual_seed(seed))


@st.composite
def placements(draw, count=1):
    content, canvas = ((draw(SIDE), draw(SIDE)) for _ in range(2))
    pairs = tuple(zip(content, canvas, strict=True))
    offsets = [tuple(draw(st.integers(1 - n, size - 1)) for n, size in pairs) for _ in range(count)]
    fill = draw(st.sampled_from(["mean", "mirror", "image"]))
    return [Placement(content, canvas, offset, fill) for offset in offsets]


@given(placements(), st.integers(1, 3))
def test_undo_restores_the_visible_patches_exactly(samples, side):
    (placement,) = samples
    image = values(*(n * side for n in placement.content))
    behind = values(4, 7, seed=1) if placement.fill == "image" else None
    canvas = placement.apply(image, behind)
    assert canvas.shape == (2, 3, *(n * side for n in placement.canvas))
    top, left, bottom, right = (edge * side for edge in placement.seen)
    assert torch.equal(placement.undo(canvas), image[..., top:bottom, left:right])
    if all(
        0 <= o <= size - n
        for n, size, o in zip(placement.content, placement.canvas, placement.offset, strict=True)
    ):
        assert torch.equal(placement.undo(canvas), image)


@given(placements(count=2))
def test_common_part_selects_patches_visible_in_both_placements(samples):
    first, second = samples
    image = values(*first.content)
    behind = values(4, 7, seed=1) if first.fill == "image" else None
    visible = [torch.zeros(first.content, dtype=torch.bool) for _ in samples]
    for mask, placement in zip(visible, samples, strict=True):
        top, left, bottom, right = placement.seen
        mask[top:bottom, left:right] = True
    common = visible[0] & visible[1]
    if not common.any():
        with pytest.raises(OptionError, match="Placements need equal contents"):
            common_part(first, second)
        return
    result = [placement.undo(placement.apply(image, behind)) for placement in common_part(first, second)]
    assert torch.equal(result[0], result[1])
    assert torch.equal(result[0].flatten(2), image[..., common])


def test_pixels_and_tokens_shift_equally():
    placement = Placement((2, 3), (4, 4), (-1, 2))
    tokens = values(2, 3)
    pixels = tokens.repeat_interleave(4, -2).repeat_interleave(4, -1)
    assert torch.equal(placement.apply(pixels)[..., ::4, ::4], placement.apply(tokens))


def test_fill_modes_mean_mirror_and_image():
    image = torch.tensor([[1.0, 2.0, 3.0]])
    placement = Placement((1, 3), (1, 8), (0, 3))
    assert placement.apply(image, mean=0.5).tolist() == [[0.5, 0.5, 0.5, 1, 2, 3, 0.5, 0.5]]
    mirror = Placement((1, 3), (1, 8), (0, 3), "mirror")
    assert mirror.apply(image).tolist() == [[3, 2, 1, 1, 2, 3, 3, 2]]
    outside = Placement((1, 1), (1, 5), (0, 4), "mirror")
    assert outside.apply(image[:, :1]).tolist() == [[1] * 5]
    behind = torch.tensor([[7.0, 8.0]])
    image_fill = Placement((1, 3), (1, 8), (0, 3), "image")
    assert image_fill.apply(image, behind).tolist() == [[7, 8, 8, 1, 2, 3, 8, 7]]
    assert behind.tolist() == [[7, 8]], "the input was modified"
    with pytest.raises(OptionError, match="got fill='image' and behind=None"):
        image_fill.apply(image)
    with pytest.raises(OptionError, match="got fill='mean' and an image"):
        placement.apply(image, behind)


def test_draw_samples_all_offsets_uniformly():
    generator = np.random.default_rng(0)
    samples = [Placement.draw(generator, content=(2, 3), canvas=(3, 5)) for _ in range(600)]
    counts = {offset: sum(p.offset == offset for p in samples) for offset in {p.offset for p in samples}}
    assert set(counts) == {(a, b) for a in range(2) for b in range(3)}
    assert min(counts.values()) > 60
    smaller = [Placement.draw(generator, content=(5, 5), canvas=(4, 5)) for _ in range(50)]
    assert {p.offset for p in smaller} == {(0, 0), (-1, 0)}


def test_the_canvas_grows_with_progress():
    def side(progress, **options):
        samples = Placement.draw(np.random.default_rng(0), progress, **options)
        return samples.canvas[0]

    options = {"content": (4, 4), "canvas": (12, 12), "curriculum": 0.5}
    assert [side(p, **options) for p in (0, 0.1, 0.25, 0.49, 0.5, 1.0)] == [5, 5, 8, 11, 12, 12]
    assert side(0.0, **options | {"curriculum": 0.0}) == 12
    assert [side(p, **options | {"canvas": (2, 2)}) for p in (0, 0.5)] == [3, 2]
    assert side(0.0, **options | {"canvas": (4, 4)}) == 4


def test_draw_is_reproducible_from_the_generator():
    samples = [Placement.draw(np.random.default_rng(5), 0.3, content=(3, 3), canvas=(9, 9)) for _ in range(2)]
    assert samples[0] == samples[1]


@cases(
    ("options", "words"),
    [
        ({"offset": (0, 4)}, r"is outside of the canvas \(4, 4\)"),
        ({"offset": (-2, 0)}, "is outside of the canvas"),
        ({"fill": "black"}, "fill must be one of mean, mirror, image, got 'black'"),
        ({"box": (0, 0, 3, 2)}, "must be within the visible patches"),
    ],
)
def test_invalid_placements_raise(options, words):
    with pytest.raises(OptionError, match=words):
        Placement((2, 2), (4, 4), **options)


def test_values_of_the_wrong_shape_raise():
    placement = Placement((2, 2), (4, 4))
    with pytest.raises(
        ShapeError, match=r"the content has \(2, 2\) patches, got values of shape \(3, 4, 5\)"
    ):
        placement.apply(torch.zeros(3, 4, 5))
    with pytest.raises(ShapeError, match=r"the canvas has \(4, 4\) patches"):
        placement.undo(torch.zeros(3, 2, 2))
    with pytest.raises(OptionError, match=r"fractions from 0 to 1, got progress=1\.5"):
        Placement.draw(np.random.default_rng(0), 1.5, content=(2, 2), canvas=(4, 4))
