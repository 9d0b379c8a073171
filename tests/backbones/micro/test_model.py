"""vispe_micro: equivariant features without position, and strict loading."""

import pytest
import torch
from safetensors.torch import save_file

from tests.cases import cases
from vispe.backbones.device import flush_denormals
from vispe.backbones.micro import PATCH, STRIDE, WEIGHTS, Micro, features, load_micro, patch_features
from vispe.errors import InputError, OptionError, ShapeError


@pytest.fixture(scope="module")
def shipped():
    return load_micro()


@pytest.fixture(scope="module", params=["shipped", "random"])
def model(request, shipped):
    if request.param == "shipped":
        return shipped
    torch.manual_seed(0)
    return Micro(depth=2).eval().requires_grad_(False)


@cases("size", [(48, 80), (96, 96)])
def test_features_are_equivariant(model, size):
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1))
    y = model(x)
    assert y.shape == (2, model.dim, size[0] // STRIDE, size[1] // STRIDE)
    centred = (y - y.mean((0, 2, 3), keepdim=True)).norm()
    for mirror in (False, True):
        for turns in range(4):
            pose = lambda t, m=mirror, k=turns: torch.rot90(t.flip(-1) if m else t, k, (-2, -1))  # noqa: E731
            error = (model(pose(x)) - pose(y)).norm() / centred
            assert float(error) < 1e-5


def test_a_uniform_image_gives_the_same_everywhere(model):
    y = model(torch.full((1, 3, 64, 112), 0.3))
    assert float((y - y.mean((2, 3), keepdim=True)).abs().max()) < 1e-4


@pytest.mark.slow
def test_far_surroundings_and_size_matter_little(shipped):
    """The middle of a tile sees almost the same as in a larger tile: distances count in patches, not in shares."""
    x = torch.rand(1, 3, 512, 512, generator=torch.Generator().manual_seed(2))
    x = torch.nn.functional.avg_pool2d(x, 5, 1, 2)
    full = shipped(x)[..., 96:160, 96:160]
    part = shipped(x[..., 96:416, 96:416])[..., 48:112, 48:112]
    std = full.std((0, 2, 3), keepdim=True)
    assert float(((full - part) / std).square().mean().sqrt()) < 0.1


def test_second_size_after_the_first(shipped):
    a, b = torch.rand(1, 3, 64, 64), torch.rand(1, 3, 32, 96)
    first = shipped(a)
    shipped(b)
    assert torch.equal(shipped(a), first)
    assert torch.equal(features(a), first)
    patches = first.unflatten(-1, (4, 8)).unflatten(-3, (4, 8)).mean((-1, -3))
    assert torch.allclose(patch_features(a), patches, atol=1e-6)
    assert patch_features.patch_size == PATCH


@cases("size", [(48, 80), (64, 64)])
def test_grey_is_three_equal_channels(model, size):
    grey = torch.rand(2, 1, *size, generator=torch.Generator().manual_seed(3))
    expected = model(grey.expand(-1, 3, -1, -1))
    for sample in (grey, grey.contiguous(memory_format=torch.channels_last)):
        assert torch.allclose(model(sample), expected, atol=1e-5 * float(expected.abs().max()))


@cases("before", [False, True])
def test_denormal_numbers_are_zero_inside_and_as_before_after_it(before):
    inside = []

    def remaining() -> bool:
        return float(torch.tensor(1e-40) * 1) > 0

    @flush_denormals()
    def fail() -> None:
        inside.append(remaining())
        raise KeyError

    torch.set_flush_denormal(before)
    try:
        with pytest.raises(KeyError):
            fail()
        assert inside == [False]
        assert remaining() is not before
    finally:
        torch.set_flush_denormal(False)


@cases("shape", [(1, 3, 40, 32), (1, 3, 32, 8), (3, 32, 32), (1, 2, 32, 32), (1, 1, 40, 32)])
def test_other_sizes_raise(shape):
    with pytest.raises(ShapeError, match=r"multiples of 16, got \("):
        Micro(depth=1)(torch.zeros(shape))


def test_what_is_shipped_is_small_and_finite(shipped):
    assert WEIGHTS.stat().st_size <= 12e6
    state = shipped.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    slopes = [value for name, value in state.items() if "blocks" in name and name.endswith("slope")]
    assert len(slopes) == 4
    assert PATCH == 16


def test_weights_that_do_not_fit_raise(tmp_path):
    with pytest.raises(InputError, match="must be a file with weights of vispe_micro"):
        load_micro(tmp_path / "none.safetensors")
    save_file({"front.0.bias": torch.zeros(3)}, tmp_path / "bad.safetensors")
    with pytest.raises(InputError, match=r"does not fit vispe_micro \(no 'head.1.weight'\)"):
        load_micro(tmp_path / "bad.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x08\x00\x00")
    with pytest.raises(InputError, match="does not fit vispe_micro"):
        load_micro(tmp_path / "torn.safetensors")


def test_heads_that_do_not_divide_the_width_are_refused():
    for heads in (0, 3):
        with pytest.raises(OptionError, match=f"got width=16, heads={heads}"):
            Micro(width=16, heads=heads)


@pytest.mark.parametrize("fine", [8, 16])  # as many channels as features, and another number
def test_weights_of_another_size_load(tmp_path, fine):
    model = Micro(8, (fine, 12, 16), 24, 3, 2)
    state = {name: value.half() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "other.safetensors")
    model.load_state_dict(state)
    loaded = load_micro(tmp_path / "other.safetensors")
    assert [len(block.mix.weight) for block in loaded.stem] == [fine, 12, 16]
    assert loaded.dim == 8
    x = torch.rand(1, 3, 32, 48)
    assert torch.allclose(loaded(x), model(x), atol=1e-5)


def test_every_weight_learns():
    torch.manual_seed(0)
    model = Micro(depth=2)
    y = model(torch.rand(2, 3, 48, 64))
    (y * torch.randn_like(y)).sum().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not float(p.grad.abs().max())]
    assert silent == []
