"""Attention layers inside wrappers: conversion before and after wrapping, weights, restoring."""

import copy

import peft
import pytest
import torch
import torchvision
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

import vispe
from tests.cases import cases
from tests.hosts.common.test_block_loops import IMAGE, vit
from tests.hosts.helpers import close, shake
from tests.hosts.open_clip.common import tiny_tower
from tests.products import partly
from vispe.errors import UnsupportedHost


def _vit():
    return vispe.restore(vispe.convert(vit("learn"), "none"))


def _tower():
    return tiny_tower(image_size=(32, 48), patch_size=16)


def _torchvision():
    torch.manual_seed(0)
    return shake(torchvision.models.VisionTransformer(32, 16, 2, 2, 32, 48)).eval()


HOSTS = {"timm": _vit, "open_clip": _tower, "torchvision": _torchvision}
SPECS = ("alibi2d", "rope_mixed", "irpe", "rpb")


class Own(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def blocks_of(model):
    if hasattr(model, "blocks"):
        return model.blocks
    return model.transformer.resblocks if hasattr(model, "transformer") else model.encoder.layers


def run(model):
    return model(IMAGE[..., :32] if hasattr(model, "encoder") else IMAGE)


def _attention(wrap):
    def apply(model):
        for block in blocks_of(model):
            name = "self_attention" if hasattr(block, "self_attention") else "attn"
            setattr(block, name, wrap(getattr(block, name)))

    return apply


def _block(wrap):
    def apply(model):
        for i in range(len(blocks_of(model))):
            blocks_of(model)[i] = wrap(blocks_of(model)[i])

    return apply


WRAPPERS = {
    "checkpointed attention": _attention(checkpoint_wrapper),
    "checkpointed block": _block(checkpoint_wrapper),
    "own attention": _attention(Own),
    "own block": _block(Own),
}


@cases("wrapper", WRAPPERS)
@cases("host", HOSTS)
def test_wrapped_after_conversion(host, wrapper):
    model = shake(vispe.convert(HOSTS[host](), "rope_mixed"))
    expected = run(model).detach()
    WRAPPERS[wrapper](model)
    close(run(model), expected, 1e-6)
    state = copy.deepcopy(model.state_dict())
    shake(model, 5)
    model.load_state_dict(state)
    close(run(model), expected, 1e-6)
    # stock weights
    model.load_state_dict({name: value for name, value in state.items() if "pos_enc" not in name})
    close(run(model), expected, 1e-6)
    names = {name for name, _ in model.named_parameters() if "pos_enc" in name}
    assert names == {name for name in model.no_weight_decay() if "pos_enc" in name}
    assert "2 attention layers with their own" in vispe.describe(model)
    vispe.restore(model)
    assert torch.isfinite(run(model)).all()


@cases("wrapper", list(WRAPPERS)[:2])
@cases("host", HOSTS)
def test_wrapped_before_conversion(host, wrapper):
    """Supported wrappers pass all arguments."""
    model, plain = HOSTS[host](), HOSTS[host]()
    WRAPPERS[wrapper](model)
    torch.manual_seed(1)
    vispe.convert(model, "rope_mixed")
    torch.manual_seed(1)
    vispe.convert(plain, "rope_mixed")
    close(run(model), run(plain), 1e-6)


@cases("host", ["timm", "open_clip"])
def test_the_error_names_unsupported_layers(host):
    model = HOSTS[host]()
    WRAPPERS["own attention"](model)
    with pytest.raises(
        UnsupportedHost, match=r"attn must be one of \w*Attention, .* got Own\. Use an additive"
    ):
        vispe.convert(model, "rope_mixed")


@partly(2)
@cases("spec", SPECS)
@cases("order", ["convert first", "adapter first"])
@cases("host", HOSTS)
def test_adapters(host, order, spec):
    """LoRA wraps the entire `nn.MultiheadAttention`."""
    targets = {"timm": ["qkv", "proj"], "open_clip": ["attn"], "torchvision": ["self_attention"]}[host]
    config = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    model = HOSTS[host]()
    if order == "convert first":
        vispe.convert(model, spec)
        adapted = peft.get_peft_model(model, config)
    else:
        adapted = peft.get_peft_model(model, config)
        assert vispe.convert(adapted, spec) is adapted
    adapted.eval()
    assert spec in vispe.describe(adapted)
    actual = run(adapted)
    with adapted.disable_adapter():
        off = run(adapted).detach()
    plain = vispe.convert(HOSTS[host](), spec)
    encodings = {name.replace("base_layer.", ""): value for name, value in model.state_dict().items()}
    plain.load_state_dict({name: value for name, value in encodings.items() if name in plain.state_dict()})
    close(off, run(plain), 1e-4)
    assert (actual - off).abs().max() > 1e-3
    actual.square().sum().backward()
    assert not [name for name, p in adapted.named_parameters() if "lora_" in name and p.grad is None]
    merged = copy.deepcopy(adapted).merge_and_unload()
    close(run(merged), actual, 1e-4)
    vispe.restore(adapted)
    assert torch.isfinite(run(adapted)).all()


@cases("host", ["open_clip", "torchvision"])
def test_parametrized_attention(host):
    model = shake(vispe.convert(HOSTS[host](), "rope_mixed"))
    expected = run(model).detach()
    for block in blocks_of(model):
        attention = block.attn if host == "open_clip" else block.self_attention
        parametrizations.weight_norm(attention, "in_proj_weight")
    close(run(model), expected, 1e-4)
    for call in (vispe.restore, lambda m: vispe.convert(m, "alibi2d")):
        with pytest.raises(
            UnsupportedHost,
            match=r"with parametrized in_proj_weight\. Call torch\.nn\.utils\.parametrize\.remove",
        ):
            call(model)
    for block in blocks_of(model):
        attention = block.attn if host == "open_clip" else block.self_attention
        parametrize.remove_parametrizations(attention, "in_proj_weight")
    close(run(model), expected, 1e-4)
    vispe.restore(model)
    assert torch.isfinite(run(model)).all()
