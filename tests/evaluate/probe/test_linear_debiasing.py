import numpy as np
import pytest
import torch
from torch.nn import functional

from vispe.errors import OptionError, ShapeError
from vispe.evaluate.probe.linear_debiasing import blank_channels, svd_debias
from vispe.evaluate.probe.positional import positional_probe
from vispe.evaluate.probe.targets import ramp


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_debiased_features_are_unit_and_orthogonal_to_the_noise_directions(k):
    feats, noise = draw(2, 20, 5, 3), draw(1, 20, 35, seed=1)
    out = svd_debias(feats, noise, k=k)
    assert out.shape == feats.shape
    assert out.dtype == feats.dtype
    centred = functional.normalize(noise[0].double(), dim=0)
    u = torch.linalg.svd(centred - centred.mean(1, keepdim=True))[0][:, :k]
    if k < 20:
        torch.testing.assert_close(out.norm(dim=1), torch.ones(2, 5, 3))
        unit = functional.normalize(feats.double(), dim=1)
        residual = unit - torch.einsum("ck,dk,bdhw->bchw", u, u, unit)
        torch.testing.assert_close(out, functional.normalize(residual, dim=1).float())
    assert torch.einsum("ck,bchw->bkhw", u, out.double()).abs().sum() < 1e-4


def test_arrays_and_tensors_and_maps_agree():
    feats, noise = draw(1, 8, 4, 5), draw(1, 8, 4, 5, seed=1)
    one = svd_debias(feats, noise, k=3)
    two = svd_debias(feats.numpy(), noise.flatten(2).numpy(), k=3)
    assert isinstance(two, np.ndarray)
    np.testing.assert_array_equal(one.numpy(), two)
    half = svd_debias(feats.bfloat16(), noise, k=3)
    assert half.dtype == torch.bfloat16


def test_inputs_are_unchanged():
    feats, noise = draw(1, 8, 4, 5), draw(1, 8, 20, seed=1)
    copies = feats.clone(), noise.clone()
    svd_debias(feats, noise, k=3)
    blank_channels(feats, [1, 2])
    assert torch.equal(feats, copies[0])
    assert torch.equal(noise, copies[1])


def test_a_blank_image_without_position_removes_nothing():
    feats = draw(1, 8, 4, 5)
    constant = draw(1, 8, 1, seed=2).expand(1, 8, 20)
    torch.testing.assert_close(svd_debias(feats, constant, k=4), functional.normalize(feats, dim=1))


def test_zero_features_stay_zero():
    out = svd_debias(torch.zeros(1, 8, 2, 2), draw(1, 8, 20), k=3)
    assert torch.equal(out, torch.zeros(1, 8, 2, 2))


def test_several_blank_images_are_pooled():
    feats, noise = draw(1, 8, 4, 5), draw(3, 8, 20, seed=1)
    twice = svd_debias(feats, noise[:1].repeat(2, 1, 1), k=3)
    torch.testing.assert_close(twice, svd_debias(feats, noise[:1], k=3))
    assert not torch.allclose(svd_debias(feats, noise, k=3), twice)


def test_svd_debias_removes_position_that_a_blank_image_shows():
    position = torch.from_numpy(ramp("lr+ud", (12, 14))).float() @ draw(2, 16, seed=5)
    feats = (position + 0.3 * draw(12, 14, 16, seed=6)).permute(2, 0, 1)[None]
    noise = (position + 0.05 * draw(12, 14, 16, seed=7)).permute(2, 0, 1)[None]
    before, after = (
        positional_probe(f.permute(0, 2, 3, 1), step=3).headline
        for f in (feats, svd_debias(feats, noise, k=3))
    )
    assert before > 0.7
    assert after < before - 0.3


def test_svd_debias_refuses_shapes_and_counts_that_cannot_be():
    with pytest.raises(ShapeError, match=r"got \(1, 8, 4, 5\) and \(1, 9, 20\)"):
        svd_debias(draw(1, 8, 4, 5), draw(1, 9, 20))
    with pytest.raises(ShapeError, match="expected feats"):
        svd_debias(draw(8, 4, 5), draw(1, 8, 20))
    with pytest.raises(OptionError, match=r"k must be in 0 to 8 .* got 16"):
        svd_debias(draw(1, 8, 4, 5), draw(1, 8, 20))


@pytest.mark.parametrize("make", [lambda x: x, torch.from_numpy])
@pytest.mark.parametrize("axis", [1, -1])
def test_blank_channels_zeroes_exactly_the_chosen_ones(make, axis):
    feats = make(np.arange(1.0, 2 * 5 * 3 * 4 + 1).reshape(2, 5, 3, 4))
    out = blank_channels(feats, [0, 2], axis=axis)
    channels_first = np.moveaxis(np.asarray(out), axis, 0)
    assert (channels_first[[0, 2]] == 0).all()
    np.testing.assert_array_equal(channels_first[[1, 3]], np.moveaxis(np.asarray(feats), axis, 0)[[1, 3]])
    assert type(out) is type(feats)


def test_blank_channels_refuses_channels_that_do_not_exist():
    with pytest.raises(OptionError, match=r"channels must be in 0 to 4, got \[5, -1\]"):
        blank_channels(np.zeros((2, 5)), [1, 5, -1])
    with pytest.raises(OptionError, match=r"axis must be valid .* got 2"):
        blank_channels(np.zeros((2, 5)), [1], axis=2)


def test_blanking_nothing_changes_nothing():
    feats = draw(2, 5, 3)
    assert torch.equal(blank_channels(feats, []), feats)
