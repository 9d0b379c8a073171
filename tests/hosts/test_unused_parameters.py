"""Every parameter of an encoding contributes to the loss: DistributedDataParallel waits for all gradients.

A gradient of exactly 0 is allowed: with only a class token, biases of the last block have no effect.
"""

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.helpers import EVERY, cotangent
from tests.products import partly
from vispe.errors import VispeError


def vit():
    from timm.models import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=0)


def eva():
    from timm.models.eva import Eva

    return Eva(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=0)


def naflex():
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    config = NaFlexVitCfg(patch_size=8, embed_dim=48, depth=2, num_heads=2, pos_embed_grid_size=(4, 4))
    return NaFlexVit(config, num_classes=0)


def swin():
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=32, patch_size=4, window_size=4, embed_dim=48, depths=(2, 2), num_heads=(2, 4), num_classes=0
    )


def torchvision_vit():
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 48, 48, num_classes=8)


def torchvision_swin():
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer([4, 4], 48, [2, 2], [2, 4], [4, 4], num_classes=8)


def open_clip():
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(32, 8, 48, 2, 2, 2.0, output_dim=8)


def dinov2():
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        intermediate_size=48,
    )
    return Dinov2Model(config)


HOSTS = {
    f.__name__: f for f in (vit, eva, naflex, swin, torchvision_vit, torchvision_swin, open_clip, dinov2)
}
SAMPLE = ["seqpe", "seqpe(mode=attn_scalar)", "peg", "alibi2d(slopes=learned)", "selective_rope", "learned"]


def unused(host, spec):
    """Return parameters of the encoding without a gradient after one step; None for unsupported encodings."""
    torch.manual_seed(0)
    model = HOSTS[host]()
    try:
        vispe.convert(model, spec)
    except VispeError:
        return None
    x = torch.randn(2, 3, 32, 32)
    forward = getattr(model.train(), "forward_features", model)
    out = forward(x)
    out = getattr(out, "last_hidden_state", out)
    out = out.get("patches") if isinstance(out, dict) else out
    (out * cotangent(out)).sum().backward()
    parameters = [(n, p) for n, p in model.named_parameters() if "pos_enc" in n and p.requires_grad]
    return [n for n, p in parameters if p.grad is None]


@partly(2)
@cases("spec", SAMPLE)
@cases("host", HOSTS)
def test_every_parameter_has_a_gradient(host, spec):
    assert not unused(host, spec)


SPECS = [*vispe.list_encodings(), *vispe.list_encodings("*.*")]
# each encoding and preset in one host, the next one in the next host
PAIRS = [(h, s) for i, s in enumerate(SPECS) for j, h in enumerate(HOSTS) if EVERY or i % len(HOSTS) == j]


@pytest.mark.slow
@pytest.mark.parametrize(("host", "spec"), PAIRS)
def test_every_parameter_of_every_encoding_has_a_gradient(host, spec):
    assert not unused(host, spec)


@cases("host", ["swin", "torchvision_vit", "torchvision_swin"])
def test_seqpe_has_one_projection_for_each_layer(host):
    torch.manual_seed(0)
    model = HOSTS[host]()
    vispe.convert(model, "seqpe")
    layers = [m.pos_enc for m in model.modules() if getattr(m, "pos_enc", None) is not None]
    assert len(layers) in (2, 4)
    assert all(len(e.pe_qk) == 1 for e in layers)
    # a checkpoint with the projections of all blocks in every layer
    saved = model.state_dict()
    expected = {}
    for name in [n for n in saved if ".pe_qk.0." in n]:
        block = [f"{p}.pos_enc" for _, p, _ in model.vispe_attentions()].index(name.partition(".pe_qk")[0])
        old = {i: saved[name] + 1 + i for i in range(len(layers))}
        expected[name] = old[block]
        saved.update({name.replace(".pe_qk.0.", f".pe_qk.{i}."): value for i, value in old.items()})
    model.load_state_dict(saved)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    rebuilt = vispe.create_encoding(layers[0].config)
    assert rebuilt.state_dict().keys() == layers[0].state_dict().keys()
