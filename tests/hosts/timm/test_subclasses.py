"""Models and parts defined by users are converted or raise; an encoding is never silently without effect."""

import copy
import pickle

import pytest
import timm
import torch
from timm.models import Eva, VisionTransformer
from timm.models.deit import VisionTransformerDistilled

import vispe
from tests.hosts.helpers import SHAPE, close, image, tiny
from tests.hosts.open_clip.common import TOWER, tiny_tower
from vispe.errors import UnsupportedHost


class Plain(VisionTransformer):
    """Overrides nothing."""


class OwnFeatures(VisionTransformer):
    def forward_features(self, x, attn_mask=None, is_causal=False):
        return super().forward_features(x).flip(0)


class OwnHead(VisionTransformer):
    def forward_head(self, x, pre_logits=False):
        return 2 * super().forward_head(x, pre_logits)


class OwnAttention(timm.layers.Attention):
    pass


def test_user_subclasses_convert_or_raise():
    with pytest.raises(
        UnsupportedHost, match=r"Plain: subclasses of .* pos_embed='none' and then call vispe.convert"
    ):
        Plain(**SHAPE, pos_embed="alibi2d")
    x = image()
    for cls, factor in ((Plain, 1), (OwnHead, 2)):
        model = vispe.convert(tiny(cls, pos_embed="none"), "alibi2d(slopes=learned)")
        assert isinstance(model, cls)
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert type(other) is type(model)
            assert torch.equal(other(x), model(x))
        plain = vispe.convert(tiny(pos_embed="none"), "alibi2d(slopes=learned)")
        plain.load_state_dict(model.state_dict())
        close(model(x), factor * plain(x))
        assert type(vispe.restore(model)) is cls
    model = tiny(OwnFeatures)
    with pytest.raises(UnsupportedHost, match=r"OwnFeatures overrides forward_features of timm"):
        vispe.convert(model, "alibi2d")
    assert type(model) is OwnFeatures


class OddBlock(timm.models.vision_transformer.Block):
    def forward(self, x):
        return super().forward(x)


def test_parts_that_would_disable_the_encoding_raise():
    with pytest.raises(UnsupportedHost, match=r"blocks.0.attn must be one of Attention, .* got OwnAttention"):
        vispe.convert(tiny(attn_layer=OwnAttention), "alibi2d")
    with pytest.raises(
        UnsupportedHost,
        match=r"blocks.0: the forward pass of OddBlock must take attn_mask .* got no argument",
    ):
        vispe.convert(tiny(block_fn=OddBlock), "alibi2d")
    x = image()
    assert vispe.convert(tiny(block_fn=OddBlock, attn_layer=OwnAttention), "sincos2d")(x).isfinite().all()
    for path in ("blocks.1.attn", ""):
        model = tiny()
        module = model.get_submodule(path)
        name = "forward" if path else "forward_features"
        setattr(module, name, getattr(module, name))
        with pytest.raises(
            UnsupportedHost, match=f"{path or 'VisionTransformer'}: {name} is patched on the instance"
        ):
            vispe.convert(model, "alibi2d")


def test_other_models_raise():
    with pytest.raises(UnsupportedHost, match=r"got a Linear of torch\. .* Pass the vision tower"):
        vispe.convert(torch.nn.Linear(2, 2), "alibi2d")
    with pytest.raises(UnsupportedHost, match="got Linear without an encoding"):
        vispe.restore(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("cls", [VisionTransformer, VisionTransformerDistilled, Eva, Plain])
def test_the_class_of_a_converted_model_builds_converted_models(cls):
    model = vispe.convert(tiny(cls), "alibi2d(slopes=learned)")
    x, converted_class = image(), type(model)
    plain = converted_class(**SHAPE).eval()
    assert type(plain) is cls
    plain.load_state_dict(vispe.restore(copy.deepcopy(model)).state_dict())
    close(plain(x), vispe.restore(copy.deepcopy(model))(x), 0)
    if cls is not Plain:  # whose constructor cannot say when it is complete
        rebuilt = converted_class(**SHAPE, pos_embed=model.vispe.saved).eval()
        assert type(rebuilt) is converted_class
        rebuilt.load_state_dict(model.state_dict())
        assert torch.equal(rebuilt(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    derived = type("Mine", (converted_class,), {})
    with pytest.raises(
        UnsupportedHost, match=f"Mine must not derive from the class of a converted {cls.__name__}"
    ):
        derived(**SHAPE)


def test_the_class_of_a_converted_tower_builds_stock_towers():
    tower = tiny_tower()
    plain = copy.deepcopy(tower)
    converted_class = type(vispe.convert(tower, "alibi2d"))
    rebuilt = converted_class(**TOWER).eval()
    assert type(rebuilt) is type(plain)
    rebuilt.load_state_dict(plain.state_dict())
    assert torch.equal(rebuilt(image()), plain(image()))
