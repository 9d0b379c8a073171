"""segmentation_models_pytorch builds encoders by timm, so `pos_embed` works without code in vispe."""

import pytest
import torch

import vispe
from vispe.errors import UnsupportedHost

smp = pytest.importorskip(
    "segmentation_models_pytorch", reason="segmentation-models-pytorch is not installed"
)
NAME = "tu-vit_tiny_patch16_224"


def dpt(**options):
    torch.manual_seed(0)
    small = {"decoder_intermediate_channels": (16, 16, 16, 16), "decoder_fusion_channels": 16}
    return smp.DPT(NAME, encoder_weights=None, classes=2, **small, **options).eval()


def test_an_encoder_is_built_with_an_encoding():
    model, images = dpt(pos_embed="alibi2d"), torch.rand(1, 3, 224, 224)
    assert "alibi2d" in vispe.describe(model.encoder.model)
    stock = dpt()
    after = dpt()
    vispe.convert(after.encoder.model, "alibi2d")
    for other in (stock, after):
        other.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        actual = model(images)
        # the same as converting what was built, and not what was built
        assert torch.equal(actual, after(images))
        assert (actual - stock(images)).abs().max() > 1e-2
    assert actual.shape == (1, 2, 224, 224)


def test_a_stock_checkpoint_fits():
    stock, model = dpt(), dpt(pos_embed="alibi2d")
    model.load_state_dict(stock.state_dict())
    state = stock.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, state[name])


@pytest.mark.slow
def test_images_of_any_size_and_gradients():
    model = dpt(pos_embed="rope_mixed", dynamic_img_size=True).train()
    for shape in ((64, 96), (96, 64)):
        model.zero_grad()
        model(torch.rand(2, 3, *shape)).square().mean().backward()
        of_encoding = [p.grad for n, p in model.named_parameters() if "pos_enc" in n]
        assert of_encoding
        assert all(g is not None and g.abs().max() > 0 for g in of_encoding)


def test_the_complete_model_is_rejected_with_the_module_to_convert():
    with pytest.raises(UnsupportedHost, match=r"vispe\.convert\(model\.encoder\.model, \.\.\.\)"):
        vispe.convert(dpt(), "alibi2d")


@pytest.mark.slow  # batches of eight through the decoder; the first test has one image
@pytest.mark.parametrize("registers", [0, 4])
def test_batches_and_rectangles_are_equal_to_a_converted_encoder(registers):
    small = {"embed_dim": 48, "num_heads": 3, "dynamic_img_size": True, "reg_tokens": registers}

    def build(**options):
        return dpt(**small, **options)

    model, after = build(pos_embed="alibi2d"), build()
    vispe.convert(after.encoder.model, "alibi2d")
    after.load_state_dict(model.state_dict())
    with torch.no_grad():
        for shape in ((8, 3, 224, 224), (1, 3, 160, 224)):
            x = torch.rand(shape)
            actual = model(x)
            assert actual.shape == (shape[0], 2, *shape[2:])
            assert torch.equal(actual, after(x))
