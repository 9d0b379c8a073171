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
def test_elements_are_undone_and_are_index_permutations(g, shape):
    x = torch.arange(2.0 * shape[0] * shape[1]).reshape(2, *shape)
    moved = g.apply(x)
    assert moved.shape[-2:] == (shape if g.turns % 2 == 0 else shape[::-1])
    assert torch.equal(g.undo(moved), x)
    assert torch.equal(moved.flatten(1), x.flatten(1)[:, g.index(shape)])
    np.testing.assert_array_equal(g.apply(x.numpy()), moved.numpy())
    np.testing.assert_array_equal(g.undo(moved.numpy()), x.numpy())


def test_the_elements_form_the_group_of_the_square():
    x = torch.arange(12).reshape(3, 4)
    recorded = {tuple(g.apply(x).flatten().tolist()) + tuple(g.apply(x).shape) for g in D4}
    assert len(recorded) == 8
    for a, b in itertools.product(D4, D4):
        assert torch.equal(a.after(b).apply(x), a.apply(b.apply(x)))
    for g in D4:
        assert g.inverse.after(g) == element("identity")
        assert element(g.name) is g


def test_names_say_what_happens():
    x = torch.arange(6).reshape(2, 3)
    assert torch.equal(element("transpose").apply(x), x.T)
    assert torch.equal(element("hflip").apply(x), x.flip(1))
    assert torch.equal(element("vflip").apply(x), x.flip(0))
    assert torch.equal(element("rot90").apply(x), torch.rot90(x))
    assert torch.equal(element("antitranspose").apply(x), x.flip(0, 1).T)


def test_what_is_no_element_is_refused():
    with pytest.raises(UnknownName, match=r"Unknown element 'rot45' of D4\. Did you mean 'rot"):
        element("rot45")
    with pytest.raises(OptionError, match=r"must be 0, 1, 2 or 3 .* got turns=4"):
        Element(4)
    with pytest.raises(ShapeError, match=r"last two axes, got shape \(5,\)"):
        D4[1].apply(torch.zeros(5))


@cases("patch", [1, 2, 5, 7, 16])
@cases("how", ["auto", "crop", "pad"])
def test_fitting_commutes_with_every_element_or_is_refused(patch, how):
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


def test_an_odd_side_with_an_even_patch_needs_resampling_which_commutes():
    x = noise((33, 48))
    with pytest.raises(OptionError, match=r"33 px and patches of 16 px .*Use resample=True"):
        fit_to_patches(x, 16)
    fitted, note = fit_to_patches(x, 16, resample=True)
    assert fitted.shape == (3, 32, 48)
    assert note == "The height was resampled from 33 to 32 px."
    assert torch.equal(fitted, (x[:, :-1] + x[:, 1:]) / 2)
    for g in D4:
        assert torch.equal(fit_to_patches(g.apply(x), 16, resample=True)[0], g.apply(fitted))


def test_fitting_says_what_it_did_and_what_it_cannot():
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


def test_an_off_centre_crop_is_caught_and_a_centred_one_is_exact():
    model = VisionModel(vit("alibi2d"))

    def top_left(images):
        return model(images[..., : images.shape[-2] // 7 * 7, : images.shape[-1] // 7 * 7])

    options = {"measures": ["error"], "controls": False, "elements": [D4[3], D4[5]]}
    for shape in [(44, 44), (45, 45), (37, 40), (44, 30)]:
        x = noise(shape)
        bad = equivariance(top_left, [x], **options)[0].values[0]
        good = equivariance(model, [fit_to_patches(x, 7)[0]], **options)[0].values[0]
        assert bad > 0.1
        assert good < 1e-13
