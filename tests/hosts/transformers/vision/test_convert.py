"""Encodings in vision towers of transformers, against dense attention with an explicit bias."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import vispe
from tests.cases import cases
from tests.hosts.helpers import cotangent, dense
from tests.hosts.transformers.tiny import FAMILIES, QWEN
from tests.hosts.transformers.vision.oracle import (
    GRIDS,
    ROWS,
    Pair,
    by_hand,
    close,
    images,
    line,
    mask,
    patches,
    tower,
)
from vispe.attention.backends.triton.coords.operands import coords_unsupported_reason
from vispe.errors import UnsupportedCombination
from vispe.grid import Positions
from vispe.hosts.transformers.vision.convert import convert_vision, describe_vision, restore_vision
from vispe.hosts.transformers.vision.families import attentions
from vispe.hosts.transformers.vision.packed_tokens import seeded_prepare


@cache
def distances(h: int, w: int) -> Tensor:
    return dense(h, w, 0).double()


def alibi(a: Tensor, b: Tensor, grid: tuple[int, int]) -> Tensor:
    return -distances(*grid)[a[..., 0] * grid[1] + a[..., 1], b[..., 0] * grid[1] + b[..., 1]][None]


def gauss(a: Tensor, b: Tensor, grid: tuple[int, int]) -> Tensor:
    return 3 * torch.exp((a - b).double().square().sum(-1) / (-2 * 1.5**2))[None]


BIASES = {"alibi2d": ("alibi2d", alibi), "gaussian2d": ("gaussian2d(sigma=1.5,amplitude=3.0)", gauss)}


@pytest.mark.slow
@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("name", BIASES)
def test_the_bias_in_a_qwen_tower_depends_on_rows_and_columns(family, name):
    spec, pair = BIASES[name]
    ours = tower(family)
    stock = by_hand(copy.deepcopy(ours), [mask(family, pair, i) for i in range(2)])
    x, grids = patches()
    plain = ours(x, grid_thw=grids).pooler_output
    convert_vision(ours, spec)
    for _ in range(2):
        out, expected = (m(x, grid_thw=grids, output_hidden_states=True) for m in (ours, stock))
        for got, ref in zip(out.hidden_states, expected.hidden_states, strict=True):
            close(got, ref)
        close(out.last_hidden_state, expected.last_hidden_state)
        close(out.pooler_output, expected.pooler_output)
    for got, ref in zip(
        out.get("deepstack_features") or (), expected.get("deepstack_features") or (), strict=True
    ):
        close(got, ref)
    assert (out.pooler_output - plain).abs().max() > 1e-2
    single = patches(GRIDS[2:3])  # another number of images, after the first
    masked = by_hand(copy.deepcopy(stock), [mask(family, pair, i, GRIDS[2:3]) for i in range(2)])
    close(ours(*single).last_hidden_state, masked(*single).last_hidden_state)


@cases("family", QWEN)
def test_images_and_videos_of_one_call_are_independent(family):
    ours = tower(family)
    convert_vision(ours, "alibi2d+rpb" if family == "qwen3_vl" else "alibi2d+rpb(grid=[4,6])")
    x, grids = patches()
    together = ours(x, grids).last_hidden_state
    ends = grids.prod(-1).cumsum(0).tolist()
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        close(together[start:end], ours(x[start:end], grids[i : i + 1]).last_hidden_state, 1e-12)
    frames = x[24:48].unflatten(0, (3, 8))  # the video as three images
    separate = ours(frames.flatten(0, 1), torch.tensor([[1, 2, 4]] * 3)).last_hidden_state
    close(together[24:48], separate, 1e-12)


@cases("family", ["qwen2_vl", "qwen3_vl"])
def test_the_order_of_patches_does_not_matter_when_their_positions_follow(family):
    ours = tower(family)
    convert_vision(ours, "alibi2d+irpe(mode=bias)+rpb(grid=[6,10])", keep_abs=False)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)).to(p) * 0.2)
    x, grids = patches(GRIDS[2:3])
    order = torch.randperm(60, generator=torch.Generator().manual_seed(4))
    ids = torch.tensor([token[2:4] for token in line(family, GRIDS[2:3])])
    out = ours(x, grids).last_hidden_state
    close(ours(x, grids, position_ids=ids).last_hidden_state, out, 1e-12)
    close(ours(x[order], grids, position_ids=ids[order]).last_hidden_state, out[order], 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("mode", ["plain", "checkpoint", "reentrant"])
def test_gradients_of_slopes_equal_dense_attention(family, mode):
    ours = tower(family).train()
    convert_vision(ours, "alibi2d(slopes=learned)")
    slopes = torch.tensor([0.7, 1.9], dtype=torch.float64)
    x, grids = patches()
    x.requires_grad_()
    with torch.no_grad():
        for i, _, attn in attentions(ours):
            attn.pos_enc.slope.copy_(slopes + i)
    layer_slopes = [slopes.clone().add_(i).requires_grad_() for i in range(2)]
    stock = copy.deepcopy(ours)
    restore_vision(stock)
    if mode != "plain":
        ours.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    masks = [
        mask(family, lambda *p, s=s: alibi(*p) * s[:, None, None], i) for i, s in enumerate(layer_slopes)
    ]
    for p in ours.parameters():
        p.grad = None
    out = ours(x, grids).last_hidden_state
    expected = by_hand(stock, masks)(y := x.detach().clone().requires_grad_(), grids).last_hidden_state
    close(out, expected)
    out.backward(cotangent(out))
    expected.backward(cotangent(expected))
    close(x.grad, y.grad)
    for (i, path, attn), ref in zip(attentions(ours), layer_slopes, strict=True):
        close(attn.pos_enc.slope.grad, ref.grad)
        assert f"{path}.pos_enc.slope" in dict(ours.named_parameters())
        close(attn.qkv.weight.grad, list(attentions(stock))[i][2].qkv.weight.grad)


@cases("family", QWEN)
def test_gradients_of_a_table_equal_dense_attention(family):
    grids = ((2, 4, 6), (1, 4, 6))
    ours = tower(family)
    stock = copy.deepcopy(ours)
    convert_vision(ours, "rpb", grid=[4, 6])
    x, thw = patches(grids)
    values = torch.randn(2, 7 * 11, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    tables = [t.clone().requires_grad_() for t in values]
    with torch.no_grad():
        for i, _, attn in attentions(ours):
            attn.pos_enc.relative_position_bias_table.copy_(values[i])

    def pair(i: int) -> Pair:
        return lambda a, b, _: tables[i][(a - b + torch.tensor([3, 5])) @ torch.tensor([11, 1])].permute(
            2, 0, 1
        )

    out = ours(x, thw).last_hidden_state
    expected = by_hand(stock, [mask(family, pair(i), i, grids) for i in range(2)])(x, thw).last_hidden_state
    close(out, expected, 1e-10)
    out.backward(cotangent(out))
    expected.backward(cotangent(expected))
    for i, _, attn in attentions(ours):
        close(attn.pos_enc.relative_position_bias_table.grad, tables[i].grad, 1e-10)


@cases("family", FAMILIES)
def test_a_bias_of_zero_has_no_effect(family):
    ours = tower(family, double=False)
    x = patches(double=False) if family in QWEN else (images(family, double=False),)
    before = ours(*x).last_hidden_state
    for spec in ("gaussian2d(amplitude=0.0)", "irpe(mode=bias,on=qk)+gaussian2d(amplitude=0.0)"):
        convert_vision(ours, spec)
        close(ours(*x).last_hidden_state, before, 1e-6)


@pytest.mark.parametrize("family", QWEN)
def test_kernels_receive_a_bias_at_the_coordinates(family, monkeypatch):
    recorded = []
    real = vispe.encodings.attention_layer.attention
    monkeypatch.setattr(
        vispe.encodings.attention_layer,
        "attention",
        lambda q, *a, bias, **kw: recorded.append((q, bias)) or real(q, *a, bias=bias, **kw),
    )
    ours = tower(family, double=False)
    convert_vision(ours, "alibi2d", slopes="learned")
    ours(*patches(double=False))
    tokens = line(family)
    for q, bias in recorded:
        assert type(bias).__name__ == "DistanceBias"
        assert coords_unsupported_reason(bias) is None
        assert bias.pos.coords.shape[0] in (1, q.shape[0])
        assert bias.pos.extent.tolist() == [list(bias.pos.grid.shape)]
        assert torch.equal(bias.pos.cells().float(), bias.pos.coords)
    full = [(q, b) for q, b in recorded if b.pos.tokens in (24, 8, 60)][-3:]
    # equal frames are one batch
    assert [(q.shape[0], b.pos.tokens) for q, b in full] == [
        (2, 24),
        (3, 8),
        (1, 60),
    ]
    last = [[list(t[2:4]) for t in tokens if t[0] == i and t[1] == 0] for i in (0, 1, 2)]
    assert [b.pos.coords[0].tolist() for _, b in full] == last


@cases("family", QWEN)
def test_rotation_and_table_of_the_tower_can_be_disabled(family):
    ours = tower(family)
    stock = copy.deepcopy(ours)
    x, grids = patches()

    class Still(nn.Module):
        def forward(self, x, ids):
            return torch.ones(len(ids), 16), torch.zeros(len(ids), 16)

    stock.rotary_pos_emb = Still()
    convert_vision(ours, "none", keep_rope=False)
    close(ours(x, grids).last_hidden_state, stock(x, grids).last_hidden_state, 1e-6)
    if family == "qwen3_vl":
        remaining = ours.pos_embed
        convert_vision(ours, "none", keep_rope=False, keep_abs=False)
        stock.pos_embed.weight.data.zero_()
        out = ours(x, grids).last_hidden_state
        close(out, stock(x, grids).last_hidden_state, 1e-6)
        assert "pos_embed.weight" not in ours.state_dict()
        assert "absolute table: removed" in describe_vision(ours)
        restore_vision(ours)
        assert ours.pos_embed is remaining
    else:
        with pytest.raises(UnsupportedCombination, match="no absolute table to keep"):
            convert_vision(ours, "alibi2d", keep_abs=True)


def test_another_rotation_replaces_that_of_the_tower():
    ours = tower("qwen2_5_vl")
    with pytest.raises(UnsupportedCombination, match="keep_rope=False"):
        convert_vision(ours, "rope_axial")
    convert_vision(ours, "rope_axial", keep_rope=False)
    x, grids = patches(GRIDS[2:3])
    out = ours(x, grids).last_hidden_state
    moved = ours(
        x, grids, position_ids=torch.tensor([t[2:4] for t in line("qwen2_vl", GRIDS[2:3])])
    ).last_hidden_state
    close(moved, out, 1e-12)
    assert (out - tower("qwen2_5_vl")(x, grids).last_hidden_state).abs().max() > 1e-2


@cases("family", ROWS)
@cases("size", [None, (20, 28)])
def test_the_bias_in_a_tower_of_rows_equals_dense_attention(family, size):
    x = images(family, size=size)
    options = {"interpolate_pos_encoding": True} if size and family != "internvl" else {}
    ours = tower(family)
    convert_vision(ours, "alibi2d(slopes=learned)+gaussian2d(sigma=1.5,amplitude=3.0)")
    ours(images(family))  # another size first
    slopes = [torch.tensor([0.7, 1.9], dtype=torch.float64).add_(i).requires_grad_() for i in range(2)]
    with torch.no_grad():
        for i, _, attn in attentions(ours):
            attn.pos_enc.slope.copy_(slopes[i])
    h, w, prefix = x.shape[-2] // 4, x.shape[-1] // 4, family != "llava_onevision"
    distances = dense(h, w, int(prefix), wrap=False, normalize=False).double()
    bias = 3 * torch.exp(-(distances**2) / (2 * 1.5**2))
    bias[: int(prefix)] = bias[:, : int(prefix)] = 0
    masks = [bias - s[:, None, None] * dense(h, w, int(prefix)).double() for s in slopes]
    stock = copy.deepcopy(ours)
    restore_vision(stock)
    by_hand(stock, masks)
    outs = [m(x, output_hidden_states=True, **options) for m in (ours, stock)]
    for got, ref in zip(outs[0].hidden_states, outs[1].hidden_states, strict=True):
        close(got, ref)
    for out in outs:
        out.last_hidden_state.backward(cotangent(out.last_hidden_state))
    close(outs[0].last_hidden_state, outs[1].last_hidden_state)
    for i, _, attn in attentions(ours):
        close(attn.pos_enc.slope.grad, slopes[i].grad)


@cases("family", ROWS)
def test_checkpointed_towers_of_rows_have_the_same_gradients(family):
    ours = tower(family).train()
    convert_vision(ours, "irpe(mode=bias,on=qk)+alibi2d")
    grads = []
    for mode in (None, False, True):
        if mode is not None:
            ours.gradient_checkpointing_enable({"use_reentrant": mode})
        x = images(family).requires_grad_()
        out = ours(x).last_hidden_state
        ours.zero_grad()
        out.backward(cotangent(out))
        grads.append({n: p.grad.clone() for n, p in ours.named_parameters() if p.grad is not None})
    for other in grads[1:]:
        assert other.keys() == grads[0].keys()
        assert any(g.abs().max() > 0 for n, g in other.items() if "pos_enc" in n)
        for name, grad in other.items():
            close(grad, grads[0][name], 1e-12)


@cases("family", ["llava", "internvl"])
def test_eager_attention_returns_weights_and_applies_a_mask(family):
    ours = tower(family)
    ours.set_attn_implementation("eager")
    convert_vision(ours, "alibi2d")
    assert "eager" in describe_vision(ours)
    x = images(family)
    out = ours(x, output_attentions=True)
    distances = dense(*([6, 6] if family == "internvl" else [3, 3]), 1).double()
    stock = copy.deepcopy(ours)
    restore_vision(stock)
    expected = by_hand(stock, [-distances] * 2)(x)
    close(out.last_hidden_state, expected.last_hidden_state)
    assert len(out.attentions) == 2
    attn = stock.get_submodule(next(path for _, path, _ in attentions(stock)))
    close(out.attentions[0].sum(-1), torch.ones(2, attn.num_heads, len(distances), dtype=torch.float64))
    if family == "llava":
        recorded = torch.ones(1, 1, 10, 10, dtype=torch.bool)
        recorded[..., 4] = False
        masked = ours(x, attention_mask=recorded, output_attentions=True)
        hidden = -distances.masked_fill(torch.arange(10) == 4, float("inf"))
        close(masked.last_hidden_state, by_hand(stock, [hidden] * 2)(x).last_hidden_state)
        assert masked.attentions[1][..., 4].abs().max() == 0


def test_random_numbers_are_drawn_once_per_forward_pass():
    encoding = vispe.create_encoding("rope_dinov3", dim=32, num_heads=2, depth=2, rescale_coords=2.0).train()
    prepare = seeded_prepare([encoding], training=True)
    one, two = (prepare(Positions(torch.rand(n, 2))) for n in (5, 7))
    assert torch.equal(one.attrs["rope"].rescale_coords, two.attrs["rope"].rescale_coords)
    other = seeded_prepare([encoding], training=True)(Positions(torch.rand(5, 2)))
    assert not torch.equal(one.attrs["rope"].rescale_coords, other.attrs["rope"].rescale_coords)
    ours = tower("qwen2_5_vl").train()
    convert_vision(ours, "alibi2d", jitter=0.5)
    x, grids = patches()
    assert not torch.equal(ours(x, grids).last_hidden_state, ours(x, grids).last_hidden_state)
    state = torch.get_rng_state()
    first = ours(x, grids).last_hidden_state
    torch.set_rng_state(state)
    assert torch.equal(ours(x, grids).last_hidden_state, first)
    ours.eval()
    assert torch.equal(ours(x, grids).last_hidden_state, ours(x, grids).last_hidden_state)
