import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.evaluate.rotation.cases import F64, field, noise, vit
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.rotation import (
    D4,
    PerImage,
    VisionModel,
    control_rows,
    element,
    equivariance,
    orbit_average,
    position_equivariance,
    raw_intensity,
    reinitialized_copy,
)
from vispe.evaluate.rotation.feature_similarity import MEASURES, InvariantShare, cka, error, rank, subspace

ROT90 = [element("rot90")]


def get(rows, transform, metric, **actual):
    (row,) = [
        r
        for r in rows
        if (r.transform, r.metric) == (transform, metric)
        and all(getattr(r, k) == v for k, v in actual.items())
    ]
    return row.values


def ramp(n):
    return torch.linspace(-1, 1, n, dtype=F64).expand(n, n)


def test_raw_intensity_is_exactly_equivariant_at_every_size():
    images = [noise((6, 6)), noise((6, 6), 1), noise((5, 8), 2), noise((1, 7), 3)]
    rows = equivariance(raw_intensity, images, batch_size=4)
    for row in rows:
        best = {"cka": 1, "subspace": 1, "rank": 1, "invariant_share": 1}.get(row.metric, 0)
        if row.transform != "shuffled":
            exact = row.metric.startswith("error")
            np.testing.assert_allclose(row.values, best, atol=0 if exact else 1e-12)
    assert get(rows, "shuffled", "error")[:3].min() > 0.9


@pytest.mark.parametrize("strength", [0.0, 0.01, 0.3, 5.0])
def test_a_planted_bias_is_measured_with_its_size(strength):
    n = 9
    pattern = ramp(n)
    x = noise((n, n))
    for p in (pattern, pattern.T):  # content that holds no ramp
        x = x - (x * p).sum((1, 2), keepdim=True) / p.square().sum() * p
    size, signal = pattern.norm() * math.sqrt(3), (x - x.mean((1, 2), keepdim=True)).norm()

    def biased(images):
        return images + strength * pattern

    rows = equivariance(biased, [x], measures=["error", "error_uncentred"])
    signal_norm = float((signal**2 + strength**2 * size**2).sqrt())
    norm = float((x + strength * pattern).norm())
    for name, change in {
        "rot90": math.sqrt(2), "rot180": 2, "rot270": math.sqrt(2), "hflip": 2, "vflip": 0,
        "transpose": math.sqrt(2), "antitranspose": math.sqrt(2),
    }.items():  # fmt: skip
        expected = strength * change * float(size)
        np.testing.assert_allclose(get(rows, name, "error"), expected / signal_norm, atol=1e-14)
        np.testing.assert_allclose(get(rows, name, "error_uncentred"), expected / norm, atol=1e-14)
    mean = strength * float(size) * (4 * math.sqrt(2) + 4) / 7 / signal_norm
    np.testing.assert_allclose(get(rows, "D4", "error"), mean, atol=1e-14)
    np.testing.assert_allclose(
        get(rows, "D4 worst", "error"), 2 * strength * float(size) / signal_norm, atol=1e-14
    )
    assert get(rows, "identity", "error") == 0


def test_a_large_mean_hides_everything_from_the_uncentred_error_only():
    f = lambda images: torch.roll(images, 1, -1) + 1000  # noqa: E731
    rows = equivariance(f, [noise((8, 8))], measures=["error", "error_uncentred"])
    assert get(rows, "D4", "error") > 0.5
    assert get(rows, "D4", "error_uncentred") < 1e-3


@pytest.mark.parametrize(
    ("pos", "symmetric", "full", "code"),
    [
        ("learn", False, (1, 2), (0.7, 2)),
        ("none", False, (1, 2), (0, 1e-13)),
        ("none", True, (0, 1e-13), (0, 1e-13)),
        ("alibi2d", False, (1, 2), (0, 1e-13)),
        ("alibi2d", True, (0, 1e-13), (0, 1e-13)),
        ("alibi2d(wrap=false,normalize=none)", True, (0, 1e-13), (0, 1e-13)),
        ("rope_axial", True, (0.03, 1.5), (0.03, 1.5)),
        ("rope_mixed", True, (0.03, 1.5), (0.03, 1.5)),
    ],
)
def test_position_code_and_patch_kernel_are_distinguished(pos, symmetric, full, code):
    f = VisionModel(vit(pos, symmetric, gain=2.0))
    images = [noise((42, 42)), noise((42, 42), 1)]
    total = get(equivariance(f, images, elements=ROT90, measures=["error"], controls=False), "rot90", "error")
    code_error = get(position_equivariance(f, images, elements=ROT90), "rot90", "error", part="position code")
    for values, (low, high) in ((total, full), (code_error, code)):
        assert ((values >= low) & (values <= high)).all(), (values, low, high)
    if symmetric:  # then the kernel has no part in it
        np.testing.assert_allclose(total, code_error, rtol=1e-9, atol=1e-13)


def test_full_and_position_errors_on_images_that_are_not_square():
    images = [noise((28, 42)), noise((28, 42), 1), noise((42, 21), 2)]
    f = VisionModel(vit("alibi2d", False, depth=2))
    code = position_equivariance(f, images, batch_size=2)
    assert get(code, "D4", "error").max() < 1e-13
    one_by_one = equivariance(f, images)
    batched = equivariance(f, images, batch_size=3)
    for a, b in zip(one_by_one, batched, strict=True):
        assert (a.transform, a.metric) == (b.transform, b.metric)
        if a.metric != "rank":
            np.testing.assert_allclose(a.values, b.values, rtol=1e-9, atol=1e-9)
    assert get(one_by_one, "D4", "error").min() > 0.5


def test_the_mean_over_the_orbit_is_exact_for_any_model():
    f = orbit_average(VisionModel(vit("learn", False)))
    assert f.patch_size == 7
    rows = equivariance(f, [noise((42, 42))], measures=["error", "invariant_share"], controls=False)
    assert get(rows, "D4", "error") < 1e-13
    np.testing.assert_allclose(get(rows, "D4", "invariant_share"), 1, rtol=1e-12)


def test_float32_meets_the_limit_of_exactness():
    f = VisionModel(vit("alibi2d").float())
    assert get(equivariance(f, [noise((42, 42)).float()], measures=["error"]), "D4", "error") < 1e-5


def test_moving_tokens_does_not_change_the_model():
    model = vit("alibi2d", False)
    f, x = VisionModel(model), noise((42, 42))[None]
    before = f(x)
    f.permuted(x, D4[5])
    assert torch.equal(f(x), before)
    assert not model.patch_embed.proj._forward_hooks
    assert torch.equal(f.permuted(x, D4[0]), before)


def test_the_mean_of_unrelated_maps_is_near_root_two_and_chance_is_reported():
    a, b = noise((20, 20), 0, 50), noise((20, 20), 1, 50)
    assert error(a, b) == pytest.approx(math.sqrt(2), abs=0.03)
    rows = equivariance(raw_intensity, [noise((20, 20), 3, 50)])
    assert get(rows, "shuffled", "error", control=True) == pytest.approx(math.sqrt(2), abs=0.05)
    assert get(rows, "shuffled", "rank", control=True) < 0.02


def test_measures_against_their_definitions():
    a, b = noise((4, 5), 0, 3), noise((4, 5), 1, 3)
    valid = torch.ones(4, 5, dtype=torch.bool)
    valid[0, :2] = False
    f, g = (t.flatten(1).T.numpy()[valid.flatten().numpy()] for t in (a, b))
    z, y = f - f.mean(0), g - g.mean(0)
    expected = {
        "error": np.sqrt(((g - f) ** 2).sum() / (z**2).sum()),
        "error_uncentred": np.sqrt(((g - f) ** 2).sum() / (f**2).sum()),
        "cosine": np.mean([1 - p @ q / np.linalg.norm(p) / np.linalg.norm(q) for p, q in zip(f, g, strict=True)]),
        "cosine_centred": np.mean(
            [1 - p @ q / np.linalg.norm(p) / np.linalg.norm(q) for p, q in zip(z, y, strict=True)]
        ),
        "cka": ((z.T @ y) ** 2).sum() / np.sqrt(((z.T @ z) ** 2).sum() * ((y.T @ y) ** 2).sum()),
        "rank": np.mean([np.argmin(((g - p) ** 2).sum(1)) == k for k, p in enumerate(f)]),
        "subspace": np.mean(
            np.linalg.svd(np.linalg.qr(z)[0].T @ np.linalg.qr(y)[0], compute_uv=False) ** 2
        ),
    }  # fmt: skip
    for name, value in expected.items():
        assert MEASURES[name](a, b, valid) == pytest.approx(value, abs=1e-12), name


def test_cka_is_the_same_by_tokens_and_by_channels_and_ignores_rotations_of_features():
    a = noise((3, 3), 0, 20)
    orthogonal = torch.linalg.qr(noise((20, 20), 1, 1)[0])[0]
    b = (orthogonal @ a.flatten(1)).reshape(a.shape)
    assert cka(a, b) == pytest.approx(1)
    assert subspace(a, b) == pytest.approx(1)
    assert error(a, b) > 0.5
    small = noise((3, 3), 2, 20)
    z, y = (t.flatten(1) - t.flatten(1).mean(1, keepdim=True) for t in (a, small))
    expected = (z @ y.T).square().sum() / ((z @ z.T).norm() * (y @ y.T).norm())
    assert cka(a, small) == pytest.approx(float(expected), rel=1e-12)


def test_invariant_share_between_one_and_one_over_poses():
    maps = noise((30, 30), 0, 40)
    share = InvariantShare(maps)
    for k in range(1, 8):
        share.add(noise((30, 30), k, 40))
    assert share.value() == pytest.approx(1 / 8, abs=0.01)
    assert math.isnan(InvariantShare(torch.ones(2, 3, 3)).value())


def test_the_rank_test_shares_ties_and_works_in_pieces(monkeypatch):
    constant = torch.ones(2, 3, 4, dtype=F64)
    assert rank(constant, constant) == pytest.approx(1 / 12)
    a, b = field((12, 12)), field((12, 12)) + 0.3 * noise((12, 12), 3)
    full = rank(a, b)
    monkeypatch.setattr("vispe.evaluate.rotation.feature_similarity.CHUNK", 300)
    assert rank(a, b) == full
    assert 0 < full < 1


def test_features_that_do_not_vary_have_no_error():
    rows = equivariance(lambda x: torch.full((len(x), 2, 4, 4), 0.1), [noise((8, 8))])
    assert np.isnan(get(rows, "D4", "error"))
    assert get(rows, "D4", "error_uncentred") == 0


def test_errors():
    x = noise((8, 8))
    with pytest.raises(InputError, match="at least one image"):
        equivariance(raw_intensity, [])
    with pytest.raises(ShapeError, match=r"Image 1 must be a tensor \(c, H, W\), got \(8, 8\)"):
        equivariance(raw_intensity, [x, x[0]])
    with pytest.raises(InputError, match=r"Image 0 must have finite floating-point values, got torch\.uint8"):
        equivariance(raw_intensity, [x.byte()])
    with pytest.raises(InputError, match=r"values that are not finite\. Normalise"):
        equivariance(raw_intensity, [x * math.nan])
    with pytest.raises(InputError, match="feature map must be finite"):
        equivariance(lambda v: v / 0, [x])
    with pytest.raises(ShapeError, match="Wrap a function of a single image in PerImage"):
        equivariance(lambda v: v[0], [x])
    with pytest.raises(ShapeError, match="feature maps must have one shape"):
        equivariance(lambda v: v[..., : v.shape[-2] // 2, :], [x])
    with pytest.raises(OptionError, match="unknown measure of feature maps, got 'l2'"):
        equivariance(raw_intensity, [x], measures=["l2"])
    with pytest.raises(OptionError, match="a pose besides the identity"):
        equivariance(raw_intensity, [x], elements=D4[:1])
    with pytest.raises(OptionError, match="batch_size needs an integer above 0, got batch_size=0"):
        equivariance(raw_intensity, [x], batch_size=0)
    with pytest.raises(OptionError, match="f must be a ModelFeatures, got function"):
        position_equivariance(raw_intensity, [x])


def test_a_margin_leaves_the_frame_out():
    def framed(images):
        out = images.clone()
        out[..., 0, :] = 9
        return out

    x = noise((7, 9))
    assert get(equivariance(framed, [x], measures=["error"]), "D4", "error") > 1
    rows = equivariance(framed, [x], margin=1)
    assert get(rows, "D4", "error") == 0
    assert get(rows, "D4", "invariant_share") == pytest.approx(1)
    f = VisionModel(vit("alibi2d(wrap=true)", False, depth=1))
    assert position_equivariance(f, [noise((42, 42))], margin=2)[0].values < 1e-13
    with pytest.raises(ShapeError, match="below half of 7x9 tokens, got 4"):
        equivariance(raw_intensity, [x], margin=4)


def test_controls_of_a_model_and_of_a_function():
    images = [noise((42, 42)), noise((42, 42), 1)]
    f = VisionModel(vit("alibi2d", True, depth=1))
    rows, notes = control_rows(f, iter(images), measures=["error"], elements=ROT90)
    assert notes == ()
    assert all(r.control and r.values.shape == (2,) for r in rows)
    assert get(rows, "rot90", "error", part="raw intensity").tolist() == [0, 0]
    assert get(rows, "rot90", "error", part="random weights").min() > 0.5  # its kernel is not symmetric
    assert get(rows, "rot90", "error", part="random weights, position code").max() < 1e-13
    rows, notes = control_rows(raw_intensity, images, measures=["error"])
    assert {r.part for r in rows} == {"raw intensity"}
    assert notes == ("There is no control of random weights, which needs a model.",)


def test_a_function_of_one_image_is_wrapped():
    rows = equivariance(PerImage(lambda image: image[:1]), [noise((6, 6)), noise((6, 6), 1)], batch_size=2)
    assert get(rows, "D4", "error").tolist() == [0, 0]


def test_models_that_cannot_be_used_are_refused():
    with pytest.raises(UnsupportedHost, match="must have forward_intermediates, got Linear"):
        VisionModel(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="training mode"):
        VisionModel(vit().train())
    with pytest.raises(OptionError, match="layer must be one of the 4 blocks of the model, got 4"):
        VisionModel(vit(), layer=4)
    f = VisionModel(vit(dynamic_img_size=False))
    with pytest.raises(ShapeError, match=r"multiple of the patch size, 7 px, got \(44, 42\) px"):
        f(noise((44, 42))[None])
    with pytest.raises(InputError, match=r"does not accept images of \(49, 42\) px .*dynamic_img_size=True"):
        f(noise((49, 42))[None])
    assert equivariance(f, [noise((42, 42))], measures=["error"])[0].values < 1e-13
    assert position_equivariance(f, [noise((42, 42))])[0].values < 1e-13


def test_a_convolutional_network_has_a_full_error_but_no_position_code():
    import timm

    model = timm.create_model("convnext_atto", num_classes=0, depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)).eval()
    f = VisionModel(model)
    x = noise((64, 64)).float()
    assert equivariance(f, [x], measures=["error"])[0].values[0] > 0.01
    with pytest.raises(UnsupportedHost, match="patch embedding must be one convolution"):
        position_equivariance(f, [x])


def test_an_image_tower_of_open_clip():
    from open_clip.transformer import VisionTransformer

    tower = VisionTransformer(
        image_size=28, patch_size=7, width=32, layers=2, heads=2, mlp_ratio=2, output_dim=8
    )
    f = VisionModel(tower.double().eval())
    assert (f.patch_size, f.depth) == (7, 2)
    x = noise((28, 28))
    assert f(x[None]).shape == (1, 32, 4, 4)
    assert get(equivariance(f, [x], measures=["error"]), "D4", "error") > 0.1
    assert position_equivariance(f, [x])[0].values[0] > 1e-3
    nn.init.zeros_(tower.positional_embedding)
    assert position_equivariance(f, [x])[0].values[0] < 1e-12


def test_a_reinitialised_copy_has_new_weights_and_does_not_change_the_model():
    model = vit("learn", False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    reinitialized, stored = reinitialized_copy(model, seed=1)
    assert stored == ()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    weights = reinitialized.state_dict()
    for name in ("pos_embed", "cls_token", "patch_embed.proj.weight", "blocks.2.attn.qkv.weight"):
        assert not torch.equal(weights[name], before[name]), name
    second, _ = reinitialized_copy(model, seed=1)
    assert all(torch.equal(v, weights[k]) for k, v in second.state_dict().items())
    assert equivariance(VisionModel(reinitialized), [noise((42, 42))], measures=["error"])[0].values[0] > 0.5
    reinitialized_copy(vit("alibi2d(slopes=learned)", False))
