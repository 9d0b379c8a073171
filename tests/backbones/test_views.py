"""Views of a model, such as features of denser tokens or averaged over poses, never change the model."""

import copy

import open_clip
import pytest
import timm
import torch

import vispe
from vispe.backbones.attention_recorder import record_attention
from vispe.backbones.local.transformers_model import TransformersModel
from vispe.backbones.model_access import reinitialized_copy
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.attention.head_health import head_health
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import as_audited_model
from vispe.images.symmetry.d4 import D4
from vispe.images.symmetry.symmetrization import D4Features

TEXT = {"context_length": 8, "vocab_size": 32, "width": 32, "heads": 2, "layers": 1}
TOWER = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def of_timm():
    return timm.create_model("test_vit", depth=2, img_size=64, num_classes=0, dynamic_img_size=True)


def of_open_clip():
    clip = open_clip.CLIP(16, TOWER, TEXT)
    clip.visual.image_mean = clip.visual.image_std = (0.5, 0.5, 0.5)
    return clip


def of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(**SIZES, image_size=32, patch_size=16)
    net = transformers.CLIPVisionModel._from_config(config).eval()
    return TransformersModel(net)


MODELS = {
    "timm": of_timm,
    "timm, converted": lambda: vispe.convert(of_timm(), "learn+alibi2d"),
    "open_clip": of_open_clip,
    "open_clip, converted": lambda: vispe.convert(of_open_clip(), "learn+alibi2d"),
    "transformers": of_transformers,
}
VIEWS = {
    "maps": lambda model, x: VisionModel(model, layer=0, norm=False)(x),
    "layers": lambda model, x: VisionModel(model).layers(x),
    "permuted tokens": lambda model, x: VisionModel(model).permuted(x, D4[1]),
    "denser tokens": lambda model, x: VisionModel(model, stride=8)(x),
    "averaged over poses": lambda model, x: D4Features(VisionModel(model))(x),
    "random weights": lambda model, x: reinitialized_copy(model),
    "no encoding": lambda model, x: as_audited_model(model).without().maps(x),
    "attention": lambda model, x: record_attention(model, x, lambda *_, **__: None),
    "heads": lambda model, x: head_health(model, [x[0]]),
    "audit": lambda model, x: audit(as_audited_model(model), list(x), controls=()),
    "transformers": lambda model, x: TransformersModel(model.net)(x),
}


def snapshot(model):
    """Return everything that a view could change: classes, modes, attributes, hooks and the identity of tensors."""
    plain = (int, float, str, bool, tuple, type(None))
    return {
        name: (
            type(module),
            {key: value for key, value in vars(module).items() if isinstance(value, plain)},
            sorted(vars(module)),
            [len(value) for key, value in vars(module).items() if key.endswith("_hooks")],
            {key: (id(p), p.requires_grad, p._version) for key, p in module.named_parameters(recurse=False)},
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_view_does_not_change_the_model(kind, view):
    if (view == "transformers") != (kind == "transformers") and view == "transformers":
        pytest.skip("only for models of transformers")
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    frozen = model.net if isinstance(model, TransformersModel) else getattr(model, "visual", model)
    frozen.requires_grad_(False)
    images = (
        torch.rand(1, 3, 32, 32) if kind != "timm" and kind != "timm, converted" else torch.rand(1, 3, 64, 64)
    )
    with torch.no_grad():
        VisionModel(model)(images)  # caches that depend on the image size only
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    try:
        with torch.no_grad():
            VIEWS[view](model, images)
    except vispe.errors.VispeError:
        pass  # unsupported views do not change the model either
    after = snapshot(model)
    assert before.keys() == after.keys()
    for name, entries in before.items():
        assert entries == after[name], name
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_the_mode_of_parts_of_a_transformers_model_is_unchanged():
    net = of_transformers().net.train()
    net.encoder.layers[0].eval()
    wrapper = TransformersModel(net)
    assert (wrapper.training, net.training, net.encoder.layers[0].training) == (True, True, False)


def test_denser_tokens_share_the_weights_of_the_model():
    model = of_timm().eval()
    view = VisionModel(model, stride=8)
    assert view.model is not model
    shared = dict(model.named_parameters())
    assert all(p is shared[name] for name, p in view.model.named_parameters())
    assert type(model) is timm.models.VisionTransformer
    assert model.patch_embed.proj.stride == (16, 16)
