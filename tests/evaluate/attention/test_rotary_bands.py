"""Rotary bands: ranks against the formula, what rotated the keys of a layer, and a planted band that points one way."""

import math

import pytest
import timm
import torch
from timm.models import VisionTransformer

import vispe
from vispe.backbones.attention_recorder import record_attention
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.attention.rotary_bands import (
    RotaryBands,
    band_ranks,
    band_shares,
    effective_rank,
    pairs_of,
    rotated,
    turning,
)
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.grid import Grid


def small(spec="rope_axial", seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"img_size": (40, 48), "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return vispe.convert(VisionTransformer(**sizes, num_classes=0, **options), spec).eval()


def samples(n, seed=1):
    return list(torch.randn(n, 3, 40, 48, generator=torch.Generator().manual_seed(seed)))


def accumulated(measure, model, images):
    acc = Accumulator()
    for i, image in enumerate(images):
        acc.begin(i)
        record_attention(model, image[None], lambda captured: measure.on_layer(acc, captured))
    return acc


def naive_rank(keys, top):
    values = sorted(torch.linalg.eigvalsh(keys.T @ keys).tolist())[-top:]
    shares = [v / sum(values) for v in values]
    return math.exp(-sum(p * math.log(p) for p in shares))


@pytest.mark.parametrize("top", [1, 2, 5, 8, 20])
def test_rank_is_exp_of_the_entropy_of_the_largest_eigenvalues(top):
    keys = torch.randn(3, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [naive_rank(k, min(top, 8)) for k in keys]
    assert effective_rank(keys, top).tolist() == pytest.approx(expected)
    with pytest.raises(OptionError, match="top needs an integer above 0"):
        effective_rank(keys, 0)


@pytest.mark.parametrize(("layout", "pair"), [("half", [1, 5]), ("interleaved", [2, 3])])
def test_bands_are_the_pairs_of_the_layout(layout, pair):
    keys = torch.randn(2, 30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pairs_of(keys, layout)[:, 1], keys[..., pair])
    assert float(band_ranks(keys, layout)[1, 1]) == pytest.approx(naive_rank(keys[1][:, pair], 2))
    direction = torch.tensor([1.0, 2.0], dtype=torch.float64)
    keys[..., pair] = torch.randn(2, 30, 1, dtype=torch.float64) * direction
    ranks = band_ranks(keys, layout)
    assert ranks[:, 1].tolist() == pytest.approx([1, 1])
    assert float(ranks[:, [0, 2, 3]].min()) > 1.5
    assert bool(band_ranks(torch.zeros(1, 4, 4), layout).isnan().all())  # nothing points nowhere


def test_shares_are_products_of_mean_norms():
    q, k = torch.randn(2, 1, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    most = [q[0, :, [i, i + 2]].norm(dim=1).mean() * k[0, :, [i, i + 2]].norm(dim=1).mean() for i in (0, 1)]
    assert band_shares(q, k, "half")[0].tolist() == pytest.approx([float(m / sum(most)) for m in most])


@pytest.mark.parametrize("spec", ["rope_axial", "rope_mixed", "rope_axial(logit_scale=2)", "gta"])
def test_queries_and_keys_are_those_after_the_rotation(spec):
    model = small(spec, reg_tokens=2)
    actual = []
    record_attention(
        model, torch.stack(samples(1)), lambda captured: actual.append((captured, rotated(captured)))
    )
    for captured, (q, k, rotation) in actual:
        rotated_q, rotated_k, _ = captured.call.transformed()
        assert torch.equal(q, rotated_q[0, :, 3:])
        assert torch.equal(k, rotated_k[0, :, 3:])
        assert rotation.layout in ("half", "interleaved")


def test_rotation_reports_the_frequencies_of_each_axis():
    model = small("rope_axial", class_token=True)
    angles = []
    record_attention(
        model,
        torch.stack(samples(1)),
        lambda captured: angles.append(turning(rotated(captured)[2], captured.grid)[0]),
    )
    freqs = model.pos_enc.parts()[0].frequencies(Grid((5, 6)).positions())[0][0]
    # channels of x come first
    torch.testing.assert_close(
        angles[0], torch.cat([torch.stack([0 * freqs, freqs], -1), torch.stack([freqs, 0 * freqs], -1)])
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [("vit_small_patch16_dinov3", "half"), ("vit_small_patch16_rope_mixed_224", "interleaved")],
)
def test_a_rotation_of_the_host_itself_is_known(name, layout):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=1, num_classes=0, img_size=48, embed_dim=48, num_heads=3).eval()
    captured = []
    record_attention(model, torch.randn(1, 3, 48, 48), captured.append)
    q, k, rotation = rotated(captured[0])
    assert rotation.layout == layout
    attn, prefix = model.blocks[0].attn, captured[0].grid.prefix
    plain = [
        t.unflatten(-1, (3, 16)).transpose(1, 2)[:, :, prefix:] for t in attn.qkv(captured[0].x).chunk(3, -1)
    ]
    torch.testing.assert_close(q, rotation.query(attn.q_norm(plain[0]))[0])
    torch.testing.assert_close(k, rotation.key(attn.k_norm(plain[1]))[0])


def plant(model, layer, head, pair, strength):
    """Give queries and keys of a head a large constant part in one pair of channels."""
    attn = model.blocks[layer].attn
    with torch.no_grad():
        for part in (0, 48):
            attn.qkv.bias[part + head * 16 + 2 * pair] = strength


def test_a_planted_still_band_is_detected():
    model, images = small(), samples(5)
    audited, measure = AuditedModel(VisionModel(model), "small"), RotaryBands()
    before = audit(audited, images, [RotaryBands()], controls=("random",)).findings[0]
    assert before.verdict != "yes"
    plant(model, 1, 2, 3, 8.0)  # the slowest pair of x: 0.03 radians per patch
    after = audit(audited, images, [RotaryBands()], controls=("random",)).findings[0]
    assert after.verdict == "yes"
    assert after.value > 0.9
    details = measure.summarize(accumulated(measure, model, images), audited).details
    worst = details["lowest"][0]
    assert (worst["layer"], worst["head"], worst["pair"]) == (1, 2, 3)
    assert details["still"] == [[2, 3, 6, 7]] * 2
    assert details["massive"] == details["massive_turning"] > 0
    plant(model, 1, 2, 3, 0.0)
    plant(model, 1, 2, 0, 8.0)  # one radian per patch: the keys go round
    fast = audit(audited, images, [RotaryBands()], controls=()).findings[0]
    assert fast.value < 0.4


@pytest.mark.parametrize("spec", ["none", "alibi2d", "liere"])
def test_models_without_pairs_report_a_reason(spec):
    measure, model = RotaryBands(), small(spec)
    acc = accumulated(measure, model, samples(1))
    with pytest.raises(UnsupportedHost, match="No layer rotates pairs"):
        measure.summarize(acc, AuditedModel(VisionModel(model), ""))


def test_memory_is_constant():
    model = small()
    one, three = (accumulated(RotaryBands(), model, samples(n)) for n in (1, 3))
    assert {n: t.shape for n, t in one.sums.items()} == {n: t.shape for n, t in three.sums.items()}
    assert [len(str(r)) < 200 for r in three.records] == [True] * 3
