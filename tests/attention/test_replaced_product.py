"""Biases in place of the product of queries and keys: backends, and their cached masks."""

import pytest
import timm
import torch

import vispe
from tests.attention.cases import CASES, tensors
from tests.cases import cases
from vispe import Biased, Grid, attention, explain
from vispe.attention import DenseBias, DistanceBias, LowRankBias, PairRotation, SumBias, TableBias
from vispe.encodings import registry
from vispe.errors import BackendUnavailable, UnsupportedCombination

POS = Grid((3, 4), prefix=1).positions()
FIXED = DistanceBias((0.5, 0.2, 0.0), POS)


@cases("first", [False, True])
def test_stored_masks_are_not_confused(first):
    """The mask of a fixed bias is stored, and the next call with it goes straight to SDPA."""
    q, k, v = (t.detach() for t in tensors(2, POS.tokens))
    whole = FIXED.as_logits()
    assert whole.key == FIXED.key
    for alone in (first, not first, first, not first):
        result = attention(q, k, v, bias=whole if alone else FIXED)
        logits = FIXED.dense() + (0 if alone else q.shape[-1] ** -0.5 * q @ k.mT)
        torch.testing.assert_close(result, logits.softmax(-1) @ v)
    assert not FIXED.replaces_product


def test_columns_replace_queries_and_keys():
    row, col = torch.randn(1, 3, POS.tokens, 5), torch.randn(1, 3, POS.tokens, 5)
    q, k, v = (t.detach() for t in tensors(2, POS.tokens))
    bias = LowRankBias(row, col).as_logits()
    assert explain(q, k, v, bias=bias).backend == "lowrank"
    expected = (row @ col.mT).softmax(-1) @ v
    for backend in ("auto", "lowrank", "sdpa", "reference"):
        torch.testing.assert_close(attention(q, k, v, bias=bias, backend=backend), expected)
    huge = attention(q * float("inf"), k, v, bias=bias)  # queries are not read
    torch.testing.assert_close(huge, expected)


def test_queries_have_a_gradient_of_zero():
    q, k, v = tensors(2, POS.tokens)
    for backend in ("reference", "sdpa"):
        grads = torch.autograd.grad(attention(q, k, v, bias=FIXED.as_logits(), backend=backend).sum(), [q, k])
        assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_half_precision_has_no_rounding_of_the_product():
    q, k, v = (t.detach().bfloat16() * 30 for t in tensors(1, POS.tokens))
    actual = attention(q, k, v, bias=FIXED.as_logits())
    expected = FIXED.dense().softmax(-1) @ v.float()
    # mask, weights and output are rounded to 2^-9; a product taken off again would leave logits off by 2^-8 of 900
    assert (actual.float() - expected).norm() < 8e-3 * expected.norm()


@cases("backend", ["triton", "flex"])
def test_fused_kernels_refuse(backend):
    q, k, v = tensors(1, POS.tokens)
    with pytest.raises(BackendUnavailable, match=f"backend='{backend}' does not support this call"):
        attention(q, k, v, bias=FIXED.as_logits(), backend=backend)


def test_a_sum_has_at_most_one():
    table = TableBias(torch.randn(3, 5, 7), POS)
    assert SumBias([FIXED, table.as_logits()]).replaces_product
    assert not SumBias([FIXED, table]).replaces_product
    message = "At most one term may replace the product .* DistanceBias and TableBias"
    with pytest.raises(UnsupportedCombination, match=message):
        SumBias([FIXED.as_logits(), table.as_logits()])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("whole")])
def test_compiled(name):
    case = CASES[name](POS, 2)
    q, k, v = tensors(2, POS.tokens)

    def f(q, k, v):
        return attention(q, k, v, bias=case.bias)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(q, k, v), f(q, k, v))


class Window(Biased):
    """Each token attends to nearby ones, whatever their content; fixed, so its mask is cached."""

    name = "window"
    paper, year = "none", 2026

    def bias(self, pos, layer, x=None):
        return DistanceBias((0.7,), pos).as_logits()


@pytest.fixture
def window(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY, "window": Window})
    return Window()


@pytest.mark.parametrize("fused", [True, False])
def test_hosts_do_not_add_the_product(window, fused):
    """Stock attention runs with the mask of a fixed bias in general, but not with a bias that replaces the product."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=3, img_size=64, num_classes=0
    ).eval()
    vispe.convert(model, window)
    attn = model.blocks[0].attn
    attn.fused_attn = fused
    x = torch.randn(2, 3, 64, 64)
    before = model(x)
    with torch.no_grad():
        attn.qkv.weight[:48] = 0  # queries and keys
        attn.qkv.bias[:48] = 0
    torch.testing.assert_close(model(x), before)


@pytest.mark.slow
def test_it_compiles_in_one_graph():
    q, k, v = tensors(2, POS.tokens)

    def run(q, k, v, table):
        bias = TableBias(table, Grid((3, 4), prefix=1).positions()).as_logits()
        return attention(q, k, v, bias=bias)

    table = torch.randn(1, 5, 7, dtype=q.dtype)
    result = torch.compile(run, fullgraph=True, backend="eager")(q, k, v, table)
    torch.testing.assert_close(result, run(q, k, v, table))


def test_a_transform_without_effect_is_refused():
    bias, turn = DenseBias(torch.zeros(1, 1, 6, 6)).as_logits(), torch.zeros(1, 1, 6, 2)
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(UnsupportedCombination, match=r"DenseBias replaces the product .* PairRotation"):
        attention(q, q, q, bias=bias, transform=PairRotation(turn.cos(), turn.sin(), "half"))
    # one that turns values has an effect
    values = PairRotation(turn.cos(), turn.sin(), "half", values=True)
    torch.testing.assert_close(attention(q, q, q, bias=bias, transform=values), attention(q, q, q, bias=bias))
    with pytest.raises(UnsupportedCombination, match="Omit one of them"):
        timm.create_model("test_vit", img_size=64, pos_embed="tapa+rope_axial")(torch.zeros(1, 3, 64, 64))
