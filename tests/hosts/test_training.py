"""Gradients under checkpointing, several grids and dropped patches; caches; reduced precision; optimizers."""

import copy

import pytest
import timm
import torch
from timm.layers import set_reentrant_ckpt
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelThingsBlock
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3

import vispe
from tests.cases import cases
from tests.hosts.helpers import (
    SHAPE,
    close,
    cotangent,
    dense,
    grads,
    head_masks,
    image,
    keep_of,
    oracle,
    slopes_of,
    tiny,
    without_table,
)  # fmt: skip
from tests.hosts.windows.common import build

SPECS = [
    "alibi2d",
    "alibi2d(slopes=learned)",
    "sincos2d",
    "learned",
    "learn+alibi2d(slopes=learned)+sincos2d",
]
CROPS = [(32, 48), (48, 32), (16, 96)]  # equal numbers of tokens, different grids


def crops_gradients(model) -> dict[str, torch.Tensor]:
    """Return gradients of one backward pass over three crops."""
    model.zero_grad()
    crops = [image(2, 3, *size, seed=i).requires_grad_() for i, size in enumerate(CROPS)]
    loss = sum((out * cotangent(out, i)).sum() for i, out in enumerate(map(model, crops)))
    loss.backward()
    actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return actual | {f"crop {i}": crop.grad for i, crop in enumerate(crops)}


@pytest.fixture(params=[False, True], ids=["non-reentrant", "reentrant"])
def reentrant(request):
    set_reentrant_ckpt(request.param)
    yield request.param
    set_reentrant_ckpt(False)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_checkpointing_with_equal_token_counts_gives_exact_gradients(spec, reentrant, monkeypatch):
    model = vispe.convert(tiny(dynamic_img_size=True), spec).train()
    expected = crops_gradients(model)
    calls = []
    original = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(k) or original(*a, **k)
    )
    model.set_grad_checkpointing()
    actual = crops_gradients(model)
    assert len(calls) == 6, "every block of every crop is checkpointed"
    assert all(k["use_reentrant"] is reentrant for k in calls)
    assert (
        set(actual)
        == set(expected)
        == {n for n, _ in model.named_parameters()} | {"crop 0", "crop 1", "crop 2"}
    )
    # else the first pass takes another kernel, as it needs no gradient
    exact = not reentrant or "learned)" not in spec
    for name in expected:
        assert torch.equal(actual[name], expected[name]) or not exact, name
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)


@cases("block", [ParallelThingsBlock, DiffParallelScalingBlock])
def test_checkpointing_other_blocks(block, reentrant):
    model = vispe.convert(tiny(dynamic_img_size=True, block_fn=block), "alibi2d(slopes=learned)").train()
    expected = crops_gradients(model)
    model.set_grad_checkpointing()
    actual = crops_gradients(model)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)


def test_three_crops_are_three_separate_gradients():
    model = vispe.convert(tiny(dynamic_img_size=True), "alibi2d(slopes=learned)")
    together = crops_gradients(model)
    slopes = torch.zeros(2, 4)
    for i, size in enumerate(CROPS):
        out = model(image(2, 3, *size, seed=i))
        (actual,) = torch.autograd.grad((out * cotangent(out, i)).sum(), [model.blocks[0].attn.pos_enc.slope])
        slopes[0] += actual
    close(together["blocks.0.attn.pos_enc.slope"], slopes[0])


@cases("checkpointing", [False, True])
@cases("form", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}], ids=str)
def test_patch_dropout_takes_the_rows_of_the_dense_bias(form, checkpointing):
    stock = without_table(tiny(patch_drop_rate=0.5, **form))
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d(slopes=learned)").train()
    ours.set_grad_checkpointing(checkpointing)
    prefix, x = stock.num_prefix_tokens, image()
    slopes = slopes_of(ours).detach().clone().requires_grad_()
    keep = keep_of(9, 2, 15, prefix, 0.5)
    assert keep.shape == (2, prefix + 7)
    distance = dense(3, 5, prefix)
    remaining = torch.stack([distance[k][:, k] for k in keep])[:, None]
    masks = [-s[None, :, None, None] * remaining for s in slopes]
    expected = oracle(stock, x, masks, keep=keep)
    torch.manual_seed(9)
    actual = ours.forward_features(x)
    close(actual, expected)
    expected_grads, actual_grads = grads(stock, expected), grads(ours, actual)
    close(torch.stack([actual_grads.pop(f"blocks.{i}.attn.pos_enc.slope") for i in (0, 1)]), slopes.grad)
    close(actual_grads, expected_grads)
    ours.eval()
    close(ours.forward_features(x), oracle(stock, x, head_masks(stock, distance, slopes.detach())))


@cases("spec", ["sincos2d", "learned"])
def test_patch_dropout_after_additive_encodings(spec):
    ours = vispe.convert(tiny(patch_drop_rate=0.5), spec).train()
    extra = ours.pos_enc.table(vispe.Grid((3, 5), prefix=1).positions()).detach()
    stock = without_table(tiny())
    keep = keep_of(9, 2, 15, 1, 0.5)
    torch.manual_seed(9)
    close(ours.forward_features(image()), oracle(stock, image(), [None] * 2, extra, keep))


def test_jitter_is_drawn_once_per_training_pass_and_follows_dropped_tokens():
    stock = without_table(tiny())
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d(jitter=0.5)")
    x = image()
    close(ours.forward_features(x), oracle(stock, x, head_masks(stock, dense(3, 5, 1))))
    ours.train()
    torch.manual_seed(4)
    actual = ours.forward_features(x)
    torch.manual_seed(4)
    noise = torch.randn(1, 4, 16, 16) * 0.5
    close(actual, oracle(stock, x, [noise + m for m in head_masks(stock, dense(3, 5, 1))]))
    torch.manual_seed(4)
    ours.set_grad_checkpointing()
    checkpointed = ours.forward_features(x)
    assert torch.equal(checkpointed, actual)
    expected = grads(ours, checkpointed)
    ours.set_grad_checkpointing(False)
    torch.manual_seed(4)
    close(grads(ours, ours.forward_features(x)), expected)
    dropping = vispe.convert(tiny(patch_drop_rate=0.5), "alibi2d(jitter=0.5)").train()
    torch.manual_seed(4)
    noise = torch.randn(1, 4, 16, 16) * 0.5
    state = torch.get_rng_state()
    torch.manual_seed(4)
    actual = dropping.forward_features(x)
    torch.set_rng_state(state)
    keep = torch.cat(
        [torch.zeros(2, 1, dtype=torch.long), torch.argsort(torch.randn(2, 15), -1)[:, :7] + 1], 1
    )
    mask = (noise - dense(3, 5, 1))[0]
    remaining = torch.stack([mask[:, k][:, :, k] for k in keep])
    close(actual, oracle(stock, x, [remaining] * 2, keep=keep))


def test_dropout_of_positions_and_attention_equals_timm():
    stock = without_table(
        tiny(pos_drop_rate=0.3, attn_drop_rate=0.3, proj_drop_rate=0.2, drop_path_rate=0.3)
    ).train()
    ours = vispe.convert(copy.deepcopy(stock), "alibi2d")
    x = image()
    torch.manual_seed(2)
    expected = oracle(stock, x, head_masks(stock, dense(3, 5, 1)))
    torch.manual_seed(2)
    close(ours.forward_features(x), expected)


@cases("training", [False, True])
@cases("spec", ["rope_axial+alibi2d", "seqpe", "gpsa"])
def test_an_encoding_has_the_mode_of_its_model(spec, training):
    for model in (tiny().train(training), build("torchvision_vit").train(training)):
        vispe.convert(model, spec)
        assert [n for n, module in model.named_modules() if module.training != training] == []


def test_ema_copy_is_independent():
    model = vispe.convert(tiny(dynamic_img_size=True), "alibi2d(slopes=learned)").train()
    ema = ModelEmaV3(model, decay=0.5)
    x = image(2, 3, 48, 32)
    before = ema.module(x)
    with torch.no_grad():
        model.blocks[0].attn.pos_enc.slope.add_(2.0)
    assert torch.equal(ema.module(x), before)
    old = ema.module.blocks[0].attn.pos_enc.slope.clone()
    ema.update(model)
    close(ema.module.blocks[0].attn.pos_enc.slope, old + 1.0)


def test_an_optimizer_trains_slopes_without_weight_decay():
    model = vispe.convert(tiny(global_pool="avg"), "alibi2d(slopes=learned)+learned").train()
    ours = {n for n, _ in model.named_parameters() if "pos_enc" in n}
    assert ours == {"pos_enc.weight", "blocks.0.attn.pos_enc.slope", "blocks.1.attn.pos_enc.slope"}
    assert ours <= set(model.no_weight_decay())
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    free = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    named = dict(model.named_parameters())
    assert all(id(named[n]) in free for n in ours)
    layered = param_groups_layer_decay(
        model, 0.1, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5
    )
    scale = {id(p): g["lr_scale"] for g in layered for p in g["params"]}
    assert (
        scale[id(named["pos_enc.weight"])] == scale[id(model.patch_embed.proj.weight)] == min(scale.values())
    )
    for i in (0, 1):
        assert scale[id(named[f"blocks.{i}.attn.pos_enc.slope"])] == scale[id(model.blocks[i].attn.qkv.bias)]
    optimizer = create_optimizer_v2(model, "adamw", lr=0.05, weight_decay=0.1, layer_decay=0.5)
    x, target, losses = image(), torch.tensor([1, 3]), []
    slopes = slopes_of(model).detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(x), target))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert ((slopes_of(model) - slopes).abs() > 1e-3).all()


@cases("coarse", [False, True])
def test_group_matcher_of_the_distilled_model_includes_the_shared_encoding(coarse):
    model = timm.create_model("deit_tiny_distilled_patch16_224", pos_embed="learned", **SHAPE)
    groups = timm.models.group_parameters(model, model.group_matcher(coarse=coarse))
    assert any({"pos_enc.weight", "patch_embed.proj.weight"} <= set(names) for names in groups.values())


@cases("layers", [[1], [0]])
def test_random_draws_for_encodings_of_some_layers(layers):
    spec = [{"name": "alibi2d", "slopes": "learned", "layers": layers, "jitter": 0.9}, {"name": "rope_mixed"}]
    model = vispe.convert(tiny(), spec).train()
    assert (model(image()) - model(image())).abs().max() > 1e-3
    model.eval()
    assert torch.equal(model(image()), model(image()))
