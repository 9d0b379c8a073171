"""Position in logits: rotary pairs against loops over pairs of patches, planted heads of position, shuffled ones."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

import vispe
from vispe.attention.transform.pairs import PairRotation
from vispe.backbones.attention_recorder import attention_map, record_attention
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.attention import attention_prior, head_statistics
from vispe.evaluate.attention.head_health import head_health
from vispe.evaluate.attention.offset_tables import radii
from vispe.evaluate.attention.position_in_logits import PositionInLogits, distance_rho, pair_tables, quarters
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.grid import Grid

GRID = Grid((3, 4))


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("layout", "pairs"), [("half", [(0, 2), (1, 3)]), ("interleaved", [(0, 1), (2, 3)])])
def test_tables_of_pairs_are_sums_over_pairs_of_patches(layout, pairs):
    q, k = random(2, 12, 4), random(2, 12, 4, seed=1)
    actual = pair_tables(q, k, GRID, layout)
    expected = torch.zeros(2, 2, 5, 7, dtype=torch.float64)
    for i in range(12):
        for j in range(12):
            dy, dx = j // 4 - i // 4, j % 4 - i % 4
            for p, pair in enumerate(pairs):
                expected[:, p, dy + 2, dx + 3] += (q[:, i, pair] * k[:, j, pair]).sum(-1)
    torch.testing.assert_close(actual, expected)


def test_rho_is_the_rank_correlation_with_the_distance():
    tables = random(2, 3, 5, 7)
    mean = {}
    count = torch.outer(torch.tensor([1, 2, 3, 2, 1]), torch.tensor([1, 2, 3, 4, 3, 2, 1]))
    rings = radii(GRID).round()
    for r in rings.unique().tolist():
        mean[r] = (tables * (rings == r)).sum((2, 3)) / (count * (rings == r)).sum()
    actual = distance_rho(tables, GRID)
    for h in range(2):
        for p in range(3):
            ranks = np.argsort(np.argsort([float(m[h, p]) for _, m in sorted(mean.items())]))
            assert float(actual[h, p]) == pytest.approx(np.corrcoef(ranks, np.arange(len(mean)))[0, 1])
    falling = (-radii(GRID)).exp()[None, None] * torch.as_tensor(count)
    assert float(distance_rho(falling, GRID)) == pytest.approx(-1)


def test_quarters_follow_the_speed_of_pairs():
    shares = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    assert quarters(shares, torch.tensor([[1.0, 3.0, 0.1, 2.0]])).tolist() == [pytest.approx([0.2, 0.3])]
    eight = torch.full((2, 8), 0.125)
    assert quarters(eight, torch.arange(8.0)[None]).tolist() == [[0.25, 0.25]] * 2


def small(spec="none", seed=0):
    torch.manual_seed(seed)
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    return vispe.convert(VisionTransformer(**sizes), spec).eval()


def accumulated(model, images):
    acc, measure = Accumulator(), PositionInLogits()
    for i, image in enumerate(images):
        acc.begin(i)
        record_attention(model, image[None], lambda captured: measure.on_layer(acc, captured))
    return acc


IMAGES = list(torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(1)))


def constant(model):
    """Make queries and keys the same for all tokens, so that nothing but their rotation differs."""
    torch.manual_seed(0)
    for block in model.blocks:
        block.attn.qkv.weight.data.mul_(0)
        block.attn.qkv.bias.data.normal_()
    return model


def test_heads_of_position_only_and_of_content_only():
    content = audit(AuditedModel(VisionModel(small()), ""), IMAGES, [PositionInLogits()])
    assert content.findings[0].verdict == "no"
    assert content.findings[0].control == {"none": content.findings[0].value}
    table = small("learned")
    torch.nn.init.normal_(next(p for n, p in table.named_parameters() if "pos_enc" in n), std=5.0)
    absolute = audit(AuditedModel(VisionModel(table), ""), IMAGES, [PositionInLogits()])
    shuffled = [x.reshape(3, 8, 8, 8, 8)[:, torch.randperm(8)].reshape(3, 64, 64) for x in IMAGES]
    repeated = audit(AuditedModel(VisionModel(table), ""), shuffled, [PositionInLogits()])
    # what a table of positions adds stays where it is when rows of patches change positions
    assert repeated.findings[0].value == pytest.approx(absolute.findings[0].value, rel=0.2)
    model = small("rope_axial")
    position = audit(
        AuditedModel(VisionModel(constant(model)), ""), IMAGES, [PositionInLogits()], controls=("none",)
    )
    assert position.findings[0].value == pytest.approx(1, abs=1e-4)
    assert position.findings[0].verdict == "yes"
    actual = PositionInLogits().summarize(accumulated(model, IMAGES), AuditedModel(VisionModel(model), ""))
    share = head_health(model, IMAGES).position_share
    np.testing.assert_allclose(actual.details["r2"], share, atol=1e-4)
    assert actual.details["positional"] == 1
    assert min(actual.details["by_distance"][0]) > actual.details["chance"]
    assert np.shape(actual.details["rho"]) == (2, 2, 8)


def test_sums_are_computed_on_demand_and_once(monkeypatch):
    """Sums of logits need no attention; after all sums of a layer, these and its rows are known."""
    maps, layers = [], []
    for module in (head_statistics, attention_prior):
        monkeypatch.setattr(module, "attention_map", lambda *args: maps.append(args) or attention_map(*args))
    record_attention(small("alibi2d"), IMAGES[0][None], layers.append)
    partial, full = layers
    part, sums = head_statistics.logit_sums_of(partial), head_statistics.layer_sums(partial)
    assert len(maps) == 1
    assert torch.equal(part.logits, sums.logits)
    assert torch.equal(part.squares, sums.squares)
    sums, rows = head_statistics.sums_of(full), attention_prior.received(full)
    assert head_statistics.logit_sums_of(full) is sums
    assert len(maps) == 2
    assert torch.equal(rows, attention_prior.received(replace(full, _known={})))


def test_bands_of_a_head_that_uses_its_fastest_pairs():
    model = small("rope_axial")
    acc = accumulated(model, IMAGES[:2])
    before = PositionInLogits().summarize(acc, AuditedModel(VisionModel(model), "")).details["quarters"]
    for block in model.blocks:  # the fastest pair of each axis in head 0: channels 0, 1 and 8, 9 of 16
        for part in (0, 32):
            rows = block.attn.qkv.weight.data[part : part + 16]
            rows[[0, 1, 8, 9]] *= 10
    acc = accumulated(model, IMAGES[:2])
    after = PositionInLogits().summarize(acc, AuditedModel(VisionModel(model), "")).details["quarters"]
    assert before[0][0][0] == pytest.approx(0.25, abs=0.1)
    assert after[0][0][0] > 0.9
    assert after[0][1][0] == pytest.approx(before[0][1][0], abs=1e-6)


def test_rho_of_a_constant_rotated_pair_falls_with_the_cosine():
    n = 6
    rows = torch.arange(n, dtype=torch.float64).repeat_interleave(n)[:, None] * 0.3
    rotary = PairRotation(rows.cos()[None, None], rows.sin()[None, None], "half")
    x = rotary.query(torch.ones(1, 1, n * n, 2, dtype=torch.float64))[0]
    table = pair_tables(x, x, Grid((n, n)), "half")[0, 0]
    count = n - abs(torch.arange(1 - n, n))
    expected = 2 * torch.cos(0.3 * torch.arange(1 - n, n).double())
    torch.testing.assert_close((table / torch.outer(count, count))[:, 0], expected)
    assert float(distance_rho(table[None, None], Grid((n, n)))) < -0.8
    assert math.isclose(float(table[n - 1, n - 1]), 2 * n * n)


def test_memory_is_constant():
    one, three = (accumulated(small("rope_axial"), IMAGES[:n]) for n in (1, 3))
    assert {n: t.shape for n, t in one.sums.items()} == {n: t.shape for n, t in three.sums.items()}
