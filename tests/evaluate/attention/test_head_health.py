"""Attention heads: maps against what models compute, scores against slow oracles, planted sinks, new heads."""

import copy
import json
import math

import numpy as np
import open_clip
import pytest
import timm
import torch
from timm.models import VisionTransformer
from torch import nn

import vispe
from vispe.backbones.attention_recorder import attention_layers, attention_map, prefix_names, record_attention
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.attention import head_statistics
from vispe.evaluate.attention.head_health import Thresholds, drifted, head_health, language_scores
from vispe.evaluate.attention.offset_tables import by_offset, pairs, radii, reach
from vispe.experimental.measures.head_reinitialization import reinit_heads
from vispe.grid import Grid

SIZE = (3, 24, 40)  # 3 x 5 patches of 8 pixels


def small(pos_embed="learn", seed=0, **options):
    torch.manual_seed(seed)
    sizes = {
        "img_size": SIZE[1:],
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 0,
    }
    model = VisionTransformer(**{**sizes, **options}).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(6)
            nn.init.normal_(block.attn.qkv.bias)
    return model if pos_embed == "learn" else vispe.convert(model, pos_embed)


def images(n=2, size=SIZE, seed=1):
    return torch.randn(n, *size, generator=torch.Generator().manual_seed(seed))


def captured(model, x):
    actual = []
    record_attention(model, x, actual.append)
    return actual


def outputs(model, x):
    """Return what enters the output projection of each layer (b, n, d) when the model runs."""
    acc, handles = [], []
    for _, module in attention_layers(model):
        out = getattr(module, "proj", None) or module.out_proj
        handles.append(out.register_forward_pre_hook(lambda _, args: acc.append(args[0])))
    with torch.no_grad():
        getattr(model, "forward_features", model)(x)
    for handle in handles:
        handle.remove()
    return acc


SPECS = [
    "learn",
    "none",
    "alibi2d",
    "alibi2d(slopes=learned,wrap=false)+rope_axial",
    "irpe",
    "rope_mixed",
    "gta",
    "rpb",
]


@pytest.mark.parametrize("spec", SPECS)
def test_maps_are_those_of_the_model(spec):
    model = (
        small(spec, embed_dim=48, reg_tokens=2)
        if spec == "gta"
        else small(spec, embed_dim=24 * 2, reg_tokens=2)
    )
    x = images()
    real = outputs(model, x)
    for one, out in zip(captured(model, x), real, strict=True):
        assert one.grid == Grid((3, 5), prefix=3) or (one.grid.shape, one.grid.prefix) == ((3, 5), 3)
        _, attn = attention_map(one.call)
        assert attn.shape == (2, 3, 18, 18)
        torch.testing.assert_close(attn.sum(-1), torch.ones(2, 3, 18))
        _, _, v = one.call.transformed()
        actual = one.call.finish(attn @ v)
        if spec != "irpe":  # whose values have a term of their own
            torch.testing.assert_close(actual.transpose(1, 2).flatten(2), out, rtol=1e-4, atol=1e-5)
        parts = torch.cat([attention_map(one.call, slice(i, i + 1))[1] for i in range(3)], 1)
        assert torch.allclose(parts, attn, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_dinov3", "eva02_tiny_patch14_224", "naflexvit_base_patch16_gap"]
)
def test_maps_of_other_families(name):
    torch.manual_seed(0)
    size = 28 if "patch14" in name else 32
    sized = {} if "naflex" in name else {"img_size": size}
    model = timm.create_model(name, depth=1, num_classes=0, **sized).eval()
    x = images(2, (3, size, size))
    (one,) = captured(model, x)
    assert one.grid.shape == (2, 2)
    attn = attention_map(one.call)[1]
    out = outputs(model, x)
    actual = (attn @ one.call.v).transpose(1, 2).flatten(2)
    if isinstance(getattr(model.blocks[0].attn, "norm", nn.Identity()), nn.Identity) and out:
        torch.testing.assert_close(actual, out[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [None, "alibi2d"])
def test_maps_of_an_open_clip_tower(spec):
    torch.manual_seed(0)
    size = {
        "image_size": 16,
        "patch_size": 8,
        "width": 16,
        "layers": 2,
        "heads": 2,
        "mlp_ratio": 1,
        "output_dim": 4,
    }
    tower = open_clip.transformer.VisionTransformer(**size).eval()
    tower = tower if spec is None else vispe.convert(tower, spec)
    x = images(2, (3, 16, 16))
    with torch.no_grad():
        before = tower(x)
    actual = captured(tower, x)
    with torch.no_grad():
        assert torch.equal(tower(x), before)
    assert [(s.path, s.grid.shape, s.grid.prefix) for s in actual] == [
        (f"transformer.resblocks.{i}.attn", (2, 2), 1) for i in (0, 1)
    ]
    attn = tower.transformer.resblocks[0].attn
    if spec is None:
        with torch.no_grad():
            expected = attn(*[actual[0].x] * 3, average_attn_weights=False)[1]
        torch.testing.assert_close(attention_map(actual[0].call)[1], expected)
    assert prefix_names(tower, 1) == ("class",)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = vispe.Attention(16, 2, "rope_axial", fused_qkv=False)

    def forward(self, x):
        return self.layer(x.flatten(2).mT, Grid(x.shape[2:]))


def test_maps_of_attention_in_a_model_of_your_own():
    torch.manual_seed(0)
    model = Own().eval()
    x = torch.randn(2, 16, 3, 4)
    (one,) = captured(model, x)
    assert (one.path, one.grid.shape) == ("layer", (3, 4))
    actual = (attention_map(one.call)[1] @ one.call.v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(model.layer.proj(actual), model(x))


def test_hooks_are_removed_and_outputs_are_bit_equal():
    model = small("alibi2d")
    x = images()
    with torch.no_grad():
        before = model(x)
    types = [type(m) for m in model.modules()]

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_attention(model, x, fail)
    head_health(model, x)
    assert [type(m) for m in model.modules()] == types
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(x), before)


def test_models_that_cannot_be_read_are_refused():
    with pytest.raises(UnsupportedHost, match="must have supported attention layers, got ResNet"):
        attention_layers(timm.create_model("resnet10t"))
    with pytest.raises(
        UnsupportedHost, match=r"maps of blocks\.0\.attn cannot be computed: DiffAttention subtracts two maps"
    ):
        attention_layers(small(attn_layer="diff", embed_dim=48))
    with pytest.raises(OptionError, match="training mode"):
        record_attention(small().train(), images(), print)
    with pytest.raises(OptionError, match="batch_size needs an integer above 0, got batch_size=0"):
        head_health(small(), images(), batch_size=0)
    with pytest.raises(ShapeError, match="no images, got an empty sequence"):
        head_health(small(), [])
    with pytest.raises(ShapeError, match=r"one size, got \(3, 24, 40\) and \(3, 40, 24\)"):
        head_health(small(), [torch.zeros(SIZE), torch.zeros(3, 40, 24)], batch_size=2)
    with pytest.raises(ShapeError, match=r"got 5x3|got \(5, 3\) after \(3, 5\)"):
        head_health(small(dynamic_img_size=True), [torch.zeros(SIZE), torch.zeros(3, 40, 24)])


@pytest.mark.parametrize("spec", ["learn", "alibi2d.local(slopes=geometric)"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_scores_are_those_of_a_slow_oracle(spec, batch, monkeypatch):
    model, x = small(spec, reg_tokens=1), images(3)
    monkeypatch.setattr(head_statistics, "SCRATCH", 7 * batch * 17**2 * 2)  # two heads at once
    result = head_health(model, iter(x), batch_size=batch)
    layers = captured(model, x)
    assert result.tokens[:3] == ("class", "register 1", "patch 0,0")
    assert result.tokens[-1] == "patch 2,4"
    for i, one in enumerate(layers):
        logits, attn = (t.double().numpy() for t in attention_map(one.call))
        for h in range(3):
            a = attn[:, h]
            received = a.mean((0, 1))
            token = received.argmax()
            assert result.sink_token[i, h] == token
            assert result.sink_mass[i, h] == pytest.approx(received[token])
            winner = [a[n].mean(0).argmax() for n in range(3)]
            assert result.sink_agreement[i, h] == pytest.approx(np.mean([w == token for w in winner]))
            assert result.peak_mass[i, h] == pytest.approx(np.mean([a[n].mean(0).max() for n in range(3)]))
            expected = -(a * np.log(np.maximum(a, 1e-300))).sum(-1).mean() / math.log(17)
            assert result.entropy[i, h] == pytest.approx(expected, abs=1e-6)
            local, mass, ends = 0.0, {}, {}
            for q in range(15):
                for k in range(15):
                    dy, dx = k // 5 - q // 5, k % 5 - q % 5
                    value = a[:, 2 + q, 2 + k].mean()
                    local += value * (max(abs(dy), abs(dx)) <= 1) / 15
                    ring = round(math.hypot(dy, dx))
                    mass[ring] = mass.get(ring, 0) + value
                    ends.setdefault((dy, dx), []).extend(logits[:, h, 2 + q, 2 + k])
            assert result.local_mass[i, h] == pytest.approx(local)
            profile = [mass.get(r, 0) / sum(mass.values()) for r in range(5)]
            np.testing.assert_allclose(result.profile[i, h], profile, atol=1e-9)
            flat = np.concatenate(list(ends.values()))
            between = sum(len(v) * (np.mean(v) - flat.mean()) ** 2 for v in ends.values())
            assert result.position_share[i, h] == pytest.approx(
                between / ((flat - flat.mean()) ** 2).sum(), abs=1e-6
            )
    if spec == "learn":
        assert np.isnan(result.bias_reach).all()
        assert np.isnan(result.receptive_field).all()
    else:
        assert (result.bias_reach[0] <= result.bias_reach[1]).all()
        dense = layers[0].call.dense_bias()[0, :, 2:, 2:].double()
        expected = reach(by_offset(dense.softmax(-1), Grid((3, 5))), 0.05)
        np.testing.assert_array_equal(result.bias_reach[1, 0], expected.numpy())
    json.dumps(result.to_dict(), allow_nan=False)


def test_bias_alone_is_what_a_head_without_content_does():
    model = small("alibi2d.local(slopes=geometric)", class_token=False, global_pool="avg")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.zero_()
            block.attn.qkv.bias.zero_()
    result = head_health(model, images(1))
    np.testing.assert_allclose(result.profile, result.bias_profile, atol=1e-7)
    np.testing.assert_array_equal(result.reach, result.bias_reach)
    np.testing.assert_allclose(result.position_share, 1.0, atol=1e-6)


@pytest.mark.parametrize(("eps", "expected"), [(0.05, 4.74), (0.5, 1.68), (0.01, 6.64)])
def test_receptive_field_of_a_gentle_alibi_is_that_of_the_continuum(eps, expected):
    slope, n = 0.1, 161
    table = (-slope * radii(Grid((n, n)))).exp()[None]
    assert slope * float(reach(table, eps)[0]) == pytest.approx(expected, abs=0.02)


def test_offsets_of_a_grid():
    grid = Grid((2, 3))
    values = torch.arange(36.0, dtype=torch.float64).reshape(1, 6, 6)
    table = by_offset(values, grid)
    assert table.shape == (1, 3, 5)
    assert table[0, 1, 2] == values[0].diagonal().sum()
    assert table[0, 2, 4] == values[0, 0, 5]  # down by 1, right by 2
    assert torch.equal(by_offset(torch.ones_like(values), grid)[0], pairs(grid))


def test_sums_by_offset_are_those_of_a_loop():
    grid, values = Grid((3, 4)), torch.randn(2, 3, 12, 12)
    table = torch.zeros(2, 3, 5, 7, dtype=torch.float64)
    for i in range(12):
        for j in range(12):
            table[:, :, j // 4 - i // 4 + 2, j % 4 - i % 4 + 3] += values[:, :, i, j]
    torch.testing.assert_close(by_offset(values, grid), table, rtol=1e-12, atol=1e-12)


def test_sums_of_a_layer_are_made_once(monkeypatch):
    calls = []
    layer_sums = head_statistics.layer_sums
    monkeypatch.setattr(head_statistics, "layer_sums", lambda one: calls.append(one) or layer_sums(one))
    first, second = captured(small(), images())
    assert head_statistics.sums_of(first) is head_statistics.sums_of(first)
    assert head_statistics.sums_of(second) is not head_statistics.sums_of(first)
    assert calls == [first, second]


def plant(model, x, layer, head, token, strength):
    """Make a head attend to one token, whose input is distinguished from the others by a direction."""
    inside = captured(model, x)[layer].x
    direction = inside[:, token].mean(0) - inside.mean((0, 1))
    attn = model.blocks[layer].attn
    d, width = attn.head_dim, attn.qkv.weight.shape[1]
    with torch.no_grad():
        for part in (0, width):
            attn.qkv.weight[part + head * d : part + (head + 1) * d] = 0
            attn.qkv.bias[part + head * d : part + (head + 1) * d] = 0
        attn.qkv.bias[head * d] = d**0.5
        attn.qkv.weight[width + head * d] = strength * direction / direction.norm() ** 2


def test_planted_sinks_are_detected_with_their_kind():
    model, x = small(reg_tokens=2), images(4)
    with torch.no_grad():
        nn.init.normal_(model.cls_token)
        nn.init.normal_(model.reg_token)
        model.pos_embed.mul_(100)  # so that a patch can be identified by its position
    plant(model, x, 0, 1, 0, 40)
    plant(model, x, 0, 2, 2, 40)
    plant(model, x, 1, 0, 3 + 7, 60)
    result = head_health(model, x)
    assert {(0, 1), (0, 2), (1, 0)} <= set(result.heads("sink", "dead"))
    assert [result.sink_kind(*h) for h in ((0, 1), (0, 2), (1, 0))] == ["class", "register", "patch"]
    assert result.tokens[result.sink_token[0, 2]] == "register 2"
    assert result.tokens[result.sink_token[1, 0]] == "patch 1,2"
    assert result.sink_agreement[1, 0] == 1
    assert "onto the class token" in result.verdict
    assert result.collapsed == len(result.heads("sink", "dead")) / 6
    assert (
        max(result.massive, key=lambda m: m[4])[2:4] in {("q", 0), ("q", 8), ("q", 16)} or not result.massive
    )
    with pytest.raises(
        OptionError, match=r"unknown class, got 'ill'. Use one of distributed, local, sink, dead"
    ):
        result.heads("ill")


def test_massive_channels_are_detected():
    model, x = small(embed_dim=48), images()
    model.blocks[1].attn.qkv.weight.data[48 + 16 + 3] *= 500  # key, head 1, channel 3
    actual = {m[:4] for m in head_health(model, x).massive}
    assert (1, 1, "k", 3) in actual
    assert not any(m[2] == "q" for m in actual)


def test_channels_of_position():
    model, x = small("none"), images(6)
    assert np.abs(head_health(model, x).position_r2[0]).mean() < 0.1  # noise has no position
    biased = small("learn")
    biased.pos_embed.data *= 200
    assert head_health(biased, x).position_r2[0].mean() > 0.8
    single = head_health(biased, x[:1])
    assert np.isnan(single.position_r2).all()
    assert "One image" in single.notes[0]


def test_classes_follow_their_order():
    sink, local = torch.tensor([0.96, 0.95, 0.51, 0.5, 0.5]), torch.tensor([0.9, 0.9, 0.9, 0.61, 0.6])
    assert Thresholds().classify(sink, local).tolist() == [3, 2, 2, 1, 0]
    attn = torch.eye(5).expand(1, 1, 5, 5)
    actual = language_scores(attn, window=1, sink=4)
    assert [float(v) for v in (actual.sink_mass, actual.local_mass)] == pytest.approx([0.2, 1.0])
    with pytest.raises(ShapeError, match=r"\(L, H, T, T\) with T > sink=5"):
        language_scores(attn, sink=5)
    with pytest.raises(OptionError, match="window needs an integer above 0"):
        language_scores(attn, window=0)


HEADS = [(0, 1), (1, 0), (1, 2)]


@pytest.mark.parametrize("init", ["uniform", "normal"])
@pytest.mark.parametrize("spec", ["learn", "alibi2d"])
def test_new_heads_do_not_change_other_heads(spec, init):
    model, x = small(spec), images()
    silent = copy.deepcopy(model)
    for layer, head in HEADS:
        silent.blocks[layer].attn.proj.weight.data[:, head * 8 : head * 8 + 8] = 0
    others = outputs(silent, x)
    handle = reinit_heads(model, HEADS, init=init, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(model(x), silent(x))
    for layer, (mine, expected) in enumerate(zip(outputs(model, x), others, strict=True)):
        for head in range(3):
            channels = slice(head * 8, head * 8 + 8)
            assert torch.equal(mine[..., channels], expected[..., channels]) is ((layer, head) not in HEADS)
    fresh = model.blocks[0].attn.qkv.weight.unflatten(0, (3, 3, 8))[:, 1]
    std = math.sqrt(2 / (24 + 24))  # of 24 rows and 24 columns
    fresh = fresh.detach()
    assert float(fresh.std()) == pytest.approx(std, rel=0.1)
    assert float(fresh.abs().max()) <= (math.sqrt(3) * std if init == "uniform" else math.inf)
    assert not model.blocks[0].attn.qkv.bias.unflatten(0, (3, 3, 8))[:, 1].any()
    per_head = 3 * 8 * 24 + 3 * 8 + 24 * 8
    assert handle.trained == 3 * per_head


def test_training_moves_new_heads_and_nothing_else():
    model, x = small("alibi2d(slopes=learned)"), images(4)
    acc = {n: p.detach().clone() for n, p in model.named_parameters()}
    handle = reinit_heads(model, HEADS)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-2, weight_decay=0.3)
    handle.guard(optimizer)
    first = None
    for _ in range(4):
        optimizer.zero_grad()
        (model(x) * torch.randn(4, 24, generator=torch.Generator().manual_seed(0))).sum().backward()
        if first is None:
            first = {n: p.grad.clone() for n, (p, _) in handle.free.items()}
        nn.utils.clip_grad_norm_(handle.parameters(), 1.0)
        optimizer.step()
    assert not first["blocks.0.attn.qkv.weight"].any()  # behind an output of zero
    assert first["blocks.0.attn.proj.weight"][:, 8:16].any()
    for name, p in model.named_parameters():
        if name not in handle.free:
            assert torch.equal(p, acc[name])
            assert not p.requires_grad
            continue
        mask = handle.free[name][1]
        assert torch.equal(p[~mask], acc[name][~mask])
        assert (p[mask] != start[name][mask]).all()
    handle.release()
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_post_hooks


def test_without_the_guard_weight_decay_moves_frozen_entries():
    model = small()
    handle = reinit_heads(model, [(0, 0)])
    weight = model.blocks[0].attn.proj.weight
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-2, weight_decay=0.3)
    model(images()).sum().backward()
    optimizer.step()
    assert not torch.equal(weight[:, 8:], before[:, 8:])


def clip_tower(spec):
    size = {"image_size": 16, "patch_size": 8, "width": 16, "layers": 2, "heads": 2, "output_dim": 4}
    tower = open_clip.transformer.VisionTransformer(**size, mlp_ratio=1).eval()
    with torch.no_grad():
        for block in tower.transformer.resblocks:
            block.attn.in_proj_weight.normal_()
    return tower if spec == "learn" else vispe.convert(tower, spec)


def own_attention(spec):
    del spec
    return Own().eval()


@pytest.mark.parametrize(
    ("build", "spec", "size"),
    [
        (clip_tower, "learn", (3, 16, 16)),
        (clip_tower, "alibi2d", (3, 16, 16)),
        (own_attention, "rope_axial", (16, 3, 4)),
        (lambda _: small(qkv_bias=True), "learn", SIZE),
        (lambda spec: small(spec, embed_dim=48), "rope_axial", SIZE),
    ],
)
def test_new_heads_add_nothing_in_every_kind_of_layer(build, spec, size):
    torch.manual_seed(0)
    model, x = build(spec), images(2, size)
    silent = copy.deepcopy(model)
    layers, same = attention_layers(model), attention_layers(silent)
    head, last = 1, len(layers) - 1
    acc = {n: p.detach().clone() for n, p in model.named_parameters()}
    for layer in {0, last}:
        out = getattr(same[layer][1], "proj", None) or same[layer][1].out_proj
        width = out.in_features // same[layer][1].num_heads
        out.weight.data[:, head * width : (head + 1) * width] = 0
    handle = reinit_heads(model, {(0, head), (last, head)})
    with torch.no_grad():
        assert torch.equal(model(x), silent(x))
    for name, p in model.named_parameters():
        mask = handle.free[name][1] if name in handle.free else torch.zeros_like(p, dtype=torch.bool)
        assert torch.equal(p[~mask], acc[name][~mask])
    optimizer = torch.optim.AdamW(handle.parameters(), lr=1e-2, weight_decay=0.3)
    handle.guard(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        for p, mask in handle.free.values():
            assert not p.grad[~mask].any()
        optimizer.step()
    changed = 0
    for name, p in model.named_parameters():
        mask = handle.free[name][1] if name in handle.free else torch.zeros_like(p, dtype=torch.bool)
        assert torch.equal(p[~mask], acc[name][~mask])
        changed += int((p != acc[name]).sum())
    assert changed > 0


def test_new_heads_in_open_clip_and_eva():
    size = {
        "image_size": 16,
        "patch_size": 8,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "mlp_ratio": 1,
        "output_dim": 4,
    }
    tower = open_clip.transformer.VisionTransformer(**size)
    handle = reinit_heads(tower, [(0, 1)])
    attn = tower.transformer.resblocks[0].attn
    assert set(handle.free) == {
        f"transformer.resblocks.0.attn.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight")
    }
    assert not attn.out_proj.weight[:, 8:].any()
    assert attn.out_proj.weight[:, :8].all()
    eva = timm.create_model("vit_small_patch16_dinov3", img_size=32, depth=1)
    handle = reinit_heads(eva, [(0, 5)])
    assert not eva.blocks[0].attn.proj.weight[:, 320:].any()
    handle.release()


def test_heads_that_cannot_be_replaced():
    model = small()
    with pytest.raises(OptionError, match="layer must be in 0 to 1, got 2"):
        reinit_heads(model, [(2, 0)])
    with pytest.raises(OptionError, match=r"head must be in 0 to 2 for blocks\.1\.attn, got 3"):
        reinit_heads(model, [(0, 0), (1, 3)])
    with pytest.raises(OptionError, match="heads must not be empty"):
        reinit_heads(model, [])
    with pytest.raises(UnsupportedHost, match="normalised together"):
        reinit_heads(small(scale_attn_norm=True), [(0, 0)])
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    with pytest.raises(OptionError, match=r"Create it from Reinit\.parameters"):
        reinit_heads(model, [(0, 0)]).guard(other)
    assert small().blocks[0].attn.proj.weight.requires_grad


def test_drift_names_heads_that_changed():
    model, x = small(), images()
    before = head_health(model, x)
    assert drifted(before, before) == []
    with torch.no_grad():
        model.cls_token.fill_(3.0)
    plant(model, x, 0, 2, 0, 60)
    after = head_health(model, x)
    assert (0, 2) in [d[:2] for d in drifted(before, after)]
    assert (0, 2) not in [d[:2] for d in drifted(before, after, touched=[(0, 2)])]
    with pytest.raises(ShapeError, match="reports of one model"):
        drifted(before, head_health(small(depth=1), x))


@pytest.mark.parametrize("spec", ["learn", "alibi2d.local(slopes=geometric)"])
def test_the_figure_shows_everything(spec):
    from vispe.evaluate.attention.head_figures import plot_health

    model, x = small(spec), images(3)
    plant(model, x, 1, 0, 0, 60)
    result = head_health(model, x)
    figure = plot_health(result, "a model")
    texts = [t.get_text() for t in figure.texts]
    assert any(t.lower() == result.verdict.lower() for t in texts)
    assert ("Dotted: the bias alone" in texts[-3] or any("Dotted" in t for t in texts)) == (spec != "learn")
    figure.canvas.draw()
    tiles = [t.get_text() for t in figure.axes[0].texts]
    assert len([t for t in tiles if not t.startswith("■")]) == 6
    assert f"■ {len(result.heads('dead'))} dead" in tiles
