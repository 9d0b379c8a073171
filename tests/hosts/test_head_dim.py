"""Hosts whose attention has a head width other than dim / num_heads."""

import torch
from timm.layers import Attention
from timm.models import VisionTransformer

import vispe
from tests.cases import cases
from tests.hosts.helpers import close, shake

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 0}
SPECS = [
    "rope_axial", "deberta(std=0.1)", "irpe", "fox", "pape", "cope", "seqpe", "selective_rope", "alibi2d", "gta",
]  # fmt: skip


def vit():
    model = VisionTransformer(**SIZES, pos_embed="none", class_token=False, global_pool="avg")
    for block in model.blocks:
        block.attn = Attention(48, 2, qkv_bias=True, attn_head_dim=32)
    return model


def differential():
    return VisionTransformer(**SIZES, attn_layer="diff")


HOSTS = {"vit": (vit, 32), "differential": (differential, 12)}


@cases("spec", SPECS)
@cases("host", HOSTS)
def test_heads_of_timm(host, spec):
    torch.manual_seed(0)
    build, width = HOSTS[host]
    model = build()
    vispe.convert(model, spec)
    shake(model, 1)
    x = torch.randn(2, 3, 32, 32)
    out = model(x)
    out.square().sum().backward()
    assert out.isfinite().all()
    inside = [m for m in model.modules() if hasattr(m, "head_dim") and isinstance(m, vispe.Encoding)]
    assert all(m.head_dim == width and m.dim == 48 for m in inside)


def test_outputs_equal_attention_of_vispe():
    torch.manual_seed(0)
    model = vit()
    vispe.convert(model, "transformer_xl(std=0.3)")
    attn = model.blocks[0].attn
    layer = vispe.Attention(48, 2, "transformer_xl(std=0.3)", head_dim=32)
    layer.load_state_dict({k: v for k, v in attn.state_dict().items() if k in layer.state_dict()})
    recorded = {}
    attn.register_forward_hook(lambda module, args, out: recorded.update(x=args[0], y=out))
    model(torch.randn(2, 3, 32, 32))
    close(layer(recorded["x"], (4, 4)), recorded["y"])
