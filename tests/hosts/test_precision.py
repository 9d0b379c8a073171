"""Caches are not corrupted by any call, and reduced precision."""

import copy

import torch
from timm.models import VisionTransformer
from torch._subclasses.fake_tensor import FakeTensorMode

import vispe
from tests.cases import cases
from tests.hosts.helpers import RELEASE, SHAPE, close, grads, image, tiny

SPECS = [
    "alibi2d",
    "alibi2d(slopes=learned)",
    "sincos2d",
    "learned",
    "learn+alibi2d(slopes=learned)+sincos2d",
]


@cases("spec", SPECS)
def test_inference_before_training_does_not_change_gradients(spec):
    model = vispe.convert(tiny(dynamic_img_size=True), spec)
    x = image()
    with torch.inference_mode():
        first = model(x).clone()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (2, 5)
    actual = grads(model, model(x))
    fresh = vispe.convert(tiny(dynamic_img_size=True), spec)
    fresh.load_state_dict(model.state_dict())
    close(actual, grads(fresh, fresh(x)))
    close(first, fresh(x))
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model, fresh = model.to(dtype), copy.deepcopy(fresh).to(dtype)
        out = model(x.to(dtype))
        assert out.dtype == dtype
        assert torch.equal(out, fresh(x.to(dtype)))
    assert model.to("meta")(x.to("meta")).device.type == "meta"


def test_caches_are_not_in_the_state_dict():
    model = vispe.convert(tiny(dynamic_img_size=True), "alibi2d")
    names = set(model.state_dict())
    for side in range(2, 12):
        model(image(1, 3, 8 * side, 24))
    assert set(model.state_dict()) == names == set(tiny().state_dict()) - {"pos_embed"}
    assert len(model.vispe.cache._cached) <= 4
    assert not copy.deepcopy(model).vispe.cache._cached
    x = image(1, 3, 40, 24)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_function_transforms_agree_and_leave_the_cache_unchanged():
    model = vispe.convert(tiny(), "alibi2d(slopes=learned)")
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    x = image()

    def loss(values, sample):
        return torch.func.functional_call(model, values, (sample[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in (0, 1):
        model.zero_grad()
        model(x[i][None]).square().sum().backward()
        close({n: g[i] for n, g in each.items()}, {n: p.grad for n, p in model.named_parameters()}, 1e-4)


@cases("dtype", [torch.bfloat16, torch.float16])
@cases("spec", ["alibi2d", "alibi2d(slopes=learned)", "sincos2d"])
def test_half_precision_and_autocast_are_close_to_float32(spec, dtype):
    expected = vispe.convert(tiny(qk_norm=True), spec)
    model, x = copy.deepcopy(expected).to(dtype), image()
    out = model(x.to(dtype))
    assert out.dtype == dtype
    assert (out.float() - expected(x)).abs().max() < 0.1 * expected(x).abs().max()
    stock = vispe.convert(tiny(qk_norm=True), "none")
    assert (expected(x) - stock(x)).abs().max() > 0 or spec == "none"
    with torch.autocast("cpu", dtype):
        auto = expected(x)
    assert (auto.float() - expected(x)).abs().max() < 0.1 * expected(x).abs().max()


class Float32Norm(torch.nn.LayerNorm):
    """Norm whose output is float32 under autocast, as on CUDA."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def test_autocast_with_norms_that_give_float32():
    model = tiny(qk_norm=True)
    for block in model.blocks:
        for name in ("q_norm", "k_norm"):
            norm = Float32Norm(8)
            norm.load_state_dict(getattr(block.attn, name).state_dict())
            setattr(block.attn, name, norm)
    ours, x = vispe.convert(model, "alibi2d"), image()
    with torch.autocast("cpu", torch.bfloat16):
        auto = ours(x)
    assert (auto.float() - ours(x)).abs().max() < 0.1 * ours(x).abs().max()


def test_distances_are_float32_in_a_half_precision_model():
    """Distances beyond 256 differ by less than the resolution of bfloat16, so the bias must be computed in float32."""
    model = vispe.convert(tiny(img_size=(8, 8 * 300), depth=1), "alibi2d.local").to(torch.bfloat16)
    mask = model.pos_enc.bias(model.vispe.cache(vispe.Grid((1, 300), prefix=1), torch.zeros(1)), 0).dense()
    assert torch.equal(mask[0, 0, 1, 1:], -torch.arange(300.0))


@cases("dtype", [torch.bfloat16, torch.float16])
@cases("spec", ["fourier.tancik", "fope", "rope_mixed(trainable=false)", "pape.ri", "comrope_ap.folded"])
def test_a_half_default_dtype_does_not_round_buffers(spec, dtype):
    """transformers builds models under the dtype of `from_pretrained`, also timm models in `TimmWrapperModel`."""
    expected = VisionTransformer(**SHAPE, pos_embed=spec).to(dtype)
    torch.set_default_dtype(dtype)
    try:
        model = VisionTransformer(**SHAPE, pos_embed=spec)
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in expected.state_dict().items():
        assert model.state_dict()[name].dtype == value.dtype, name
    model.load_state_dict(expected.state_dict())
    assert torch.equal(model.eval()(image().to(dtype)), expected.eval()(image().to(dtype)))


def test_channels_last():
    model = vispe.convert(tiny(), "alibi2d(slopes=learned)")
    expected = model(image())
    model = model.to(memory_format=torch.channels_last)
    close(model(image().to(memory_format=torch.channels_last)), expected)


def test_the_installed_timm_is_a_tested_version():
    assert RELEASE >= (1, 0, 26)
