"""Logits under a causal mask: the stack against loops, closed forms, and models with and without a mask."""

import pytest
import timm
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.attention.causal_mask import CausalMask, stack_scores, variance_slope, without_offsets
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import GROUPS, Accumulator
from vispe.hosts.convert import convert


def tokens(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("norm", ["l2", "layer"])
def test_stack_is_the_naive_loop(norm):
    x = tokens(3, 5, 4)
    actual = stack_scores(x, 3, norm)
    for layer in range(3):
        total, following = torch.zeros(5, 5, dtype=torch.float64), x.clone()
        for b in range(3):
            if norm == "l2":
                h = x[b] / x[b].square().sum(-1, keepdim=True).sqrt()
            else:
                h = x[b] - x[b].mean(-1, keepdim=True)
                h = h / (h.square().mean(-1, keepdim=True) + 1e-12).sqrt() / 4**0.25
            full = h if norm == "l2" else h * 4**0.25
            for t in range(5):
                logits = torch.stack([h[t] @ h[s] for s in range(t + 1)])
                total[t, : t + 1] += logits / 3
                following[b, t] = x[b, t] + logits.softmax(0) @ full[: t + 1]
        assert torch.allclose(actual[layer], total, atol=1e-10)
        x = following
    with pytest.raises(OptionError, match="norm must be one of l2, layer, got 'batch'"):
        stack_scores(x, 1, "batch")
    with pytest.raises(ShapeError, match=r"\(b, s, d\)"):
        stack_scores(x[0], 1)


def test_without_offsets_is_the_naive_loop():
    scores = tokens(2, 6, 6)
    actual = without_offsets(scores)
    for offset in range(6):
        diagonal = scores.diagonal(-offset, -2, -1)
        residual = actual.diagonal(-offset, -2, -1)
        assert torch.allclose(residual, diagonal - diagonal.mean(-1, keepdim=True))
    assert not actual.triu(1).any()
    distance = torch.arange(6.0)[:, None] - torch.arange(6.0)
    assert without_offsets(torch.exp(-distance)).abs().max() < 1e-6


@pytest.mark.slow
def test_the_mask_alone_favours_the_near_and_a_model_without_it_does_not():
    x = tokens(2000, 16, 64) + tokens(1, 1, 64, seed=5)
    masked, free = (stack_scores(x, 3, causal=causal)[-1] for causal in (True, False))
    assert masked[15, 14] > masked[15, 8] > masked[15, 0]
    variances = [without_offsets(scores).var() for scores in (masked, free)]
    assert variances[0] > 10 * variances[1]


def test_slope_of_variances_has_its_closed_form():
    m = torch.arange(1, 65, dtype=torch.float64)
    assert variance_slope(3 / m).item() == pytest.approx(-1)
    assert variance_slope(torch.full((64,), 0.7)).item() == pytest.approx(0, abs=1e-6)
    x = tokens(2000, 32, 4)
    means = x.cumsum(1) / torch.arange(1, 33)[:, None]
    assert variance_slope(means.var(0).mean(-1)).item() == pytest.approx(-1, abs=0.05)
    assert variance_slope(x.var(0).mean(-1)).item() == pytest.approx(0, abs=0.05)


def audited(causal, seed=0, spec="none"):
    """A ViT whose layers are nearly those of the stack, with or without a mask."""
    torch.manual_seed(seed)
    model = convert(timm.create_model("test_vit", img_size=80, depth=3).eval(), spec).eval()
    with torch.no_grad():
        # patches have much in common
        model.patch_embed.proj.bias.copy_(0.3 * torch.randn(64))
        for block in model.blocks:
            q, k, v = block.attn.qkv.weight.chunk(3)
            k.copy_(q.copy_(0.5 * torch.eye(64)))
            block.attn.proj.weight.copy_(v.copy_(torch.eye(64)))
            block.mlp.fc2.weight.zero_()
            if causal:
                block.attn.register_forward_pre_hook(_causal, with_kwargs=True)
    actual = AuditedModel(VisionModel(model), "a model")
    actual.can.add("causal")
    return actual


def _causal(module, args, kwargs):
    context = kwargs.get("attn_mask")
    if context is None:
        return args, {**kwargs, "is_causal": True}
    context.is_causal = True
    return args, kwargs


def measured(one, count=8):
    images = [tokens(3, 80, 80, seed=k).float() for k in range(count)]
    return audit(one, images, [CausalMask()], controls=()).findings[0]


def test_a_causal_model_has_positions_in_its_logits_and_another_has_none():
    with_mask, without = measured(audited(True)), measured(audited(False))
    assert with_mask.verdict == "yes"
    assert without.verdict == "no"
    assert with_mask.outcome.units == GROUPS
    assert with_mask.outcome.per_layer[-1] > 0.1 > abs(without.value)
    assert with_mask.outcome.details["without_first"] > 0.05


def test_one_image_has_no_result():
    actual = measured(audited(True), 1)
    assert actual.verdict == "not decided"
    assert "One image" in actual.outcome.note


def test_models_without_a_causal_mask_raise():
    one = audited(False)
    one.can.remove("causal")
    actual = audit(one, [torch.zeros(3, 80, 80)] * 2, [CausalMask()], controls=())
    assert actual.refused["mask"][1] == "its attention is not causal"


def test_memory_is_constant():
    one, shapes = audited(True), []
    for count in (1, 2):
        acc = Accumulator()
        for k in range(count):
            acc.begin(k)
            one.watch(
                tokens(1, 3, 80, 80, seed=k).float(),
                lambda captured, acc=acc: CausalMask().on_layer(acc, captured),
            )
        shapes.append({name: value.shape for name, value in acc.sums.items()})
        assert acc.records[-1] == {"step": 1}
    assert shapes[0] == shapes[1]
