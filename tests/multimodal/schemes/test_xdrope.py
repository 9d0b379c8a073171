"""XD-RoPE by a slow formula, against transformers' classes, and its images from the outputs of a processor."""

import math

import pytest
import torch

from tests.cases import cases
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedCombination
from vispe.grid.frequencies import inverse_frequencies, ntk_base
from vispe.multimodal import (
    Image,
    Parallel,
    Stream,
    Text,
    Video,
    angles,
    create_scheme,
    newline_images,
    rotation,
)
from vispe.multimodal.properties import is_text_exact
from vispe.multimodal.serving import TableRows, table_of

LAYOUTS = ("paired", "elementwise")


def axis_of_channel(channel, sections, layout):
    """Return the axis of a channel, from the definition."""
    pairs = sum(sections)
    index, width = (channel % pairs, 1) if layout == "paired" else (channel, 2)
    for axis, section in enumerate(sections):
        if index < width * section:
            return axis
        index -= width * section
    raise AssertionError(channel)


def rotated(x, ids, sections, layout, theta=10000.0):
    """Return queries (b, h, s, d) rotated channel by channel in Python floats."""
    out, width = torch.zeros_like(x), x.shape[-1]
    for b, h, s in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:3])).tolist():
        for c in range(width):
            angle = float(ids[axis_of_channel(c, sections, layout), b, s]) * theta ** (
                -2 * (c % (width // 2)) / width
            )
            partner = -x[b, h, s, c + width // 2] if c < width // 2 else x[b, h, s, c - width // 2]
            out[b, h, s, c] = x[b, h, s, c] * math.cos(angle) + partner * math.sin(angle)
    return out


@cases("layout", LAYOUTS)
@cases("sections", [(3, 2, 2, 1), (1, 4, 0, 3), (2, 3, 3)])
def test_rotation_is_that_of_the_formula(sections, layout):
    scheme = create_scheme("xdrope", sections=sections, layout=layout)
    stream = Stream.of([[Text(2), Image(2, 3), Text(1), Image(1, 2)], [Text(3)]], "left")
    ids = scheme.coordinates(stream).ids
    q, k = (torch.randn(2, h, stream.shape[1], 16, dtype=torch.float64) for h in (2, 1))
    rotary = rotation(ids, inverse_frequencies(16), scheme.allocation(8))
    torch.testing.assert_close(rotary.query(q), rotated(q, ids, sections, layout), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotary.key(k), rotated(k, ids, sections, layout), rtol=1e-6, atol=1e-6)


def test_coordinates_of_an_example():
    rows = [[Text(2), Image(1, 3), Text(1), Image(2, 2)], [Text(1), Video(2, 1, 1)]]
    result = create_scheme("xdrope").coordinates(Stream.of(rows)).ids
    assert result[:, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 0, 1, 2, 5, 0, 1, 0, 1],
        [0, 1, 0, 0, 0, 5, 0, 0, 1, 1],
        [0, 1, 0, 0, 0, 5, 1, 1, 1, 1],
    ]
    assert result[3, 1, :3].tolist() == [0, 0, 1]
    per_batch = create_scheme("xdrope(image_index=batch)").coordinates(Stream.of(rows))
    assert per_batch.ids[3, 1, :3].tolist() == [0, 2, 3]
    assert per_batch.next.tolist() == [10, 3]
    assert per_batch.delta("max").tolist() == [[0], [1]]  # the image index 3 is above the third token
    three = create_scheme("xdrope(sections=[2,3,3])").coordinates(Stream.of(rows)).ids
    assert torch.equal(three, result[1:])


@cases("align", ["start", "end"])
def test_parallel_images_have_one_index(align):
    members = [Image(1, 2), [Image(1, 1), Image(2, 1)]]
    rows = [[Image(1, 1), Parallel(members, align=align), Image(1, 1)], [Image(1, 1)]]
    index = create_scheme("xdrope").coordinates(Stream.of(rows)).ids[3]
    assert index.tolist() == [[0, 1, 1, 1, 2, 2, 3], [0] * 7]
    result = create_scheme("xdrope(image_index=batch)").coordinates(Stream.of(rows)).ids[3]
    assert result[1, 0] == 4


@cases("layout", LAYOUTS)
def test_text_is_rotated_as_by_rope1d(layout):
    scheme = create_scheme("xdrope", layout=layout)
    assert is_text_exact(scheme, pairs=16)
    assert scheme.allocation(9).shape == ((9,) if layout == "paired" else (18,))


def test_only_paired_sections_preserve_norms():
    stream = Stream.of([[Text(9), Image(3, 4)]])
    q, norms = torch.randn(1, 1, 21, 16, dtype=torch.float64), {}
    for layout in LAYOUTS:
        scheme = create_scheme("xdrope", layout=layout)
        rotary = rotation(scheme.coordinates(stream).ids, inverse_frequencies(16), scheme.allocation(8))
        norms[layout] = rotary.query(q).norm(dim=-1)
    torch.testing.assert_close(norms["paired"], q.norm(dim=-1))
    torch.testing.assert_close(norms["elementwise"][..., :9], q.norm(dim=-1)[..., :9])
    assert (norms["elementwise"] / q.norm(dim=-1) - 1).abs().max() > 0.05


def test_options_that_do_not_fit():
    with pytest.raises(OptionError, match=r"sections=\[1, 1, 1, 1\] add up to 4, but a head has 8 pairs"):
        create_scheme("xdrope(sections=[1,1,1,1])").allocation(8)
    with pytest.raises(OptionError, match="at least 4 pairs of channels for its 4 axes, got 3"):
        create_scheme("xdrope").allocation(3)
    for sections in ([1, 2], [1, 1, 1, 1, 1]):
        with pytest.raises(OptionError, match="sections needs"):
            create_scheme("xdrope", sections=sections)


def test_an_axis_for_each_channel_needs_halves():
    scheme = create_scheme("xdrope(layout=elementwise)")
    ids, axes = scheme.coordinates(Stream.of([[Text(3)]])).ids, scheme.allocation(8)
    with pytest.raises(UnsupportedCombination, match="needs layout='half', got 'interleaved'"):
        rotation(ids, inverse_frequencies(16), axes, layout="interleaved")
    with pytest.raises(UnsupportedCombination, match="one axis for the two channels of a pair, got xdrope"):
        table_of(TableRows(scheme, 64), inverse_frequencies(16))
    with pytest.raises(ShapeError, match="16 pairs of channels, but there are 7 frequencies"):
        angles(ids, inverse_frequencies(14), axes)


def test_images_of_a_processor():
    """Two images with boundary tokens, one after the other; a row without images; one without boundary tokens."""
    types = torch.tensor([[0, *[1] * 5, *[1] * 8, 0, 9], [9] * 16, [9, 9, *[0] * 6, *[1] * 4, *[0] * 4]])
    mask = (types < 9).long()
    types = types.where(mask.bool(), 0)
    grids = torch.tensor([[1, 2, 4], [1, 4, 4], [1, 4, 2]])
    changed, images = newline_images(types, grids, mask=mask)
    assert images == [Image(1, 3), Image(2, 3), Image(2, 2)]
    assert changed[0].tolist() == [0, 0, 1, 1, 1, 0, 0, *[1] * 6, 0, 0, 0]
    assert torch.equal(changed[1:], types[1:])
    assert types[0, 1] == 1  # the types passed are not changed
    assert Stream.from_ids(changed, images, mask=mask).blocks.picture.max() == 2
    assert newline_images(torch.zeros(1, 3, dtype=torch.long), None)[1] == []


@cases(
    ("types", "grids", "message"),
    [
        (
            [0, 1, 1, 0],
            [[1, 2, 4]],
            r"Sample 0, token 1 .*: 2 adjacent .* 1 row of 3 tokens .* 3 in total, or 5",
        ),
        ([0, 1, 1, 0], [], "2 adjacent image placeholders exceed the image grids"),
        ([0, 1, 1, 1], [[2, 2, 4]], r"must have one frame, and at least 2 rows and columns, got \[2, 2, 4\]"),
        ([0, 1, 1, 1], [[1, 1, 4]], r"at least 2 rows and columns, got \[1, 1, 4\]"),
    ],
)
def test_placeholders_that_do_not_match(types, grids, message):
    grids = torch.tensor(grids, dtype=torch.long).reshape(-1, 3)
    with pytest.raises(InputError, match=message):
        newline_images(torch.tensor([types]), grids)


def test_shapes_of_processor_outputs():
    types = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"grids needs the shape \(n, 3\)"):
        newline_images(types, torch.ones(2, dtype=torch.long))
    with pytest.raises(ShapeError, match="types and mask need one shape"):
        newline_images(types, None, mask=torch.ones(1, 3))


def random_batch(generator, merge):
    """Return types, grids and mask of random rows, in the format of HunyuanVL's processor."""

    def randint(least, most):
        return int(torch.randint(least, most + 1, (), generator=generator))

    rows, grids = [], []
    for _ in range(randint(1, 3)):
        row = [0] * randint(1, 4)
        for _ in range(randint(0, 3)):
            h, w = (merge * randint(1, 4) + randint(0, merge - 1) for _ in range(2))
            grids.append([1, h, w])
            row += [1] * ((h // merge) * (w // merge + 1) + 2 * randint(0, 1)) + [0] * randint(1, 3)
        rows.append(row)
    longest = max(map(len, rows)) + randint(0, 2)
    left = bool(randint(0, 1))
    padded = [[0] * (longest - len(r)) + r if left else r + [0] * (longest - len(r)) for r in rows]
    ones = [[1] * len(r) for r in rows]
    mask = [[0] * (longest - len(o)) + o if left else o + [0] * (longest - len(o)) for o in ones]
    return torch.tensor(padded), torch.tensor(grids, dtype=torch.long).reshape(-1, 3), torch.tensor(mask)


@cases("sections", [[4, 2, 1, 1], [2, 3, 3]])
def test_coordinates_and_tables_are_those_of_transformers(sections):
    module = pytest.importorskip("transformers.models.hunyuan_vl.modeling_hunyuan_vl")
    rope = {
        "rope_type": "dynamic",
        "factor": 1.0,
        "alpha": 1000.0,
        "rope_theta": 10000.0,
        "mrope_section": sections,
    }
    text = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 20, "rope_parameters": rope,
    }  # fmt: skip
    scheme = create_scheme("xdrope", sections=sections, layout="elementwise", image_index="batch")
    frequencies = inverse_frequencies(16, ntk_base(10000.0, 1000.0, 16))
    generator = torch.Generator().manual_seed(0)
    for merge in (1, 2, 3):
        vision = {"num_hidden_layers": 1, "spatial_merge_size": merge}
        config = module.HunYuanVLConfig(text_config=text, vision_config=vision)
        with torch.device("meta"):
            model = module.HunYuanVLModel(config)
        rotary = module.HunYuanVLRotaryEmbedding(config.text_config)
        for _ in range(12):
            types, grids, mask = random_batch(generator, merge)
            theirs, deltas = model.get_rope_index(types, types, grids if len(grids) else None, mask)
            changed, images = newline_images(types, grids, merge=merge, mask=mask)
            result = scheme.coordinates(Stream.from_ids(changed, images, mask=mask))
            assert torch.equal(result.ids, theirs.double())
            assert torch.equal(result.delta("max"), deltas.double())
            cos, sin = rotary(torch.zeros(1), theirs)
            angle = angles(result.ids, frequencies, scheme.allocation(8))
            torch.testing.assert_close(angle.cos(), cos, rtol=0, atol=0)
            torch.testing.assert_close(angle.sin(), sin, rtol=0, atol=0)
