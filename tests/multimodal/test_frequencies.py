"""Frequencies of pairs in streams: a schedule for one axis (YaRN-V), learned ones (GRAPE-M); and GRAPE-A."""

import math

import pytest
import torch

from tests.cases import cases
from vispe import Positions, create_encoding
from vispe.attention import attention
from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.grid.frequencies import inverse_frequencies
from vispe.grid.yarn import yarn
from vispe.multimodal import Image, Stream, Text, Video, allocation, angles, create_scheme, on_axis, rotation

ROWS = [[Text(5), Image(3, 4), Text(2), Video(3, 2, 2, 0.5), Text(300)], [Image(2, 5), Text(7)]]


@cases(("dim", "base", "scale", "length"), [(128, 1e6, 4.0, 32768), (32, 1e4, 2.5, 256)])
@cases("spec", ["videorope", "mrope", "mrope_i", "mmrope"])
def test_yarn_on_the_time_axis_only(spec, dim, base, scale, length):
    """YaRN's formulas for each pair of time; rows and columns are unchanged."""
    axis = create_scheme(spec).allocation(dim // 2)
    plain = inverse_frequencies(dim, base)
    result = on_axis(plain, yarn(dim, base, scale, length), axis)
    assert result.dtype == plain.dtype
    low, high = (dim * math.log(length / (2 * math.pi * r)) / (2 * math.log(base)) for r in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    changed = 0
    for pair, number in enumerate(axis.tolist()):
        rate = base ** (-2 * pair / dim)
        share = min(max((pair - low) / (high - low), 0), 1)
        if number == allocation.T:
            assert result[pair].item() == pytest.approx(rate * (1 - share) + rate / scale * share, rel=1e-5)
            changed += share > 0
        else:
            assert torch.equal(result[pair], plain[pair])
    # time has the highest frequencies, which YaRN does not change
    has_few_pairs = spec == "mrope" and dim == 128
    assert bool(changed) != has_few_pairs
    ids = create_scheme(spec).coordinates(Stream.of(ROWS)).ids
    before, after = (angles(ids, rates, axis) for rates in (plain, result))
    spatial = axis != allocation.T
    assert torch.equal(before[..., spatial], after[..., spatial])
    assert torch.equal(before, after) == has_few_pairs


def test_slow_pairs_of_a_longer_video_are_rotated_as_in_training():
    """In a video four times as long, every fourth frame has the angles of a training frame."""
    scheme = create_scheme("videorope(scale=1.0)")
    axis, plain = scheme.allocation(16), inverse_frequencies(32, 1e4)
    result = on_axis(plain, plain / 4, axis)
    short, long = (scheme.coordinates(Stream.of([[Video(t, 1, 1)]])).ids for t in (9, 36))
    time = axis == allocation.T
    torch.testing.assert_close(
        angles(long, result, axis)[:, ::4, time], angles(short, plain, axis)[..., time], rtol=1e-6, atol=0
    )


def test_frequencies_of_one_axis_reject_wrong_combinations():
    axis, plain = create_scheme("mrope").allocation(8), torch.ones(8)
    with pytest.raises(ShapeError, match=r"has 8 pairs of channels, but scaled has the shape \(6,\)"):
        on_axis(plain, torch.ones(6), axis)
    with pytest.raises(ShapeError, match=r"frequencies has the shape \(1, 8\)"):
        on_axis(plain[None], plain, axis)
    for wrong in (3, -1):
        with pytest.raises(OptionError, match=rf"Axis {wrong} rotates no pair .* Its axes are \[0, 1, 2\]"):
            on_axis(plain, plain, axis, wrong)
    with pytest.raises(OptionError, match=r"Axis 0 rotates no pair .* \[1, 2\]"):
        on_axis(plain, plain, create_scheme("hope_vlm").allocation(8))
    with pytest.raises(UnsupportedCombination, match="needs an allocation shared by all heads"):
        on_axis(plain, plain, create_scheme("mhrope").allocation(8, 4))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("spec", ["mrope", "videorope(centre=exact)", "circlerope"])
def test_grape_rotates_streams_by_the_coordinates_of_a_scheme(spec, shared):
    """Learned frequencies, pair c for axis c mod 3, minus the angle; against a loop over pairs."""
    coordinates = create_scheme(spec).coordinates(Stream.of(ROWS, "left"))
    positions = Positions(coordinates.ids.movedim(0, -1).clone(), coordinates.mask)
    encoding = create_encoding("grape", dim=2 * 14, num_heads=2, base=1e4, shared=shared).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        encoding.log_freq.add_(torch.randn(encoding.log_freq.shape, generator=generator).double())
    b, s = coordinates.mask.shape
    q, k = (torch.randn(b, 2, s, 14, generator=generator, dtype=torch.float64) for _ in "qk")
    cotangent = torch.randn(b, 2, s, s, generator=generator, dtype=torch.float64)
    rotary = encoding.transform(positions, 0)
    actual = rotary.query(q) @ rotary.key(k).mT
    (slope,) = torch.autograd.grad(actual, encoding.log_freq, cotangent)
    log_freq = encoding.log_freq.detach().clone().requires_grad_()
    coords = torch.where(coordinates.mask, coordinates.ids, 0.0)
    expected = torch.zeros_like(actual)
    for pair in range(7):
        rate = (log_freq[..., pair] / 16).exp()
        at = coords[pair % 3]
        offsets = (at[:, :, None] - at[:, None, :])[:, None]  # query minus key
        angle = offsets * (rate if shared else rate[:, None, None])
        x, y = (t[..., pair, None] for t in (q, k))
        u, v = (t[..., pair + 7, None] for t in (q, k))
        # real part of (x + i u) (y - i v) exp(-i angle)
        expected = expected + angle.cos() * (x @ y.mT + u @ v.mT) + angle.sin() * (u @ y.mT - x @ v.mT)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    (wanted_slope,) = torch.autograd.grad(expected, log_freq, cotangent)
    torch.testing.assert_close(slope, wanted_slope, rtol=1e-9, atol=1e-9)


def test_learned_frequencies_under_any_allocation():
    """`rotation` with learned frequencies equals grape with the opposite sign; frequencies get gradients."""
    coordinates = create_scheme("mrope").coordinates(Stream.of(ROWS[:1]))
    log_freq = (-torch.arange(7) * 0.4).requires_grad_()
    axis = allocation.cycle((0, 1, 2), 7)
    encoding = create_encoding("grape", dim=14, num_heads=1, scale=1.0)
    encoding.log_freq.data.copy_(log_freq.detach())
    x, cotangent = torch.randn(2, 1, 1, coordinates.ids.shape[2], 14)
    ours = rotation(-coordinates.ids, log_freq.exp(), axis).query(x)
    theirs = encoding.transform(Positions(coordinates.ids.movedim(0, -1).float()), 0).query(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    (a,) = torch.autograd.grad(ours, log_freq, cotangent)
    (b,) = torch.autograd.grad(theirs, encoding.log_freq, cotangent)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-2)
    assert a.abs().min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mrope", "circlerope"])
def test_gated_slopes_of_grape_on_the_coordinates_of_a_stream(spec):
    """GRAPE-A: attention under the stream's mask, with an explicit bias for every pair of tokens."""
    stream = Stream.of([[[Text(3), Image(2, 3)], [Text(2), Video(2, 1, 2)]], [Image(3, 2), Text(4)]], "left")
    coordinates = create_scheme(spec).coordinates(stream)
    encoding = create_encoding("grape_alibi", dim=12, num_heads=2).double()
    generator = torch.Generator().manual_seed(4)
    b, s = stream.shape
    q, k, v = torch.randn(3, b, 2, s, 6, generator=generator, dtype=torch.float64)
    bias = encoding.bias(Positions(coordinates.ids.movedim(0, -1), coordinates.mask), 0)
    actual = attention(q, k, v, bias=bias, attn_mask=stream.attention_mask())
    soft = torch.nn.functional.softplus
    for row in range(b):
        for head, slope in enumerate((2**-4, 2**-8)):
            unit = [t[head] / t[head].norm() for t in (encoding.u.detach(), encoding.v.detach())]
            for i in range(s):
                keys = [j for j in range(s) if stream.attention_mask()[row, 0, i, j]]
                if not keys:
                    continue
                logits = []
                for j in keys:
                    distance = math.dist(
                        coordinates.ids[:, row, i].tolist(), coordinates.ids[:, row, j].tolist()
                    )
                    gate = soft(k[row, head, j] @ unit[0] / 6**0.5) + soft(q[row, head, i] @ unit[1] / 6**0.5)
                    logits.append(q[row, head, i] @ k[row, head, j] / 6**0.5 - slope * gate * distance)
                expected = torch.stack(logits).softmax(0) @ v[row, head, keys]
                torch.testing.assert_close(actual[row, head, i], expected, rtol=0, atol=1e-9)
