"""dynamic positions: closed form, ranks, the loss, hosts, and errors without a table."""

import pytest
import torch

import vispe
from vispe import Grid, create_encoding
from vispe.errors import OptionError, ShapeError, UnsupportedCombination


def built(dim=16, **options):
    torch.manual_seed(0)
    return create_encoding("dynamic", dim=dim, **options)


def test_closed_form():
    encoding, pos = built(hidden=5).double(), Grid((2, 3), prefix=2).positions()
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    first, second = encoding.first, encoding.second
    hidden = x @ first.weight.T + first.bias
    hidden = hidden / 2 * (1 + torch.erf(hidden / 2**0.5))
    phases = hidden @ second.weight.T + second.bias
    result = encoding.embed(x, pos)
    torch.testing.assert_close(result[:, 2:] - x[:, 2:], torch.cat([phases.sin(), phases.cos()], -1)[:, 2:])
    assert torch.equal(result[:, :2], x[:, :2])
    half = built().embed(x.half(), pos)
    assert half.dtype == torch.float16


def test_gradients():
    encoding, pos = built(dim=4).double(), Grid((2, 2), prefix=1).positions()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    names = [n for n, _ in encoding.named_parameters()]

    def run(x, *values):
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(encoding, state, (x, pos))

    for method in (encoding.embed, encoding.rank_loss):
        encoding.forward = method
        assert torch.autograd.gradcheck(run, (x, *encoding.parameters()), fast_mode=True)


def test_ranks_are_the_fit_of_phases_to_a_sinusoid():
    encoding, pos = built(temperature=100).double(), Grid((5,), prefix=1).positions()
    rate = 100.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    ranks = torch.tensor([[0.0, 4, 2, 0, 1, 3]], dtype=torch.float64)
    noise = torch.randn(1, 6, 8, dtype=torch.float64)
    noise = noise - (noise @ rate)[..., None] * rate / rate.square().sum()  # what no rank explains
    encoding._phases = lambda x, pos: ranks[..., None] * rate + noise
    torch.testing.assert_close(encoding.ranks(None, pos), ranks)
    rank = torch.tensor([[9, 4, 2, 0, 1, 3]])
    assert encoding.rank_loss(None, pos, rank) < 1e-20
    # row by row, by default: (4, 2, 0, 1, 3) against (0, 1, 2, 3, 4), in shares of 4
    assert encoding.rank_loss(None, pos).item() == pytest.approx((16 + 1 + 4 + 4 + 1) / 16 / 5)
    arguments = encoding.prepare(pos.replace(attrs={"rank": rank}))
    assert encoding.rank_loss(None, arguments) < 1e-20


def test_the_loss_teaches_an_order():
    """Tokens contain their position, in a random order: the network learns to read it."""
    encoding, pos = built(dim=32), Grid((4, 4), prefix=1).positions()
    x = torch.randn(17, 32, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(17, generator=torch.Generator().manual_seed(2))[None]
    optimizer = torch.optim.Adam(encoding.parameters(), lr=0.01)
    first = encoding.rank_loss(x[None], pos, order).item()
    for _ in range(200):
        optimizer.zero_grad()
        loss = encoding.rank_loss(x[None], pos, order)
        loss.backward()
        optimizer.step()
    assert loss.item() < first / 100
    ranks = encoding.ranks(x[None], pos)[0, 1:]
    assert torch.equal(ranks.argsort(), order[0, 1:].argsort())


def test_ranks_follow_dropped_tokens():
    encoding = built()
    pos = Grid((2, 3), prefix=1).positions().replace(attrs={"rank": torch.tensor([[0, 5, 4, 3, 2, 1, 0]])})
    pos = encoding.prepare(pos)
    x, keep = torch.randn(2, 7, 16), torch.tensor([[0, 2, 3], [0, 6, 1]])
    subset = x.gather(1, keep[..., None].expand(-1, -1, 16))
    expected = encoding.ranks(x, pos).gather(1, keep)[:, 1:] - torch.tensor([[4.0, 3], [0, 5]])
    assert encoding.rank_loss(subset, pos.gather(keep)).item() == pytest.approx(
        expected.square().mean().item() / 25, rel=1e-5
    )
    with pytest.raises(ShapeError, match=r"dynamic needs an integer per token \(7 tokens"):
        encoding.rank_loss(x, pos, torch.zeros(1, 6, dtype=torch.long))


def test_missing_tokens_raise():
    encoding, pos = built(), Grid((2, 3)).positions()
    with pytest.raises(UnsupportedCombination, match=r"dynamic reads the tokens, .* Call embed\(x, pos\)"):
        encoding.table(pos)
    with pytest.raises(ShapeError, match=r"reads the tokens \(b, 6, 16\), got \(2, 6, 8\)"):
        encoding.embed(torch.randn(2, 6, 8), pos)
    with pytest.raises(OptionError, match="Use one that does not read tokens, such as sincos2d"):
        create_encoding("positional_attention", num_heads=2, table="dynamic")
    with pytest.raises(
        UnsupportedCombination, match="plot_bias: dynamic adds values that depend on the tokens, got layer=0"
    ):
        vispe.evaluate.plots.encoding.plot_bias("dynamic", (3, 3))


def test_sums_are_applied_in_sequence():
    torch.manual_seed(0)
    both = create_encoding("sincos2d+dynamic", dim=16)
    pos, x = Grid((2, 3)).positions(), torch.randn(2, 6, 16)
    table, dynamic = both.parts()
    assert torch.equal(both.embed(x, pos), dynamic.embed(x + table.table(pos), pos))


def test_timm_models():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 3, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", pos_embed="dynamic", global_pool="", **options).eval()
    image = torch.randn(2, 3, 32, 32)
    result = model(image)
    # by hand: class token, patches, vectors for patches alone, blocks
    x = torch.cat([model.cls_token.expand(2, -1, -1), model.patch_embed(image)], 1)
    x = model.pos_enc.embed(x, Grid((4, 4), prefix=1).positions())
    stock = timm.create_model("vit_tiny_patch16_224", pos_embed="none", global_pool="", **options).eval()
    stock.load_state_dict(
        {k: v for k, v in model.state_dict().items() if not k.startswith("pos_enc")}, strict=False
    )
    torch.testing.assert_close(result, stock.norm(stock.blocks(x)), rtol=1e-5, atol=1e-5)
    result.backward(torch.randn_like(result))
    assert all(p.grad.abs().sum() > 0 for p in model.pos_enc.parameters())


def test_packed_patches():
    """NaFlexVit: padding gets zeros, and a packed sample has the result of a separate one."""
    naflex = pytest.importorskip("timm.models.naflexvit")
    torch.manual_seed(0)
    cfg = naflex.NaFlexVitCfg(patch_size=8, embed_dim=24, depth=1, num_heads=3)
    model = vispe.convert(naflex.NaFlexVit(cfg, num_classes=0).eval(), "dynamic")
    coords = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for h, w in ((2, 3), (3, 2), (1, 4))]
    patches = torch.zeros(3, 6, 192)
    coord, valid = torch.zeros(3, 6, 2, dtype=torch.long), torch.zeros(3, 6, dtype=torch.bool)
    for i, c in enumerate(coords):
        patches[i, : len(c)] = torch.randn(len(c), 192)
        coord[i, : len(c)], valid[i, : len(c)] = c, True
    both = model(patches, patch_coord=coord, patch_valid=valid)
    for i, c in enumerate(coords):
        n = len(c)
        single = model(patches[i : i + 1, :n], patch_coord=c[None], patch_valid=valid[i : i + 1, :n])
        torch.testing.assert_close(both[i], single[0], rtol=1e-4, atol=1e-5)
