"""seqpe: digits, encoder, factors in attention, draws, cache, and the auxiliary losses."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import Attention, Grid, Positions, create_encoding
from vispe.encodings.parts.seqpe.encoder import DigitEncoder, digits_of, may_attend
from vispe.encodings.parts.seqpe.losses import (
    contrastive_loss,
    contrastive_positions,
    transfer_loss,
    transfer_positions,
)
from vispe.errors import OptionError, ShapeError

FACTS = {"dim": 12, "num_heads": 3, "depth": 2, "grid": (3, 4)}


def build(spec="seqpe", **facts):
    encoding = create_encoding(spec, **{**FACTS, **facts})
    with torch.no_grad():
        for p in encoding.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return encoding


def test_digits():
    digits, real = digits_of(torch.tensor([[0, 7], [105, 60]]), 3)
    assert digits.tolist() == [[0, 0, 0, 0, 0, 7], [1, 0, 5, 0, 6, 0]]
    assert real.tolist() == [[False, False, True, False, False, True], [True, True, True, False, True, True]]
    digits, real = digits_of(torch.tensor([[5]]), 4, base=2)
    assert (digits.tolist(), real.tolist()) == ([[0, 1, 0, 1]], [[False, True, True, True]])


@cases(
    ("direction", "hide", "last"),
    [(d, h, c) for d, h, c in itertools.product(("causal", "bi"), (True, False), (True, False))],
)
def test_masks(direction, hide, last):
    _, real = digits_of(torch.tensor([[4, 31], [10, 0]]), 2)
    mask = may_attend(real, direction, hide, last)
    size = 4 + last
    assert mask.shape == (2, size, size)
    for p, i, j in itertools.product(range(2), range(size), range(size)):
        key = j == 4 or not hide or bool(real[p, j])
        assert bool(mask[p, i, j]) == (key and (direction == "bi" or j <= i))


@cases("axes", [1, 2, 3])
@cases("last", [True, False])
def test_encoder_against_torch_layers(axes, last):
    torch.manual_seed(axes)
    encoder = DigitEncoder(
        12, 3, 2, axes, 2, 5, class_token=last, temperature=2.0, final_norm=last, mask_padding=False
    )
    for p in encoder.parameters():
        torch.nn.init.normal_(p, std=0.5)
    cells = torch.randint(100, (6, axes))
    encoded = []
    for cell in cells.tolist():
        text = "".join(f"{c:02d}" for c in cell)
        x = torch.stack(
            [
                encoder.token_of_seqpe_embed.weight[int(c)]
                + encoder.pos_of_seqpe_embed.weight[t]
                + (encoder.dim_token_embed[t // 2, 0] if axes > 1 else 0)
                for t, c in enumerate(text)
            ]
        )
        x = torch.cat([x, encoder.cls_token_embed[0]]) if last else x
        for block in encoder.transformers:
            att = torch.nn.MultiheadAttention(12, 3, batch_first=True)
            with torch.no_grad():
                att.in_proj_weight.copy_(block.attn.c_attn.weight.t())
                att.in_proj_bias.copy_(block.attn.c_attn.bias)
                att.out_proj.weight.copy_(block.attn.c_proj.weight.t())
                att.out_proj.bias.copy_(block.attn.c_proj.bias)
            y = block.layernorm_1(x)[None]
            hidden = torch.ones(len(x), len(x)).triu(1).bool()
            x = x + att(y, y, y, attn_mask=hidden, need_weights=False)[0][0]
            y = block.layernorm_2(x) @ block.mlp.c_fc.weight + block.mlp.c_fc.bias
            x = x + F.gelu(y, approximate="tanh") @ block.mlp.c_proj.weight + block.mlp.c_proj.bias
        x = encoder.layernorm(x) if last else x
        encoded.append(encoder.out_proj(x[-1]) / 2)
    torch.testing.assert_close(encoder(cells), torch.stack(encoded), rtol=1e-4, atol=1e-5)


@cases("mode", ["attn_mul", "attn_add", "attn_scalar"])
@cases("multi_head", [True, False])
def test_attention(mode, multi_head):
    torch.manual_seed(0)
    encoding = build(f"seqpe(mode={mode},multi_head={multi_head})")
    layers = [Attention(12, 3, encoding, layer=i, backend=b) for i, b in ((1, "reference"), (1, "sdpa"))]
    layers[1].load_state_dict(layers[0].state_dict())
    grid = Grid((3, 4), prefix=1)
    x = torch.randn(2, 13, 12)
    q, k, v = layers[0].qkv(x).reshape(2, 13, 3, 3, 4).permute(2, 0, 3, 1, 4)
    cells = torch.tensor([(y, c) for y in range(3) for c in range(4)])
    both = encoding.pe_qk[1](encoding.encoder(cells)).reshape(12, 2, -1, 4).permute(1, 2, 0, 3)
    neutral = 1.0 if mode == "attn_mul" else 0.0
    pq, pk = F.pad(both, (0, 0, 1, 0), value=neutral)
    logits = {
        "attn_mul": lambda: (q * pq) @ (k * pk).transpose(-1, -2),
        "attn_add": lambda: (q + pq) @ (k + pk).transpose(-1, -2),
        "attn_scalar": lambda: q @ k.transpose(-1, -2) + pq @ pk.transpose(-1, -2),
    }[mode]()
    out = ((logits / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
    for layer in layers:
        torch.testing.assert_close(layer(x, grid), layer.proj(out.clone()), rtol=1e-4, atol=1e-5)


def test_projections_are_separate_per_layer():
    encoding = build()
    pos = Grid((3, 4)).positions()
    q = torch.randn(1, 3, 12, 4)
    assert not torch.equal(encoding.transform(pos, 0).query(q), encoding.transform(pos, 1).query(q))
    with pytest.raises(ShapeError, match="projections for 2 blocks, got a call for block 2"):
        encoding.transform(pos, 2)
    for single in (build("seqpe(projection=single)"), build(depth=None)):
        assert len(single.pe_qk) == 1
        assert torch.equal(single.transform(pos, 0).query(q), single.transform(pos, 7).query(q))


@cases("spec", ["seqpe_input", "seqpe_input(class_vector=true)"])
def test_input_form_and_new_grids(spec):
    encoding = build(spec)
    small, large = (encoding.table(Grid(s, prefix=2).positions()) for s in ((3, 4), (11, 13)))
    assert (small[:, :2] == 0).all() == (encoding.prefix_vector is None)
    corner = large[0, 2:].reshape(11, 13, 12)[:3, :4].flatten(0, 1)
    torch.testing.assert_close(corner, small[0, 2:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(encoding.table(Grid((3, 4), prefix=2).positions()), small)


def test_dropped_tokens():
    torch.manual_seed(0)
    grid = Grid((3, 4), prefix=1)
    keep = torch.tensor([[0, 5, 2], [0, 12, 7]])
    for spec in ("seqpe_input", "seqpe_input(class_vector=true,dropout=0.5,shift=0.9)"):
        encoding = build(spec).train()
        pos = encoding.prepare(grid.positions(), torch.Generator().manual_seed(0))
        torch.testing.assert_close(encoding.table(pos.gather(keep)), encoding.table(pos)[0][keep])
    q = torch.randn(2, 3, 3, 4)
    encoding, pos = build(), grid.positions()
    wide = torch.zeros(2, 3, 13, 4).scatter(2, keep[:, None, :, None].expand(-1, 3, -1, 4), q)
    full = encoding.transform(pos, 0).query(wide).gather(2, keep[:, None, :, None].expand(-1, 3, -1, 4))
    torch.testing.assert_close(encoding.transform(pos.gather(keep), 0).query(q), full)


def test_scalar_bias_ignores_prefix_tokens():
    encoding = build("seqpe(mode=attn_scalar)")
    with_prefix = encoding.bias(Grid((3, 4), prefix=2).positions(), 0).dense()
    without_prefix = encoding.bias(Grid((3, 4)).positions(), 0).dense()
    assert (with_prefix[..., :2] == 0).all()
    assert (with_prefix[:, :, :2] == 0).all()
    torch.testing.assert_close(with_prefix[..., 2:, 2:], without_prefix, rtol=1e-5, atol=1e-6)


def test_gradients():
    encoding = build("seqpe_input", grid=None, dim=6, embed_dim=3).double()
    pos = Grid((2, 3)).positions()
    names, values = zip(*encoding.named_parameters(), strict=True)

    def table(*parameters):
        return torch.func.functional_call(encoding, dict(zip(names, parameters, strict=True)), (pos,))

    encoding.forward = encoding.table
    assert torch.autograd.gradcheck(table, tuple(v.detach().requires_grad_() for v in values), fast_mode=True)


def test_the_cache_in_eval_mode_follows_the_weights():
    encoding, pos = build("seqpe_input").eval(), Grid((3, 4)).positions()
    with torch.no_grad():
        first = encoding.table(pos)
        entry = encoding._eval_cache.entry
        assert torch.equal(encoding.table(pos), first)
        assert encoding._eval_cache.entry is entry
        encoding.encoder.out_proj.weight.data.mul_(2)
        second = encoding.table(pos)
    assert not torch.equal(first, second)
    torch.testing.assert_close(encoding.table(pos), second)
    assert encoding.table(pos).requires_grad
    with torch.inference_mode():
        encoding.table(pos)
    encoding.table(pos).sum().backward()
    assert encoding.encoder.out_proj.bias.grad is not None


def test_layers_of_one_pass_compare_the_weights_once():
    encoding, pos = build("seqpe", depth=3).eval(), Grid((3, 4)).positions()

    def read():
        return [encoding.transform(pos, layer).q_mul for layer in range(3)]

    with torch.no_grad():
        first = read()
        for _ in range(2):
            for ours, theirs in zip(read(), first, strict=True):
                assert torch.equal(ours, theirs)
        encoding.encoder.out_proj.weight.data.mul_(2)
        second = read()
    for ours, before, theirs in zip(second, first, read(), strict=True):
        assert not torch.equal(ours, before)
        torch.testing.assert_close(ours, theirs)


def test_draws():
    encoding, grid = build("seqpe_input(dropout=0.5,shift=0.5)").train(), Grid((3, 4))
    pos = [encoding.prepare(grid.positions(), torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    tables = [encoding.table(p) for p in pos]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])
    assert encoding.prepare(pos[0]) is pos[0]
    keep = pos[0].attrs["seqpe_dropout"]
    assert set(keep.unique().tolist()) == {0.0, 2.0}
    shifts = [
        encoding.prepare(grid.positions(), torch.Generator().manual_seed(s)).attrs["seqpe_shift"]
        for s in range(60)
    ]
    nonzero = [s for s in shifts if s.any()]
    assert 15 <= len(nonzero) <= 45
    assert all(0 <= s[0] <= 97 and 0 <= s[1] <= 96 for s in nonzero)
    arguments = encoding.eval().prepare(grid.positions(), draws={"shift": torch.tensor([20, 5])})
    far = encoding.table(Grid((30, 30)).positions())[0].reshape(30, 30, 12)[20:23, 5:9].flatten(0, 1)
    torch.testing.assert_close(encoding.table(arguments)[0], far, rtol=1e-5, atol=1e-6)
    assert encoding.prepare(grid.positions()).attrs == {}


def test_contrastive_loss_against_a_loop():
    torch.manual_seed(0)
    pivot, cand, labels = torch.randn(3, 8), torch.randn(12, 8), torch.tensor([1, 0, 3])
    for heads in (None, 2):
        terms = []
        for b in range(3):
            for part in range(heads or 1):
                width = 8 // (heads or 1)
                channels = slice(part * width, (part + 1) * width)
                logits = 0.5 * cand[4 * b : 4 * b + 4, channels] @ pivot[b, channels]
                terms.append(logits.logsumexp(0) - logits[labels[b]])
        result = contrastive_loss(pivot, cand, labels, heads=heads, logit_scale=0.5)
        torch.testing.assert_close(result, torch.stack(terms).mean())


@cases("metric", ["kl_div", "mse"])
@cases("beta", [1.0, 0.8])
def test_transfer_loss_against_a_loop(metric, beta):
    torch.manual_seed(0)
    main = torch.randn(9, 6, requires_grad=True)
    student = torch.randn(8, 6, requires_grad=True)
    index = torch.tensor([0, 3, 3, 8, 1, 2, 7, 5])

    def logs(rows):
        return (rows.reshape(2, 4, 6) @ rows.reshape(2, 4, 6).transpose(1, 2)).log_softmax(-1)

    a, b = logs(main[index]), logs(student)
    divergence = (a.exp() * (a - b)).mean() + (b.exp() * (b - a)).mean()
    loss = ((a - b) ** 2).mean() if metric == "mse" else divergence
    result = transfer_loss(main, index, student, samples=2, beta=beta, metric=metric)
    torch.testing.assert_close(result, loss)
    full = torch.autograd.grad(loss, (main, student), retain_graph=True)
    mine = torch.autograd.grad(result, (main, student), allow_unused=True)
    torch.testing.assert_close(mine[1], beta * full[1])
    if beta == 1:
        assert mine[0] is None
    else:
        torch.testing.assert_close(mine[0], (1 - beta) * full[0])


@cases(("axes", "digits"), [(1, 4), (2, 2), (3, 2)])
def test_positions_of_the_losses(axes, digits):
    generator = torch.Generator().manual_seed(0)
    pivot, result, labels = contrastive_positions(axes, digits, 200, 20, generator)
    assert (result != pivot[:, None]).any(-1).all()
    assert ((result >= 0) & (result < 10**digits)).all()
    squared = (result - pivot[:, None]).square().sum(-1)
    assert torch.equal(squared.amin(1), squared.gather(1, labels[:, None])[:, 0])
    side = 196 if axes == 1 else 14
    local = ((result - pivot[:, None]).abs() < side).all(-1).all(-1)
    assert 20 <= local.sum() <= 65  # a fifth
    offset = (result - pivot[:, None])[local]  # the pivot is anywhere in its window
    assert 0.35 < (offset < 0).float().mean() < 0.65
    index, cells = transfer_positions((3, 4, 5)[:axes], digits, 7, generator)
    assert len(index) == len(set(index.tolist())) == min(7, math.prod((3, 4, 5)[:axes]))
    assert (cells >= torch.tensor((3, 4, 5)[:axes])).all()
    near = torch.tensor(list(itertools.product(*(range(n) for n in (3, 4, 5)[:axes]))))[index]
    assert len((cells - near).unique(dim=0)) == 1


def test_auxiliary_losses_train_the_encoder():
    encoding = build()
    losses = encoding.auxiliary_losses(
        (3, 4), pivots=4, candidates=6, generator=torch.Generator().manual_seed(0)
    )
    second = encoding.auxiliary_losses(
        (3, 4), pivots=4, candidates=6, generator=torch.Generator().manual_seed(0)
    )
    assert set(losses) == {"contrastive", "transfer"}
    assert all(torch.equal(losses[k], second[k]) for k in losses)
    sum(losses.values()).backward()
    assert encoding.encoder.out_proj.weight.grad.abs().sum() > 0
    with pytest.raises(ShapeError, match=r"grid of 2 axes with 1 to 100 cells, got \(3,\)"):
        encoding.auxiliary_losses((3,))


@cases(
    ("spec", "facts", "message"),
    [
        ("seqpe", {"num_heads": 5}, "seqpe needs dim to be a multiple of num_heads, got dim=12, num_heads=5"),
        ("seqpe(mode=input_add)", {}, "mode must be one of attn_mul, attn_add, attn_scalar, got 'input_add'"),
        ("seqpe(projection=many)", {}, "projection must be one of multi, single, got 'many'"),
        ("seqpe(multi_head=3)", {}, "multi_head is true or false, got multi_head=3"),
        ("seqpe(embed_dim=4)", {}, "embed_dim=4 to be a multiple of num_heads=3"),
        ("seqpe(layers=-1)", {}, "layers needs an integer of 0 or more, got layers=-1"),
        ("seqpe(max_digits=0)", {}, "max_digits needs an integer above 0, got max_digits=0"),
        ("seqpe(direction=left)", {}, "direction must be one of causal, bi, got 'left'"),
        ("seqpe(direction=bi,class_token=false)", {}, "Use class_token=true"),
        ("seqpe(temperature=0)", {}, "temperature needs a number above 0, got temperature=0"),
        ("seqpe(dropout=1)", {}, "dropout needs a number of 0 or more and below 1, got dropout=1"),
        ("seqpe(shift=-0.1)", {}, "shift needs a number of 0 or more and below 1, got shift=-0.1"),
        ("seqpe(axes=4)", {}, "axes needs an integer from 1 to 3, got axes=4"),
        ("seqpe(axes=3)", {}, r"axes=2 for the grid \(3, 4\) of the model, got axes=3"),
        ("seqpe", {"depth": 0}, "depth needs an integer above 0, got depth=0"),
    ],
)
def test_option_errors(spec, facts, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, **{**FACTS, **facts})


def test_shape_errors():
    encoding = build()
    with pytest.raises(ShapeError, match="seqpe needs 2-axis positions, got 3 axes"):
        encoding.transform(Grid((2, 2, 2)).positions(), 0)
    with pytest.raises(ShapeError, match="integer positions, got free coordinates"):
        encoding.transform(Positions(torch.rand(1, 4, 2)), 0)
    with pytest.raises(ShapeError, match=r"1 digit per axis, too few for a grid of \(3, 11\)"):
        build("seqpe(max_digits=1)").transform(Grid((3, 11)).positions(), 0)
    with pytest.raises(ShapeError, match="contrastive_loss needs candidates"):
        contrastive_loss(torch.ones(2, 4), torch.ones(5, 4), torch.zeros(2).long())
    with pytest.raises(ShapeError, match="transfer_loss needs one row"):
        transfer_loss(torch.ones(2, 4), torch.zeros(3).long(), torch.ones(2, 4))
    with pytest.raises(OptionError, match="metric must be kl_div or mse, got 'cos'"):
        transfer_loss(torch.ones(2, 4), torch.zeros(2).long(), torch.ones(2, 4), metric="cos")
