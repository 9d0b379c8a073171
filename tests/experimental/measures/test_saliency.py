"""Relevance: conservation, rules of a head, relevance of tables, deletion, and an unchanged model."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from torch import nn

from vispe import convert, create_encoding
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.experimental.measures.saliency import PositionRelevance
from vispe.experimental.measures.saliency_attention import RelevanceContext, RelevanceSums
from vispe.experimental.measures.saliency_backward import relevance
from vispe.experimental.measures.saliency_rules import (
    split_ratio,
    through_product,
    through_rotation,
    through_softmax,
)
from vispe.grid import Grid
from vispe.hosts.common.context import Context

REAL = Path(__file__).resolve().parents[3] / "../shared/weights/dinov2_vits14_focus.safetensors"


def vit(encoding="learned", classes=0, depth=2, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    model = timm.create_model("test_vit", img_size=64, num_classes=classes, depth=depth, **options)
    if encoding != "learned":
        convert(model, encoding)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval().to(dtype)


def sample(seed=0, dtype=torch.float64, side=64):
    return torch.randn(3, side, side, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("rule", ["epsilon", "ratio"])
@pytest.mark.parametrize("encoding", ["learned", "rope_axial", "alibi2d", "none", "rope_mixed", "sincos2d"])
def test_relevance_is_conserved(encoding, rule):
    model, image = vit(encoding), sample()
    actual = relevance(model, image, rule)
    assert actual.output == pytest.approx(model(image[None])[0].norm().item(), rel=1e-9)
    assert actual.gap < 1e-9
    assert actual.tokens.shape == (17,)
    assert actual.positions.shape == (3, 17)
    # tables have theirs at the start, rotations and biases in layers
    table, layers = float(actual.shares[0]), float(actual.shares[1:].sum())
    assert (table > 1e-3) == (encoding in ("learned", "sincos2d"))
    assert (layers > 1e-3) == (encoding in ("rope_axial", "alibi2d", "rope_mixed"))
    if encoding == "none":
        assert not actual.positions.any()
    # biases of positions lie between patches, and all offsets make up the whole
    expected = float(actual.positions.sum()) if encoding == "alibi2d" else 0.0
    assert float(actual.offsets.sum()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True, "init_values": 0.1, "reg_tokens": 2, "global_pool": "avg"},
        {"pre_norm": True, "no_embed_class": True, "act_layer": nn.SiLU},
        {"scale_attn_norm": True, "scale_mlp_norm": True, "class_token": False, "global_pool": "avg"},
    ],
)
def test_relevance_of_other_vits_is_conserved_in_single_precision(options):
    model, image = vit("learned", 5, dtype=torch.float32, **options), sample(dtype=torch.float32)
    logits = model(image[None])[0]
    actual = relevance(model, image, output=2)
    assert actual.output == pytest.approx(logits[2].item(), rel=1e-4)
    assert actual.gap < 1e-4
    assert relevance(model, image).output == pytest.approx(logits.max().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "layout"), [("rope_axial", "interleaved"), ("rope_dinov3", "half"), ("alibi2d", None)]
)
@pytest.mark.parametrize("rule", ["epsilon", "ratio"])
def test_a_head_equals_the_sequence_of_rules(name, layout, rule):
    grid, heads, width = Grid((2, 3), prefix=1), 2, 8
    facts = {"num_heads": heads} if layout is None else {"num_heads": heads, "dim": heads * width}
    encoding, pos = create_encoding(name, **facts), grid.positions()
    g = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, heads, 7, width, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)
    )
    run = RelevanceSums(rule, grid.shape, grid.prefix)
    run.positions = torch.zeros(2, 7, dtype=torch.float64)
    module = SimpleNamespace(vispe_layer=0, pos_enc=None)
    out = RelevanceContext(run, 1, Context(pos, (encoding,), None, False)).attend(module, q, k, v, q, 0.0)
    # the output is its own relevance, so its gradient is 1
    out.sum().backward()
    actual = [t.detach() * t.grad for t in (q, k, v)]
    q, k, v = (t.detach() for t in (q, k, v))
    scale, bias = width**-0.5, torch.zeros(1, dtype=torch.float64)
    rotated_q, rotated_k = q, k
    if layout:
        transform = encoding.transform(pos, 0)
        assert transform.layout == layout
        rotated_q, rotated_k = transform.query(q), transform.key(k)
    else:
        bias = encoding.bias(pos, 0).dense().double()
    product = rotated_q @ rotated_k.mT
    logits = product * scale + bias
    weights = logits.softmax(-1)
    value = weights @ v
    assert torch.allclose(out, value)
    of_weights, of_v = through_product(weights, v, value, value, 0.0)
    of_logits = through_softmax(logits, weights, of_weights)
    of_positions = torch.zeros(7, dtype=torch.float64)
    if not layout:
        of_bias = of_logits * bias / logits
        if rule == "ratio":
            of_logits, of_bias = split_ratio(product * scale, bias, of_logits, 0.0)
        else:
            of_logits = of_logits * product * scale / logits
        of_positions = of_bias.sum((0, 1, 2))
        # one offset by a loop: queries a row below and a column to the left of their keys
        pairs = of_bias.sum((0, 1))
        loop = sum(pairs[1 + 3 + x, 1 + x + 1] for x in range(2))
        assert float(run.offsets[2, 1]) == pytest.approx(float(loop))
    of_q, of_k = through_product(rotated_q, rotated_k.mT, product, of_logits, 0.0)
    of_k = of_k.mT
    if layout:
        twice = [
            torch.cat([t, t], -1) if layout == "half" else t.repeat_interleave(2, -1)
            for t in (transform.cos, transform.sin)
        ]
        parts = [through_rotation(x, *twice, r, layout=layout, eps=0.0) for x, r in ((q, of_q), (k, of_k))]
        # the class token is not rotated and keeps all
        of_q, of_k = (
            torch.cat([r[:, :, :1], part[0][:, :, 1:]], 2)
            for r, part in zip((of_q, of_k), parts, strict=True)
        )
        of_positions = sum((part[1] + part[2]).sum((0, 1, 3)) for part in parts)
        of_positions[0] = 0
    for one, other in zip(actual, (of_q, of_k, of_v), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-9)
    assert torch.allclose(run.positions[1], of_positions, rtol=1e-5, atol=1e-9)


def test_the_model_is_unchanged():
    model, image = vit("alibi2d"), sample()
    before, state = model(image[None]), {name: x.clone() for name, x in model.state_dict().items()}
    relevance(model, image)
    assert torch.equal(model(image[None]), before)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_modules_without_a_rule_raise():
    image = sample(dtype=torch.float32)
    for model, words in (
        (timm.create_model("resnet10t").eval(), "got ResNet"),
        (timm.create_model("test_vit", global_pool="map").eval(), "attn_pool"),
        (vit("peg"), "no rule for peg"),
        (vit("irpe", dtype=torch.float32), "reads tokens"),
        (vit("liere", dtype=torch.float32), "BlockTransform"),
        (timm.create_model("vit_tiny_patch16_224", depth=1, act_layer=nn.Tanh).eval(), "a Tanh"),
    ):
        with pytest.raises(UnsupportedHost, match=words):
            relevance(model, image)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(OptionError, match=r"model\.eval"):
        relevance(vit().train(), image)
    with pytest.raises(OptionError, match="index 5 logits, got 5"):
        relevance(vit(classes=5, dtype=torch.float32), image, output=5)
    with pytest.raises(OptionError, match="rule must be one of epsilon, ratio, got 'gamma'"):
        relevance(vit(), image, "gamma")


def curve(f, image, order, patch, steps=4):
    """Return the mean output while the first half of an order of patches is removed, step by step."""
    values, side = [], image.shape[-1] // patch
    for step in range(1, steps + 1):
        changed = image.clone()
        for position in order[: round(len(order) * step / steps / 2)].tolist():
            y, x = (patch * i for i in divmod(position, side))
            changed[:, y : y + patch, x : x + patch] = 0
        values.append(float(f(changed)))
    return np.mean(values)


@pytest.mark.slow
def test_removing_relevant_patches_first_reduces_the_output_most():
    # a bright patch among noise makes class 1
    torch.manual_seed(0)
    model, g = (
        timm.create_model("test_vit", img_size=64, num_classes=2, depth=2),
        torch.Generator().manual_seed(1),
    )

    def batch(n):
        images, label = 0.5 * torch.randn(n, 3, 64, 64, generator=g), torch.arange(n) % 2
        positions = torch.randint(16, (n,), generator=g)
        for image, y, position in zip(images, label.tolist(), positions.tolist(), strict=True):
            row, col = (16 * i for i in divmod(position, 4))
            image[:, row : row + 16, col : col + 16] += y
        return images, label, positions

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(30):
        images, label, _ = batch(24)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), label).backward()
        optimizer.step()
    model.eval()
    images, label, positions = (t[1::2] for t in batch(24))
    with torch.no_grad():
        assert (model(images).argmax(1) == label).float().mean() > 0.9
    ours, chance, first = [], [], []
    for image, position in zip(images, positions.tolist(), strict=True):
        actual = relevance(model, image, output=1)

        @torch.no_grad()
        def logit(x):
            return model(x[None])[0, 1]

        order = actual.tokens[-16:].argsort(descending=True)
        first.append(int(order[0]) == position)
        ours.append(curve(logit, image, order, 16))
        chance.append(np.mean([curve(logit, image, torch.randperm(16, generator=g), 16) for _ in range(4)]))
    assert np.mean(first) > 0.7
    assert np.mean(ours) < np.mean(chance) - 0.5
    assert np.mean(np.array(ours) < np.array(chance)) > 0.8


def ask(model, images, controls=()):
    return audit(AuditedModel(VisionModel(model), "model"), images, [PositionRelevance()], controls=controls)


def test_a_larger_table_has_a_larger_share():
    images = [sample(i, torch.float32) for i in range(5)]
    values = []
    for size in (0.0, 0.3, 1.0):
        model = vit(dtype=torch.float32)
        with torch.no_grad():
            model.pos_embed.copy_(
                size * torch.randn(model.pos_embed.shape, generator=torch.Generator().manual_seed(1))
            )
        (finding,) = ask(model, images).findings
        values.append(finding.outcome.value)
        assert finding.verdict == ("no" if size == 0 else "yes")
    assert values[0] < 1e-6
    assert 0.05 < values[1] < values[2] < 1


def test_the_measure_stores_numbers_and_one_pair_of_maps():
    images = [sample(i, torch.float32) for i in range(3)]
    (finding,) = ask(vit("alibi2d", dtype=torch.float32), images, ("random",)).findings
    outcome, details = finding.outcome, finding.outcome.details
    assert len(outcome.per_image) == 3
    assert len(outcome.per_layer) == 2
    assert outcome.value == pytest.approx(sum(outcome.per_layer), rel=1e-6)
    assert details["by table"] == {"epsilon": 0, "ratio": 0}
    assert details["largest gap"] < 1e-4
    assert "random" in finding.control
    for name, shape in (("content", (4, 4)), ("position", (4, 4)), ("offsets", (7, 7))):
        assert np.shape(details[f"{name} of the first image"]) == shape
    result = ask(vit("peg", dtype=torch.float32), images)
    assert not result.findings
    assert "no rule for peg" in str(result.refused)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason=f"the weights {REAL} are not on this disk")
def test_published_weights_cancel_relevance_of_opposite_signs():
    from skimage import data, transform

    from vispe.backbones.timm import load_backbone

    model = load_backbone("vit_small_patch14_dinov2", weights=str(REAL), img_size=224, any_size=True).eval()
    g, ours, chance = torch.Generator().manual_seed(0), [], []
    for name in ("camera", "coins", "cell", "astronaut"):
        raw = getattr(data, name)()
        side = min(raw.shape[:2])
        grey = transform.resize(raw[:side, :side].astype(float) / 255, (224, 224), anti_aliasing=True)
        image = torch.tensor(
            grey if grey.ndim == 3 else np.stack([grey] * 3, -1), dtype=torch.float32
        ).permute(2, 0, 1)
        image = (image - 0.45) / 0.226
        actual = relevance(model, image)
        assert actual.gap < 1e-4
        with torch.no_grad():
            full = model(image[None])[0]

        @torch.no_grad()
        def along(x, full=full):
            return model(x[None])[0] @ full / full.norm()

        order = (actual.tokens + actual.positions.sum(0))[-256:].abs().argsort(descending=True)
        ours.append(curve(along, image, order, 14))
        chance.append(curve(along, image, torch.randperm(256, generator=g), 14))
    assert np.mean(ours) < np.mean(chance)
