"""positional_attention against its definition, and independence of its weights of the content."""

import pytest
import timm
import torch

from tests.cases import cases
from vispe import Grid, attention, create_encoding, explain
from vispe.errors import OptionError, ShapeError


def slow(encoding, pos):
    """Return the logits (h, n, n), pair by pair."""
    n, heads, width = pos.tokens, encoding.num_heads, encoding.pos_dim
    table = encoding.places.table(pos)[0].double()
    weight, bias = encoding.qk_proj.weight.double(), encoding.qk_proj.bias.double()
    out = torch.zeros(heads, n, n, dtype=torch.float64)
    for h in range(heads):
        start = 2 * h * width
        for i in range(n):
            for j in range(n):
                if pos.spatial[0, i] and pos.spatial[0, j]:
                    q = weight[start : start + width] @ table[i] + bias[start : start + width]
                    k = weight[start + width : start + 2 * width] @ table[j]
                    k = k + bias[start + width : start + 2 * width]
                    out[h, i, j] = (q * k).sum() / width**0.5
    return out


@cases(
    ("spec", "shape"),
    [
        ("positional_attention(pos_dim=8)", (3, 4)),
        ("positional_attention(pos_dim=8,table=sincos2d+learned)", (2, 5)),
        ("positional_attention(pos_dim=5,table=fourier)", (1, 3)),
        ("positional_attention(pos_dim=5,table=spder)", (2, 1, 3)),
    ],
)
def test_logits(spec, shape):
    encoding = create_encoding(spec, num_heads=2, grid=shape)
    for pos in (Grid(shape, 2).positions(), Grid((*shape[:-1], 4)).positions()):
        torch.testing.assert_close(
            encoding.bias(pos, 0).dense()[0].double(), slow(encoding, pos), rtol=1e-4, atol=1e-5
        )


@cases("backend", ["reference", "sdpa", "lowrank", "auto"])
def test_content_affects_values_only(backend):
    encoding = create_encoding("positional_attention(pos_dim=8)", num_heads=2).double()
    pos = Grid((3, 3), 1).positions()
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 2, pos.tokens, 4, dtype=torch.float64))
    result = attention(q, k, v, bias=encoding.bias(pos, 0), backend=backend)
    torch.testing.assert_close(result, slow(encoding, pos).softmax(-1) @ v)
    torch.testing.assert_close(result[:, :, 0], v.mean(2))  # a class token attends to all equally
    grads = torch.autograd.grad((result * torch.randn_like(result)).sum(), [q, k, v])
    assert [bool(g.any()) for g in grads] == [False, False, True]
    assert explain(q, k, v, bias=encoding.bias(pos, 0)).backend == "lowrank"


def test_prefix_tokens_change_nothing_between_patches():
    encoding = create_encoding("positional_attention(pos_dim=8)", num_heads=2)
    dense, without_prefix = (encoding.bias(Grid((3, 4), n).positions(), 0).dense() for n in (5, 0))
    assert not dense[:, :, :5].any()
    assert not dense[..., :5].any()
    torch.testing.assert_close(dense[..., 5:, 5:], without_prefix)


def test_gradients():
    encoding = create_encoding(
        "positional_attention(pos_dim=4,table=learned)", num_heads=2, grid=(2, 3)
    ).double()
    pos = Grid((2, 3), 1).positions()
    names = [name for name, _ in encoding.named_parameters()]

    def logits(*values):
        call = torch.func.functional_call
        return call(
            Dense(encoding, pos), {f"encoding.{n}": v for n, v in zip(names, values, strict=True)}, ()
        )

    assert torch.autograd.gradcheck(logits, tuple(encoding.parameters()), fast_mode=True)


class Dense(torch.nn.Module):
    def __init__(self, encoding, pos):
        super().__init__()
        self.encoding, self.pos = encoding, pos

    def forward(self):
        return self.encoding.bias(self.pos, 0).dense()


def test_a_vit():
    model = timm.create_model(
        "test_vit", pos_embed="positional_attention(table=learned,pos_dim=8)", img_size=64
    )
    assert "table=learned" in str(model.blocks[0].attn.pos_enc)
    out = model(torch.randn(2, 3, 64, 64))
    out.backward(torch.randn_like(out))
    for block in model.blocks:
        for parameter in block.attn.pos_enc.parameters():
            # the class token of the last block attends to all equally
            assert parameter.grad is None or parameter.grad.any() or block is model.blocks[-1]
    second = timm.create_model(
        "test_vit", pos_embed="positional_attention(table=learned,pos_dim=8)", img_size=96
    )
    second.load_state_dict(model.state_dict())  # the table is resampled
    assert second(torch.randn(1, 3, 96, 96)).isfinite().all()


def test_a_table_as_option():
    table = create_encoding("learned", dim=8, grid=(2, 3))
    encoding = create_encoding("positional_attention", num_heads=2, table=table, pos_dim=8)
    assert encoding.places is table
    assert encoding.table == {"name": "learned"}
    assert create_encoding({**encoding.config, "grid": (2, 3)}).places.config == table.config


def test_errors():
    with pytest.raises(OptionError, match=r"needs an additive encoding as table, got table='alibi2d'"):
        create_encoding("positional_attention(table=alibi2d)", num_heads=2)
    encoding = create_encoding("positional_attention", num_heads=2)
    with pytest.raises(ShapeError, match="positional_attention needs 2-axis positions, got 1 axis"):
        encoding.bias(Grid((4,)).positions(), 0)
    table = create_encoding("learned", dim=8, grid=(2, 3))
    with pytest.raises(OptionError, match="dim=8"):
        create_encoding("positional_attention", num_heads=2, table=table, pos_dim=6)
