"""Documented facts of encodings: invariances, measured on attention logits, and lists by facts."""

import pytest
import torch

from tests.cases import cases
from vispe import Biased, Grid, Positions, Rotary, create_encoding, encoding_info, list_encodings
from vispe.encodings.base import INFORMATION, INVARIANCES
from vispe.encodings.multi_softmax import calls_of
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.registry import encoding_class
from vispe.errors import OptionError, VispeError

DIM, HEADS = 24, 3
SHAPES = {1: (16,), 2: (6, 6), 3: (4, 4, 4)}
INSIDE = [n for n in list_encodings() if issubclass(encoding_class(n), Biased | Rotary)]
NAMES = [*INSIDE, *(p for n in INSIDE for p in list_encodings(f"{n}.*"))]

# causal alone, which the caller promises; groups from so near on that the small grids here have some
PROMISED = {
    "xpos": "xpos(causal=true)",
    "path": "path(causal=true)",
    "self_extend": "self_extend(group=4,window=2)",
}


def build(name, axes):
    """Return an encoding for grids with this number of axes, with random parameters."""
    facts = {"dim": DIM, "num_heads": HEADS, "depth": 4, "grid": SHAPES[axes]}
    name = PROMISED.get(name, name)
    encoding = create_encoding(name, **facts)
    if axes not in encoding.ndim:
        encoding = create_encoding(name, **facts, axes=axes)
    encoding = encoding.double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return encoding


SHARED = ("seqpe",)  # one encoder of positions for all layers, as in the paper


@cases("name", NAMES)
def test_parameters_belong_to_a_layer(name):
    for axes in encoding_class(name.partition(".")[0]).ndim:
        try:
            encoding = build(name, axes)
        except VispeError:  # the preset is for other axes
            continue
        break
    learned = any(True for _ in encoding.parameters())
    assert encoding.per_layer == (learned and name.partition(".")[0] not in SHARED)


def logits(encoding, pos, content):
    """Return the concatenated logits of all softmaxes of two blocks."""
    x, q, k = content
    result = []
    for layer in (0, 2):
        for _, call in calls_of(q, k, q, encoding.parts(), pos, layer, x):
            turned_q, turned_k, _ = call.transformed()
            bias = call.dense_bias()
            result.append(turned_q @ turned_k.mT * call.factor + (0 if bias is None else bias))
    return torch.cat(result, 1)


def invariances(encoding, axes):
    """Return the transforms of the grid under which the logits between patches are invariant, for fixed content."""
    shape = SHAPES[axes]
    pos = encoding.prepare(Grid(shape, reference=shape).positions())
    n = pos.tokens
    sizes = ((1, n, DIM), (1, HEADS, n, 8), (1, HEADS, n, 8))
    generator = torch.Generator().manual_seed(7)
    content = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    base, cells, result = logits(encoding, pos, content), torch.arange(n).reshape(shape), set()

    def at(tokens):
        return [t.index_select(-2, tokens.flatten()) for t in content]

    def unchanged(order):
        order = order.flatten()
        return torch.allclose(logits(encoding, pos, at(order)), base[:, :, order][..., order], atol=1e-5)

    if all(unchanged(cells.flip(axis)) for axis in range(axes)):
        result.add("reflection")
    if axes > 1 and all(unchanged(cells.rot90(1, (a, a + 1))) for a in range(axes - 1)):
        result.add("quarter_turns")
    # one corner of the grid gets the content of the opposite one
    corner, opposite = (cells[(part,) * axes].flatten() for part in (slice(0, 3), slice(-3, None)))
    order = torch.arange(n).index_copy(0, opposite, corner)
    copied = logits(encoding, pos, at(order))[:, :, opposite][..., opposite]
    first = [t[..., :10, :] for t in content]
    # what counts the tokens in between stays where all of them are moved
    if torch.allclose(copied, base[:, :, corner][..., corner], atol=1e-5) or invariant_to_motion(
        encoding, pos, first
    ):
        result.add("translation")
    if axes > 1:
        frame = torch.linalg.qr(torch.randn((axes, axes), generator=generator, dtype=torch.float64))[0]
        if invariant_to_motion(encoding, pos, first, frame):
            result.add("rotation")
    return result


def invariant_to_motion(encoding, pos, content, frame=None):
    """Return whether logits are invariant to a translation of all coordinates, and to the rotation `frame`."""
    generator = torch.Generator().manual_seed(9)
    points = 5 * torch.rand((1, 10, pos.axes), generator=generator, dtype=torch.float64)
    both = (points, (points if frame is None else points @ frame.T) + 3)
    try:
        before, after = (Positions(p.float(), extent=pos.extent) for p in both)
        return torch.allclose(
            *(logits(encoding, encoding.prepare(p), content) for p in (before, after)), atol=1e-4
        )
    except VispeError:  # it needs a grid
        return False


@cases("name", NAMES)
def test_documented_invariances_equal_measured_ones(name):
    claimed = set(encoding_info(name).invariant)
    accepted = create_encoding(PROMISED.get(name, name), dim=DIM, num_heads=HEADS, depth=4, grid=(6, 6)).ndim
    for axes in encoding_class(name.partition(".")[0]).ndim:
        try:
            encoding = build(name, axes)
        except VispeError:  # the preset is for other axes
            assert axes not in accepted
            continue
        result = invariances(encoding, axes)
        expected = claimed - ({"quarter_turns", "rotation"} if axes == 1 else set())
        assert expected <= result, axes
        # and nothing else that it could boast of; few cells of a line or a cube may agree by chance
        assert result == expected or axes != 2


def test_facts_use_the_vocabulary_of_their_field():
    for name in list_encodings():
        cls = encoding_class(name)
        assert set(cls.encodes) <= set(INFORMATION), name
        # samplers only set positions; their effect depends on the encoding that reads them
        assert cls.encodes or set(cls.invariant) == set(INVARIANCES) or issubclass(cls, Sampler), name
        assert set(cls.preset_invariant) <= set(cls.presets)
        for facts in (cls.invariant, *cls.preset_invariant.values()):
            assert set(facts) <= set(INVARIANCES), name
            assert "rotation" not in facts or {"quarter_turns", "translation"} <= set(facts), name


def test_lists_by_facts():
    bias = list_encodings(kind="bias", invariant="rotation", ndim=3)
    assert {"alibi3d", "grape_alibi"} <= set(bias)
    assert not {"alibi", "alibi2d", "rpb"} & set(bias)
    assert "alibi2d.local" in list_encodings(kind="bias", invariant="rotation")
    assert list_encodings("alibi2d*", invariant="rotation") == ["alibi2d.local"]
    assert list_encodings("alibi2d*", invariant="reflection") == ["alibi2d"]
    assert list_encodings("alibi2d.*", invariant="reflection") == list_encodings("alibi2d.*")
    assert "sincos2d" in list_encodings(encodes="position")
    assert not set(list_encodings(encodes="position")) & set(list_encodings(invariant="translation"))
    with pytest.raises(
        OptionError, match=r"encodes must be one of distance, .* got 'distanse'\. Did you mean"
    ):
        list_encodings(encodes="distanse")
    with pytest.raises(OptionError, match="invariant must be one of translation, quarter_turns, reflection"):
        list_encodings(invariant="flip")


@cases("name", INSIDE)
def test_encodings_that_read_tokens(name):
    """An encoding either requires tokens or ignores them."""
    ndim = encoding_class(name).ndim
    axes = 2 if 2 in ndim else ndim[0]
    encoding, pos = build(name, axes), Grid(SHAPES[axes]).positions()
    q = torch.randn(1, HEADS, pos.tokens, DIM // HEADS, dtype=torch.float64)
    if encoding.reads_tokens:
        with pytest.raises(VispeError, match="reads the tokens"):
            calls_of(q, q, q, [encoding], pos, 0, None)
    else:
        calls_of(q, q, q, [encoding], pos, 0, None)
