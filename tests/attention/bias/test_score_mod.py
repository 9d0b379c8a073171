"""`Bias.score_mod` equals `Bias.dense`, for every kind of bias, every distance and every encoding with a bias."""

import itertools
import re

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.attention.bias_matrix import DERIVED, METRICS, NORMS, derived, distance
from tests.attention.cases import CASES
from vispe import Grid, attention
from vispe.attention import DenseBias, DistanceBias, LowRankBias, RadialBias, SumBias, TableBias, WindowMask
from vispe.encodings.compose import bias_of
from vispe.errors import ShapeError, UnsupportedCombination

GRID = Grid((3, 4), 2)


def scores(bias, samples=2, heads=3, start=0.0):
    """Return the bias (b, h, n, n) by one call of its score_mod for each pair."""
    n, f = bias.pos.tokens, bias.score_mod()
    axes = [torch.arange(size) for size in (samples, heads, n, n)]
    for level in range(4):  # innermost first, as FlexAttention does
        f = torch.vmap(f, in_dims=(0, *[0 if axis == 3 - level else None for axis in range(4)]))
    return f(torch.full((samples, heads, n, n), start), *axes)


def assert_equal(bias, **sizes):
    expected = bias.dense()
    actual = scores(bias, **sizes)
    torch.testing.assert_close(actual, expected.float().expand_as(actual), rtol=2e-6, atol=2e-6)


def refusal(bias):
    """Return why a bias has no score_mod, or None."""
    try:
        bias.score_mod()
    except UnsupportedCombination as error:
        return str(error)
    return None


def test_every_kind_of_bias():
    refused = set()
    for make in CASES.values():
        bias = make(GRID.positions(), 2).bias
        if bias is not None and refusal(bias) is None:
            assert_equal(bias)
        elif bias is not None:
            refused.add(re.match(r"(\w+) has no score_mod", refusal(bias))[1])
    assert refused == {"ContextBias", "GatedBias"}


def test_every_distance_with_prefix_and_samples():
    for number, (metric, wrap, norm) in enumerate(itertools.product(METRICS, (False, True), NORMS)):
        assert_equal(distance(GRID.positions(), metric, wrap, norm, learned=number % 2 == 0).bias)
        pos = (
            Grid((3, 4), 1, spacing=(0.7, 1.9))
            .positions()
            .gather(torch.tensor([[0, 3, 9, 12], [5, 1, 0, 2]]))
        )
        assert_equal(
            DistanceBias((0.5, 0.2, 1.0), pos, metric=metric, wrap=wrap, normalize=norm, reference=(5, 4))
        )


def test_tables_of_tokens_in_any_order():
    pos = GRID.positions().gather(torch.tensor([[0, 3, 9, 12], [5, 1, 0, 2]]))
    table, prefix = torch.randn(3, 5, 7), torch.randn(3, 3)
    assert_equal(TableBias(table, pos, prefix))
    assert_equal(SumBias([TableBias(table, pos), DistanceBias((0.5, 0.2, 1.0), pos)]))


@pytest.mark.parametrize("spec", DERIVED)
def test_biases_of_encodings(spec):
    encoding, _, pos, layer, x = derived(spec)
    with torch.no_grad():
        bias = bias_of(encoding.parts(), pos, layer, x)
    if refusal(bias) is not None:
        assert "has no score_mod" in refusal(bias)
        return
    with torch.no_grad():
        assert_equal(bias, samples=len(x), heads=max(bias.dense().shape[1], 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_accepts_it():
    q, k, v = (torch.randn(2, 3, 14, 16) for _ in range(3))
    pos = GRID.positions()
    bias = SumBias(
        [TableBias(torch.randn(3, 5, 7), pos, torch.randn(3, 3)), DistanceBias((0.5, 0.2, 1.0), pos)]
    )
    out = flex_attention(q, k, v, score_mod=bias.score_mod())
    torch.testing.assert_close(out, attention(q, k, v, bias=bias), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled_flex_attention_accepts_every_kind():
    run = torch.compile(flex_attention, dynamic=False)
    q, k, v = (torch.randn(2, 3, 14, 16) for _ in range(3))
    pos = GRID.positions()
    for bias in (
        TableBias(torch.randn(3, 5, 7), pos, torch.randn(3, 3)),
        DistanceBias((0.5, 0.2, 1.0), pos, wrap=True),
        SumBias(
            [
                RadialBias(lambda d: -torch.log1p(d)[None], pos),
                DistanceBias(torch.rand(3), pos, metric="manhattan"),
            ]
        ),
        DenseBias(torch.randn(2, 1, 14, 14)),
    ):
        out = run(q, k, v, score_mod=bias.score_mod())
        torch.testing.assert_close(out, attention(q, k, v, bias=bias), rtol=1e-5, atol=1e-5)


def test_a_bias_that_replaces_the_product_ignores_scores():
    pos = GRID.positions()
    bias = SumBias(
        [DenseBias(torch.randn(1, 3, 14, 14), pos).as_logits(), DistanceBias((0.5, 0.2, 1.0), pos)]
    )
    torch.testing.assert_close(scores(bias, start=7.0), scores(bias))
    torch.testing.assert_close(scores(bias)[0], bias.dense()[0])


def test_masks_of_shifted_windows():
    mask = torch.zeros(2, 4, 4)
    mask[1, :2, 2:] = mask[1, 2:, :2] = -100.0
    assert_equal(WindowMask(mask, Grid((2, 2)).positions(), samples=4), samples=4)


def test_refusals():
    with pytest.raises(
        ShapeError, match=r"DistanceBias\.score_mod needs a bias with positions, got pos=None"
    ):
        DistanceBias((0.5,)).score_mod()
    q = torch.randn(1, 1, 20, 20)
    with pytest.raises(UnsupportedCombination, match="LowRankBias has no score_mod"):
        LowRankBias(q, q).score_mod()
