"""ssmax: the factor of queries, with rotations and biases, and with the prior of bam_ssmax."""

import math

import pytest
import torch

from tests.cases import cases
from tests.encodings.bias import offsets
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.compose import bias_of, transform_of
from vispe.errors import OptionError, ShapeError


def factor(encoding, pos, heads=3):
    return encoding.transform(pos, 0).query(torch.ones(1, heads, pos.tokens, 2, dtype=torch.float64))[
        0, :, :, 0
    ]


def test_the_factor():
    encoding, pos = create_encoding("ssmax", num_heads=3), Grid((3, 4), 2).positions()
    with torch.no_grad():
        encoding.seq_scale.copy_(torch.tensor([0.5, 1.0, 2.0]))
    expected = torch.tensor([0.5, 1.0, 2.0]).double()[:, None] * math.log(14)
    torch.testing.assert_close(factor(encoding, pos), expected.expand(3, 14))
    subset = pos.gather(torch.tensor([[0, 1, 5], [0, 1, 9]]))
    torch.testing.assert_close(factor(encoding, subset), (expected * math.log(3) / math.log(14)).expand(3, 3))
    free = Positions(torch.rand(2, 5, 3))
    torch.testing.assert_close(factor(encoding, free), (expected * math.log(5) / math.log(14)).expand(3, 5))


def test_causal_queries_have_separate_factors():
    encoding = create_encoding("ssmax(causal=true,init=2)", num_heads=3)
    expected = 2 * torch.arange(1, 8).double().log().expand(3, 7)
    torch.testing.assert_close(factor(encoding, Grid((6,), 1).positions()), expected, rtol=1e-6, atol=1e-6)


def test_the_retrofit_changes_nothing_at_the_training_size():
    encoding = create_encoding("ssmax.retrofit", num_heads=3)
    ones = torch.ones(3, 13, dtype=torch.float64)
    at_home = Grid((3, 4), 1, reference=(3, 4)).positions()
    torch.testing.assert_close(factor(encoding, at_home), ones, rtol=1e-6, atol=1e-6)
    larger = Grid((6, 4), 1, reference=(3, 4)).positions()
    torch.testing.assert_close(
        factor(encoding, larger)[:, :13], ones * math.log(25) / math.log(13), rtol=1e-6, atol=1e-6
    )
    arguments = create_encoding("ssmax.retrofit(reference=[3,4])", num_heads=3)
    torch.testing.assert_close(factor(arguments, Grid((6, 4), 1).positions()), factor(encoding, larger))
    assert (
        factor(create_encoding("ssmax.retrofit", num_heads=3), Grid((1,), reference=(1,)).positions())
        .isfinite()
        .all()
    )


def test_alongside_a_rotation_the_logits_are_scaled():
    pos = Grid((3, 4), 1).positions()
    q, k, v = torch.randn(3, 2, 3, 13, 8)
    rope = create_encoding("rope_axial", dim=24, num_heads=3)
    both = create_encoding("ssmax(init=0.7)+rope_axial+alibi2d", dim=24, num_heads=3).parts()
    bias = create_encoding("alibi2d", num_heads=3).bias(pos, 0)
    for backend in ("reference", "sdpa"):
        actual = attention(
            q, k, v, bias=bias_of(both, pos, 0), transform=transform_of(both, pos, 0), backend=backend
        )
        expected = attention(
            q, k, v, bias=bias, transform=rope.transform(pos, 0), scale=0.7 * math.log(13) / 8**0.5
        )
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@cases("causal", [False, True])
@cases("scaled", [False, True])
def test_bam_ssmax(scaled, causal):
    pos = Grid((6,) if causal else (2, 4), 1).positions()
    encoding = offsets.create(f"bam_ssmax(scale_prior={scaled},causal={causal})")
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.3)
    bam = offsets.create("bam")
    bam.load_state_dict({n: p for n, p in encoding.state_dict().items() if n != "seq_scale"}, strict=True)
    q, k, v = torch.randn(3, 2, 3, pos.tokens, 8)
    count = torch.arange(1, pos.tokens + 1.0) if causal else torch.full((pos.tokens,), float(pos.tokens))
    growth = encoding.seq_scale.detach()[:, None, None] * count.log()[:, None]
    content, prior = q @ k.transpose(-1, -2) / 8**0.5, bam.bias(pos, 0).dense().detach()
    logits = growth * (content + prior) if scaled else growth * content + prior
    if causal:
        logits = logits.masked_fill(~torch.ones(pos.tokens, pos.tokens).tril().bool(), -torch.inf)
    for backend in ("reference", "sdpa"):
        result = attention(
            q,
            k,
            v,
            bias=encoding.bias(pos, 0),
            transform=encoding.transform(pos, 0),
            is_causal=causal,
            backend=backend,
        )
        torch.testing.assert_close(result, logits.softmax(-1) @ v, rtol=1e-4, atol=1e-5)
    offsets.check_gradients(encoding, pos.grid) if scaled else None


def test_vits():
    offsets.check_vit("ssmax+rope_axial")
    offsets.check_vit("bam_ssmax")


@cases(
    ("spec", "message"),
    [
        ("ssmax(init=0)", "init needs a number above 0, got init=0"),
        ("ssmax(reference=[3,4])", "has no effect with normalize='none'"),
        ("bam_ssmax(causal=true,axes=2)", "causal=True counts keys along 1 axis, got axes=2"),
    ],
)
def test_option_errors(spec, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(spec, num_heads=3)


def test_call_errors():
    with pytest.raises(OptionError, match="needs the grid of the training resolution"):
        create_encoding("ssmax.retrofit", num_heads=3).transform(Grid((3, 4)).positions(), 0)
    with pytest.raises(ShapeError, match="bam_ssmax needs 1-axis positions, got 2 axes"):
        offsets.create("bam_ssmax(causal=true)").bias(Grid((2, 2)).positions(), 0)


def test_padding_of_packed_patches_is_ignored():
    encoding = offsets.create("bam_ssmax")
    spatial = torch.tensor([[False] + [True] * 4, [False] + [True] * 2 + [False] * 2])
    coords = torch.rand(2, 5, 2) * spatial[..., None]
    pos = Positions(coords, spatial, index=torch.zeros(2, 5, dtype=torch.int64), grid=Grid((2, 2), 1))
    rotated = encoding.transform(pos, 0).query(torch.ones(2, 3, 5, 1))[:, 0, 0, 0]
    torch.testing.assert_close(rotated, torch.tensor([5.0, 3.0]).log())
    bam = offsets.create("bam").bias(pos, 0).dense()
    torch.testing.assert_close(encoding.bias(pos, 0).dense(), bam * rotated[:, None, None, None])
