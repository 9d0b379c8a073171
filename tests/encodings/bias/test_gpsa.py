"""gpsa against timm's module, its definition pair by pair, and in hosts with other implementations of attention."""

import math

import pytest
import timm
import torch
from timm.models.convit import GPSA
from torch import nn

import vispe
from tests.cases import cases
from vispe import Attention, Grid, create_encoding
from vispe.encodings.multi_softmax import calls_of, weights_of
from vispe.errors import OptionError, ShapeError, UnsupportedCombination


def build(heads=3, **options):
    encoding = create_encoding({"name": "gpsa", **options}, num_heads=heads).double()
    with torch.no_grad():
        for p in encoding.parameters():
            p.normal_(generator=torch.Generator().manual_seed(0))
    return encoding


def maps(encoding, pos, q, k):
    return weights_of(calls_of(q, k, q, [encoding], pos, 0, None))


def definition(encoding, positions, q, k, prefix=0):
    """Return the weights by loops; positions (n, axes) of the patches behind the prefix tokens."""
    n, rows = prefix + len(positions), []
    for sample in range(len(q)):
        for h in range(encoding.num_heads):
            share = torch.sigmoid(encoding.gating_param[h])
            for i in range(n):
                content = (q[sample, h, i] @ k[sample, h].T / q.shape[-1] ** 0.5).softmax(-1)
                if i < prefix:
                    rows.append(content)
                    continue
                logits = [torch.tensor(-math.inf).double()] * prefix
                for position in positions:
                    gap = position - positions[i - prefix]
                    step = torch.cat([gap.flip(0), (gap @ gap)[None]])
                    logits.append(encoding.pos_proj.weight[h] @ step + encoding.pos_proj.bias[h])
                rows.append((1 - share) * content + share * torch.stack(logits).softmax(-1))
    return torch.stack(rows).reshape(*q.shape[:3], n)


@cases(("heads", "side", "local"), [(4, 3, True), (9, 4, True), (6, 5, True), (2, 3, False)])
def test_a_layer_equals_timm(heads, side, local):
    stock = GPSA(4 * heads, num_heads=heads, qkv_bias=True, locality_strength=0.7).double()
    layer = Attention(4 * heads, heads, "gpsa", fused_qkv=False).double()
    if local:
        with torch.no_grad():
            stock.pos_proj.bias.zero_()
        stock.local_init()
        encoding = create_encoding("gpsa(locality_strength=0.7)", num_heads=heads)
        count = math.isqrt(heads) ** 2
        torch.testing.assert_close(
            encoding.pos_proj.weight[:count].double(), stock.pos_proj.weight[:count], check_dtype=False
        )
        torch.testing.assert_close(encoding.gating_param.double(), stock.gating_param)
    nn.init.normal_(stock.gating_param)
    state = {}
    for name, value in stock.state_dict().items():
        first, _, kind = name.partition(".")
        if first == "qk":
            state[f"q_proj.{kind}"], state[f"k_proj.{kind}"] = value.chunk(2)
        else:
            state[name.replace("v.", "v_proj.", first == "v")] = value
    # the names of the encoding are found on the attention layer
    layer.pos_enc.rename_checkpoint_keys(state, "", "pos_enc.")
    layer.load_state_dict(state)
    x = torch.randn(2, side**2, 4 * heads, dtype=torch.float64, requires_grad=True)
    ours, theirs = layer(x, (side, side)), stock(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(ours)
    leaves = [(layer.pos_enc, ours), (stock, theirs)]
    grads = [torch.autograd.grad(y, [x, m.gating_param, m.pos_proj.weight], cotangent) for m, y in leaves]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
    assert all((g != 0).all() for g in grads[0])


@cases(("shape", "prefix"), [((3,), 0), ((2, 3), 0), ((2, 3), 2), ((2, 1, 2), 1)])
@cases("spacing", [None, (2.0, 0.5, 3.0)])
def test_values_and_gradients(shape, prefix, spacing):
    spacing = spacing and spacing[: len(shape)]
    encoding, grid = build(axes=len(shape), spacing=spacing), Grid(shape, prefix=prefix)
    positions = grid.positions().coords[0, prefix:].double() * torch.tensor(spacing or 1.0)
    q, k = torch.randn(2, 2, 3, grid.tokens, 4, dtype=torch.float64)
    q.requires_grad_()
    actual, expected = maps(encoding, grid.positions(), q, k), definition(encoding, positions, q, k, prefix)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    leaves, cotangent = [q, encoding.gating_param, encoding.pos_proj.weight], torch.randn_like(actual)
    sides = (torch.autograd.grad(y, leaves, cotangent) for y in (actual, expected))
    torch.testing.assert_close(*sides, rtol=1e-5, atol=1e-6)


def test_spacing_of_the_grid_counts():
    q, k = torch.randn(2, 1, 3, 6, 4, dtype=torch.float64)
    result = maps(build(), Grid((2, 3), spacing=(2.0, 0.5)).positions(), q, k)
    torch.testing.assert_close(result, maps(build(spacing=[2, 0.5]), Grid((2, 3)).positions(), q, k))


@cases(("axes", "heads", "side"), [(1, 3, 3), (2, 10, 3), (3, 27, 3), (2, 4, 2)])
def test_it_starts_as_a_convolution(axes, heads, side):
    encoding = create_encoding("gpsa(locality_strength=20,gating=20)", num_heads=heads, axes=axes)
    shape = (5, 4, 5)[:axes]
    pos = Grid(shape).positions()
    x = torch.randn(1, heads, pos.tokens, 4)
    attn = maps(encoding, pos, x, x)[0]
    centre = torch.tensor([2, 1, 2][:axes])
    query = int((pos.cells()[0] == centre).all(-1).nonzero())
    assert side**axes <= heads < (side + 1) ** axes
    offsets = set()
    for h in range(side**axes):
        # with an even side the centre of the kernel lies between cells: four are equal
        reach = 0.5 * (1 - side % 2)
        middle = (attn[h, query][:, None] * pos.coords[0]).sum(0) - centre
        offsets.add(tuple((2 * middle).round().int().tolist()))
        assert abs(middle).max() <= (side - 1) / 2 + reach
    assert len(offsets) == side**axes


def test_a_low_gate_hardly_changes_a_pretrained_model():
    stock = timm.create_model("test_vit", img_size=64).eval()
    x = torch.randn(1, 3, 64, 64)
    expected = stock(x)
    near = vispe.convert(stock, "learn+gpsa(gating=-12)")(x)
    torch.testing.assert_close(near, expected, rtol=1e-3, atol=1e-3)


def test_dropped_tokens():
    layer, grid = Attention(12, 3, "gpsa").double(), Grid((3, 4), prefix=1)
    x, pos = torch.randn(2, 13, 12, dtype=torch.float64), grid.positions()
    keep = torch.tensor([[0, 2, 5, 12], [0, 1, 7, 9]])
    subset = layer(torch.stack([x[i, indices] for i, indices in enumerate(keep)]), pos.gather(keep))
    # a token that is masked for all is as one that is not there
    for i, indices in enumerate(keep):
        real = torch.zeros(1, 13, dtype=torch.bool)
        real[0, indices] = True
        torch.testing.assert_close(subset[i], layer(x[i : i + 1], grid, key_padding_mask=real)[0, indices])


def test_fused_and_unfused_timm_agree_and_hooks_see_the_weights():
    model = timm.create_model("test_vit", pos_embed="gpsa", img_size=64).double()
    x, captured = torch.randn(2, 3, 64, 64, dtype=torch.float64), []
    result = []
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
            if not fused:
                block.attn.attn_drop.register_forward_hook(lambda module, args, out: captured.append(out))
        out = model(x)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).double()
        named = [(n, p) for n, p in model.named_parameters() if "pos_proj.bias" not in n]
        grads = torch.autograd.grad(out, [p for _, p in named], cotangent)
        assert all(g.isfinite().all() for g in grads)
        # of the last block only the class token is read, which has no position
        learning = [f"blocks.{i}.attn.pos_enc.gating_param" for i in range(len(model.blocks) - 1)]
        assert all((g != 0).any() for (n, _), g in zip(named, grads, strict=True) if n in learning)
        result.append((out, *grads))
    torch.testing.assert_close(*result)
    assert len(captured) == len(model.blocks)
    for weights in captured:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_hooks_may_change_the_weights():
    model = timm.create_model("test_vit", pos_embed="gpsa", img_size=64).eval()
    x = torch.randn(1, 3, 64, 64)
    before = model(x)
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, out: out.flip(1))
    assert not torch.allclose(model(x), before)


def test_eager_attention_of_transformers_returns_the_mixed_weights():
    transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")
    from vispe.hosts.transformers.vision.convert import convert_vision

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(image_size=12, patch_size=4, **sizes)
    ours = transformers.CLIPVisionModel(config).double().eval()
    convert_vision(ours, "gpsa")
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    plain = ours(x).last_hidden_state
    ours.set_attn_implementation("eager")
    out = ours(x, output_attentions=True)
    torch.testing.assert_close(out.last_hidden_state, plain)
    assert len(out.attentions) == 2
    name, encoding = next((n, m) for n, m in ours.named_modules() if getattr(m, "name", "") == "gpsa")
    attn = ours.get_submodule(name.removesuffix(".pos_enc"))
    block = ours.get_submodule(name.removesuffix(".self_attn.pos_enc"))
    hidden = block.layer_norm1(ours(x, output_hidden_states=True).hidden_states[0])
    q, k = (p(hidden).unflatten(-1, (4, -1)).transpose(1, 2) for p in (attn.q_proj, attn.k_proj))
    positions = Grid((3, 3)).positions().coords[0].double()
    torch.testing.assert_close(
        out.attentions[0], definition(encoding, positions, q, k, 1), rtol=1e-6, atol=1e-7
    )


def test_other_blocks_attend_by_content():
    encoding, pos = build(layers=[1], depth=2), Grid((2, 3)).positions()
    q, k = torch.randn(2, 1, 3, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(maps(encoding, pos, q, k), (q @ k.mT / 2).softmax(-1))
    model = timm.create_model("test_vit", pos_embed="gpsa(layers=[1,2])", img_size=64)
    assert [i for i, block in enumerate(model.blocks) if block.attn.pos_enc is not None] == [1, 2]
    assert model(torch.randn(1, 3, 64, 64)).isfinite().all()


def test_half_precision_and_autocast():
    x = torch.randn(2, 6, 12)
    for options in ({}, {"qk_norm": nn.LayerNorm}):
        layer = Attention(12, 3, "gpsa", proj=False, **options)
        exact = layer(x, (2, 3))
        with torch.autocast("cpu", torch.bfloat16):
            result = layer(x, (2, 3))
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.float(), exact, rtol=3e-2, atol=3e-2)


def test_errors():
    with pytest.raises(UnsupportedCombination, match=r"gpsa uses two softmaxes.*branches\(\)"):
        build().bias(Grid((2, 3)).positions(), 0)
    with pytest.raises(
        UnsupportedCombination, match="gpsa uses several softmaxes, which cannot be combined with alibi2d"
    ):
        Attention(12, 3, "gpsa+alibi2d")
    with pytest.raises(OptionError, match=r"layers must be block indices below depth=2, got \[2\]"):
        build(layers=[2], depth=2)
    with pytest.raises(OptionError, match="locality_strength=2 has no effect with local_init=false"):
        build(local_init=False, locality_strength=2)
    with pytest.raises(ShapeError, match="gpsa needs the tokens of a 2-axis grid"):
        build().branches(Grid((6,)).positions(), 0)
