"""Every scheme against the oracle, token by token, on random streams with random options."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.multimodal import oracle
from tests.multimodal.strategies import (
    EVERY,
    OPTIONS,
    PIECES,
    batches,
    ids_of,
    is_packed,
    joined,
    masks,
    plain_images,
    shared,
    texts,
    videos,
)
from vispe.multimodal import Stream, Text, create_scheme, list_schemes

quick = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # streams are small; making them smaller takes minutes
)
NAMES = sorted(OPTIONS)
ROUNDED = {"circlerope", "v2pe"}  # schemes whose coordinates are not multiples of powers of two


def check(name, actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float64
    if name in ROUNDED:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    else:
        assert torch.equal(actual, expected), (actual - expected).abs().max()


def compare(scheme, stream, rows, start=None, padding=0, **kwargs):
    """Check coordinates, the next counters, and decoded coordinates."""
    rule = oracle.rule_for(scheme)
    at = None if start is None else torch.tensor(start, dtype=torch.float64)
    actual = scheme.coordinates(stream, start=at, padding=padding, **kwargs)
    draws = None if actual.draws is None else actual.draws.tolist()
    tokens, following = oracle.walk(rule, rows, start, draws)
    assert scheme.axes == rule.axes
    check(scheme.name, actual.ids, oracle.padded(tokens, stream.mask, rule.axes, padding))
    check(scheme.name, actual.next, torch.tensor([float(f) for f in following], dtype=torch.float64))
    decoded = [[rule.text(f + i * rule.step) for i in range(3)] for f in following]
    every = torch.ones(len(rows), 3, dtype=torch.bool)
    check(scheme.name, actual.decode(3), oracle.padded(decoded, every, rule.axes))
    lengths = [len(row) for row in tokens]
    expected = [[float(f - n * rule.step)] for f, n in zip(following, lengths, strict=True)]
    check(scheme.name, actual.delta(), torch.tensor(expected, dtype=torch.float64))
    return actual


def as_types(rows):
    """Return rows as token types describe them, with adjacent texts merged."""
    return [[joined(d) for d in row] if is_packed(row) else joined(row) for row in rows]


def test_every_scheme_is_compared():
    assert sorted(oracle.RULES) == NAMES == list_schemes()


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_streams_of_segments(name, data):
    scheme = create_scheme({"name": name, **data.draw(OPTIONS[name])})
    rows = data.draw(batches((*PIECES.get(name, EVERY), shared)))
    side = data.draw(st.sampled_from(["left", "right"]))
    stream = Stream.of(rows, padding=side)
    start = [data.draw(st.integers(0, 400)) for _ in rows] if data.draw(st.booleans()) else None
    training = data.draw(st.booleans())
    result = compare(scheme, stream, rows, start, data.draw(st.sampled_from([0, 1, -7.5])), training=training)
    other = Stream.of(rows, side, stream.shape[1] + 3)  # a second call, of another size, with the same draws
    compare(scheme, other, rows, draws=result.draws)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_from_ids(name, data):
    scheme = create_scheme({"name": name, **data.draw(OPTIONS[name])})
    as_tensors = data.draw(st.booleans())
    pieces = (texts, plain_images, videos) if as_tensors else PIECES.get(name, EVERY)
    rows = as_types(data.draw(batches(pieces)))
    mask = data.draw(masks(rows))
    stream = Stream.from_ids(**ids_of(rows, mask, data.draw(st.sampled_from([1, 2, 3])), as_tensors))
    assert torch.equal(stream.mask, mask)
    compare(scheme, stream, rows, training=True)


@settings(quick, max_examples=40)
@given(data=st.data())
def test_both_ways_describe_the_same_blocks(data):
    as_tensors = data.draw(st.booleans())
    pieces = (texts, plain_images, videos) if as_tensors else (*PIECES["group_pe"], *PIECES["bilevel"])
    rows = as_types(data.draw(batches(pieces)))
    ours = Stream.of(rows, data.draw(st.sampled_from(["left", "right"])))
    theirs = Stream.from_ids(**ids_of(rows, ours.mask, data.draw(st.sampled_from([1, 2])), as_tensors))
    for field in (
        "sample",
        "document",
        "group",
        "kind",
        "tokens",
        "size",
        "picture",
        "tile",
        "shared",
        "boundary",
    ):
        a, b = getattr(ours.blocks, field), getattr(theirs.blocks, field)
        assert a.dtype == b.dtype, field
        assert torch.equal(a, b), field
    torch.testing.assert_close(ours.blocks.seconds, theirs.blocks.seconds, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.mask, theirs.mask)
    assert torch.equal(ours.lengths, theirs.lengths)
    for field in ("visual", "ends", "part", "parts", "first"):
        assert torch.equal(getattr(ours.blocks, field), getattr(theirs.blocks, field)), field
    assert torch.equal(ours.block, theirs.block)
    assert torch.equal(ours.index, theirs.index)


@settings(quick, max_examples=5)
@given(data=st.data())
def test_separate_frames(data):
    """Text between the frames of a video: each frame is a separate video."""
    segments, grids, clock = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        film = data.draw(videos)
        grids.append([film.t, 2 * film.h, 2 * film.w])
        clock.append(float("nan") if film.seconds is None else film.seconds)
        for _ in range(film.t):
            segments += [Text(data.draw(st.integers(1, 3))), type(film)(1, film.h, film.w, film.seconds)]
    arguments = ids_of([segments], Stream.of([segments]).mask, 2)
    arguments |= {"videos": torch.tensor(grids), "seconds": clock, "separate_frames": True}
    stream = Stream.from_ids(**arguments)
    for name in NAMES:
        compare(create_scheme({"name": name, **data.draw(OPTIONS[name])}), stream, [segments])
