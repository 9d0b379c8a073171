"""Contracts of timm models, for every kind of encoding in representative kinds of ViT."""

import copy
from functools import partial

import pytest
import timm
import torch
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, ParallelThingsBlock
from timm.models.vision_transformer_hybrid import HybridEmbed

import vispe
from tests.cases import cases
from tests.hosts.helpers import close, shake
from vispe.errors import UnsupportedCombination

pytestmark = pytest.mark.slow

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "dinov2 with registers": ("vit_small_patch14_reg4_dinov2", {}),
    "clip": ("vit_base_patch32_clip_224", {}),
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "parallel things": ("vit_tiny_patch16_224", {"block_fn": ParallelThingsBlock}),
    "parallel scaling": ("vit_tiny_patch16_224", {"block_fn": ParallelScalingBlock}),
    "parallel diff": ("vit_tiny_patch16_224", {"block_fn": DiffParallelScalingBlock}),
    "diff": ("vit_tiny_patch16_224", {"attn_layer": "diff"}),
    "hybrid": ("vit_tiny_patch16_224", {"patch_size": 2}),
    "eva02": ("eva02_tiny_patch14_224", {}),
    "dinov3": ("vit_small_patch16_dinov3", {}),
}
KINDS = ["none", "sincos2d", "learned", "alibi2d", "alibi2d(slopes=learned)", "rope_axial", "rope_mixed", "irpe", "rpb",
         "peg", "seqpe", "rope_axial+alibi2d(slopes=learned)"]  # fmt: skip


def make(model: str, spec: str, **options):
    name, extra = MODELS[model]
    torch.manual_seed(0)
    if model == "hybrid":
        stem = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 4, 4), torch.nn.ReLU())
        extra = {**extra, "embed_layer": partial(HybridEmbed, backbone=stem)}
    return shake(timm.create_model(name, pos_embed=spec, **{**SMALL, **extra, **options})).eval()


@cases("model", [m for m in MODELS if "diff" in m])
def test_encodings_in_differential_attention_have_its_head_width(model):
    net = make(model, "rope_mixed")
    assert net.blocks[0].get_submodule("" if "parallel" in model else "attn").pos_enc.width == 8
    with pytest.raises(
        UnsupportedCombination, match=r"irpe adds relative values of head_dim 8, but the values of blocks.0"
    ):
        make(model, "irpe(on=v)")


@cases("spec", KINDS)
@cases("model", MODELS)
def test_contracts_of_timm(model, spec):
    net = make(model, spec)
    equivalent = shake(copy.deepcopy(net), seed=2)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    out = net(x)
    assert out.shape == (2, 5), "classes"
    assert out.isfinite().all()
    features = net.forward_features(x)
    assert torch.equal(net.forward_head(features), out), "features and head make the whole"
    assert net.forward_head(features, pre_logits=True).shape == (2, net.head_hidden_size)
    final, taken = net.forward_intermediates(x)
    assert torch.equal(final, features)
    assert len(taken) == len(net.feature_info) == 2
    assert all(t.shape == (2, 48, 4, 4) for t in taken)
    net.train()
    net(x).square().mean().backward()
    without = [n for n, p in net.named_parameters() if p.requires_grad and p.grad is None]
    assert not without, "every parameter that is trained has a gradient"
    expected = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    net.set_grad_checkpointing()
    net(x).square().mean().backward()
    close({n: p.grad for n, p in net.named_parameters() if p.grad is not None}, expected)
    net.set_grad_checkpointing(False)
    net.eval()
    assert not torch.equal(equivalent(x), out)
    equivalent.load_state_dict(net.state_dict())
    assert torch.equal(equivalent(x), out), "a checkpoint holds everything"
    assert torch.equal(copy.deepcopy(net)(x), out)
    assert out.dtype == torch.float32
    assert net.to(torch.bfloat16)(x.bfloat16()).isfinite().all()
    equivalent.reset_classifier(0)
    assert equivalent(x).shape == (2, net.num_features), "no classifier"
    assert equivalent.prune_intermediate_layers([0]) == [0]
    short = equivalent.train().forward_features(x)
    assert short.shape == features.shape
    short.square().sum().backward()
    unused = [n for n, p in equivalent.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused, "what was pruned has no parameters left"
    matcher = net.group_matcher()
    assert {"stem", "blocks"} <= set(matcher)


@cases("spec", ["alibi2d", "rope_axial", "learned", "rpb", "peg"])
@cases("model", ["vit", "distilled", "dinov2 with registers", "siglip", "dinov3"])
def test_another_size(model, spec):
    dynamic, fixed = make(model, spec, dynamic_img_size=True), make(model, spec)
    fixed.load_state_dict(dynamic.state_dict())
    fixed.set_input_size((40, 24))
    x = torch.randn(1, 3, 40, 24, generator=torch.Generator().manual_seed(1))
    close(fixed(x), dynamic(x))
    restored = vispe.convert(fixed, "none")
    assert restored(x).shape == (1, 5)
