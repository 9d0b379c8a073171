"""`vispe.Attention`: options, masks, backends, and a small ViT."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vispe
from tests.cases import cases
from vispe import Attention, Grid, create_encoding
from vispe.errors import BackendUnavailable, OptionError, ShapeError, UnsupportedCombination


def plain(module, x, bias):
    """Return the output of the layer from its weights."""
    if module.qkv is not None:
        q, k, v = F.linear(x, module.qkv.weight, module.qkv.bias).chunk(3, -1)
    else:
        q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    q, k, v = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    q, k = module.q_norm(q), module.k_norm(k)
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    out = ((logits if bias is None else logits + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
    return module.proj(out)


@cases("fused", [True, False])
@cases("qk_norm", [None, nn.LayerNorm])
@cases("spec", [None, "none", "alibi2d.geometric", "alibi2d(slopes=learned)", "alibi2d+alibi2d.local"])
def test_attention(spec, qk_norm, fused):
    layer = Attention(12, 3, spec, fused_qkv=fused, qk_norm=qk_norm)
    grid = Grid((3, 4), prefix=1)
    x = torch.randn(2, 13, 12, requires_grad=True)
    pos = grid.positions()
    parts = [] if spec in (None, "none") else layer.pos_enc.parts()
    bias = sum(e.bias(pos, 0).dense() for e in parts) if parts else None
    expected = plain(layer, x, bias)
    for positions in (grid, pos):
        torch.testing.assert_close(layer(x, positions), expected, rtol=1e-5, atol=1e-5)
    out = layer(x, pos)
    out.backward(torch.randn_like(out))
    assert all(p.grad is not None for p in layer.parameters())


def test_options():
    minimal = Attention(8, 2, qkv_bias=False, proj=False)
    assert [n for n, _ in minimal.named_parameters()] == ["qkv.weight"]
    assert isinstance(minimal.proj, nn.Identity)
    unfused = Attention(8, 2, fused_qkv=False)
    assert {n.partition(".")[0] for n, _ in unfused.named_parameters()} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "proj",
    }
    x = torch.randn(1, 6, 8)
    encoding = create_encoding("alibi2d(layers=[1])", num_heads=2)
    layers = [Attention(8, 2, encoding, layer=i) for i in (0, 1)]
    layers[1].load_state_dict(layers[0].state_dict())
    minimal = Attention(8, 2)
    minimal.load_state_dict(dict(layers[0].state_dict()))
    assert torch.equal(layers[0](x, (2, 3)), minimal(x, (2, 3)))
    assert not torch.allclose(layers[1](x, (2, 3)), minimal(x, (2, 3)))


def test_masks_and_backend():
    layer = Attention(8, 2, "alibi2d")
    x = torch.randn(2, 6, 8)
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, 4:] = False
    a = layer(x, (2, 3), key_padding_mask=keep)
    b = layer(x, (2, 3), attn_mask=keep[:, None, None])
    torch.testing.assert_close(a, b)
    assert not torch.allclose(a[1], layer(x, (2, 3))[1])
    same = copy.deepcopy(layer)
    same.backend = "reference"
    torch.testing.assert_close(same(x, (2, 3)), layer(x, (2, 3)), rtol=1e-5, atol=1e-5)
    same.backend = "lowrank"
    with pytest.raises(BackendUnavailable, match="only squared distance without wrap"):
        same(x, (2, 3))


def test_jitter_of_a_layer_and_of_a_forward_pass():
    x, grid = torch.randn(1, 6, 8), Grid((2, 3))
    layer = Attention(8, 2, "alibi2d(jitter=1.0)").train()
    assert not torch.equal(layer(x, grid), layer(x, grid))
    pos = layer.pos_enc.prepare(grid.positions())
    assert torch.equal(layer(x, pos), layer(x, pos))  # one draw, made outside
    layer.eval()
    assert torch.equal(layer(x, grid), layer(x, grid))


def test_errors():
    with pytest.raises(OptionError, match="dim to be a multiple of num_heads, got dim=10, num_heads=4"):
        Attention(10, 4)
    for spec in ("sincos2d", "learned", "alibi2d+sincos2d", create_encoding("sincos2d", dim=8)):
        with pytest.raises(
            UnsupportedCombination,
            match=r"(sincos2d|learned), which works on the tokens outside",
        ):
            Attention(8, 2, spec)
    with pytest.raises(OptionError, match="alibi2d has num_heads=3 but the model has num_heads=2"):
        Attention(8, 2, create_encoding("alibi2d", num_heads=3))
    layer = Attention(8, 2, "alibi2d")
    with pytest.raises(ShapeError, match=r"The input has 7 tokens, but Grid\(shape=\(2, 3\).* has 6"):
        layer(torch.randn(1, 7, 8), (2, 3))
    with pytest.raises(ShapeError, match="alibi2d needs 2-axis positions, got 1 axis"):
        layer(torch.randn(1, 7, 8), (7,))


@pytest.mark.slow
def test_a_small_vit_learns_with_dropped_tokens_and_compiles():
    torch._dynamo.reset()

    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 12, 4, 4)
            self.blocks = nn.ModuleList(
                Attention(12, 3, "alibi2d(slopes=learned)", layer=i) for i in range(2)
            )

        def forward(self, image):
            x = self.patch(image)
            pos = Grid(x.shape[-2:]).positions(x.device)
            x = x.flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = x + block(x, pos)
            return x.mean(1)

    model = ViT()
    image = torch.randn(2, 3, 12, 20)
    out = model(image)
    out.backward(torch.randn_like(out))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for size in ((12, 20), (8, 8)):
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(compiled(image), model(image), rtol=1e-5, atol=1e-5)
    layer, pos = model.blocks[0], Grid((3, 5)).positions()
    keep = torch.stack([torch.randperm(15)[:6] for _ in range(2)])
    x = torch.randn(2, 6, 12)
    out = layer(x, pos.gather(keep))
    full = layer.pos_enc.bias(pos, 0).dense()[0]
    bias = torch.stack([full[:, k][:, :, k] for k in keep])
    torch.testing.assert_close(out, plain(layer, x, bias), rtol=1e-5, atol=1e-5)
    assert vispe.Attention is Attention
