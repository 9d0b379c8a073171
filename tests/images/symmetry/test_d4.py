import itertools

import numpy as np
import pytest
import torch

from tests.cases import cases
from tests.evaluate.rotation.cases import noise, vit
from vispe.errors import OptionError, ShapeError, UnknownName
from vispe.evaluate.rotation import D4, Element, VisionModel, element, equivariance, fit_to_patches

SHAPES = [(1, 1), (2, 2), (3, 3), (2, 5), (6, 1), (7, 4)]


@cases("shape", SHAPES)
@cases("g", D4, ids=lambda g: g.name)
def test_undo_inverts_apply_and_elements_are_index_permutations(g, shape):
    x = torch.arange(2.0 * shape[0] * shape[1]).reshape(2, *shape)
    transformed = g.apply(x)
    assert transformed.shape[-2:] == (shape if g.turns % 2 == 0 else shape[::-1])
    assert torch.equal(g.undo(transformed), x)
    assert torch.equal(transformed.flatten(1), x.flatten(1)[:, g.index(shape)])
    np.testing.assert_array_equal(g.apply(x.numpy()), transformed.numpy())
    np.testing.assert_array_equal(g.undo(transformed.numpy()), x.numpy())


def test_elements_form_the_dihedral_group():
    x = torch.arange(12).reshape(3, 4)
    outputs = {tuple(g.apply(x).flatten().tolist()) + tuple(g.apply(x).shape) for g in D4}
    assert len(outputs) == 8
    for a, b in itertools.product(D4, D4):
        assert torch.equal(a.after(b).apply(x), a.apply(b.apply(x)))
    for g in D4:
        assert g.inverse.after(g) == element("identity")
        assert element(g.name) is g


def test_element_names_match_the_transforms():
    x = torch.arange(6).reshape(2, 3)
    assert torch.equal(element("transpose").apply(x), x.T)
    assert torch.equal(element("hflip").apply(x), x.flip(1))
    assert torch.equal(element("vflip").apply(x), x.flip(0))
    assert torch.equal(element("rot90").apply(x), torch.rot90(x))
    assert torch.equal(element("antitranspose").apply(x), x.flip(0, 1).T)


def test_invalid_elements_raise():
    with pytest.raises(UnknownName, match=r"Unknown element 'rot45' of D4\. Did you mean 'rot"):
        element("rot45")
    with pytest.raises(OptionError, match=r"must be 0, 1, 2 or 3 .* got turns=4"):
        Element(4)
    with pytest.raises(ShapeError, match=r"last two axes, got shape \(5,\)"):
        D4[1].apply(torch.zeros(5))


@cases("patch", [1, 2, 5, 7, 16])
@cases("how", ["auto", "crop", "pad"])
def test_fit_to_patches_is_equivariant_or_raises(patch, how):
    for shape in [(35, 48), (36, 37), (33, 50)]:
        x = noise(shape)
        remainders, missing = ([n % patch for n in shape], [-n % patch for n in shape])
        impossible = {
            "crop": any(r % 2 for r in remainders),
            "pad": any(m % 2 for m in missing),
            "auto": any(r % 2 and m % 2 for r, m in zip(remainders, missing, strict=True)),
        }[how]
        if impossible:
            with pytest.raises(OptionError, match=r"about the same centre|by whole pixels"):
                fit_to_patches(x, patch, how)
            continue
        fitted, note = fit_to_patches(x, patch, how)
        assert [n % patch for n in fitted.shape[-2:]] == [0, 0]
        assert bool(note) == (fitted.shape != x.shape)
        for g in D4:
            assert torch.equal(fit_to_patches(g.apply(x), patch, how)[0], g.apply(fitted))


def test_odd_sides_with_even_patches_need_equivariant_resampling():
    x = noise((33, 48))
    with pytest.raises(OptionError, match=r"33 px and patches of 16 px .*Use resample=True"):
        fit_to_patches(x, 16)
    fitted, note = fit_to_patches(x, 16, resample=True)
    assert fitted.shape == (3, 32, 48)
    assert note == "The height was resampled from 33 to 32 px."
    assert torch.equal(fitted, (x[:, :-1] + x[:, 1:]) / 2)
    for g in D4:
        assert torch.equal(fit_to_patches(g.apply(x), 16, resample=True)[0], g.apply(fitted))


def test_fit_to_patches_returns_a_note_and_raises_if_impossible():
    x = noise((72, 73))
    fitted, note = fit_to_patches(x, 7)
    assert fitted.shape == (3, 70, 77)
    assert (
        note
        == "The height was cropped from 72 to 70 px by equal margins, the width was mirrored from 73 to 77 px."
    )
    assert torch.equal(fitted[:, :, 2:75], x[:, 1:71])
    assert torch.equal(fitted[:, :, :2], x[:, 1:71, [2, 1]])
    assert fit_to_patches(x, 1) == (x, "")
    with pytest.raises(ShapeError, match="3 px cannot be padded by 7 reflected px"):
        fit_to_patches(noise((3, 17)), 17)
    with pytest.raises(OptionError, match="how must be one of auto, crop, pad, got 'centre'"):
        fit_to_patches(x, 7, "centre")
    with pytest.raises(OptionError, match="cannot be fitted about the same centre with how='crop'"):
        fit_to_patches(x, 7, "crop")


def test_off_centre_crops_break_equivariance_and_centred_ones_do_not():
    model = VisionModel(vit("alibi2d"))

    def top_left(images):
        return model(images[..., : images.shape[-2] // 7 * 7, : images.shape[-1] // 7 * 7])

    options = {"measures": ["error"], "controls": False, "elements": [D4[3], D4[5]]}
    for shape in [(44, 44), (45, 45), (37, 40), (44, 30)]:
        x = noise(shape)
        off_centre = equivariance(top_left, [x], **options)[0].values[0]
        centred = equivariance(model, [fit_to_patches(x, 7)[0]], **options)[0].values[0]
        assert off_centre > 0.1
        assert centred < 1e-13
