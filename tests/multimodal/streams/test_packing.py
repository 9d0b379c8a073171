"""Packed rows: attention masks, and packed samples equal to separate ones."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.cases import cases
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
    shared,
)
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, rotation

quick = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
NAMES = sorted(OPTIONS)


def image(mask):
    """Return a mask (s, s) as lines of ``x`` and ``.``."""
    return ["".join("x" if m else "." for m in row) for row in mask.tolist()]


def test_packed_samples_do_not_attend_to_each_other():
    mask = Stream.of([[[Text(2)], [Image(1, 2), Text(1)]]], "left", 6).attention_mask()
    assert mask.shape == (1, 1, 6, 6)
    assert mask.dtype == torch.bool
    assert image(mask[0, 0]) == ["......", ".x....", ".xx...", "...x..", "...xx.", "...xxx"]


def test_shared_runs_attend_to_the_prompt_and_themselves():
    mask = Stream.of([[Text(1), Text(2, shared=True), Text(1, shared=True), Text(1)]]).attention_mask()
    assert image(mask[0, 0]) == ["x....", "xx...", "xxx..", "x..x.", "x...x"]


def test_a_shared_run_after_an_image_and_inside_a_packed_row():
    rows = [[[Text(1), Text(1, shared=True)], [Image(1, 2), Text(1, shared=True), Text(1, shared=True)]]]
    mask = Stream.of(rows).attention_mask()
    assert image(mask[0, 0]) == ["x.....", "xx....", "..x...", "..xx..", "..xxx.", "..xx.x"]


@settings(quick, max_examples=15)
@given(data=st.data())
def test_attention_mask_pair_by_pair(data):
    rows = data.draw(batches((*EVERY, shared), largest=3))
    stream = Stream.of(rows, data.draw(st.sampled_from(["left", "right"])))
    assert torch.equal(stream.attention_mask(), oracle.visible(rows, stream.mask))


@settings(quick, max_examples=15)
@given(data=st.data())
def test_attention_mask_with_padding_inside(data):
    rows = [[joined(d) for d in row] if is_packed(row) else joined(row) for row in data.draw(batches(EVERY))]
    mask = data.draw(masks(rows))
    stream = Stream.from_ids(**ids_of(rows, mask, as_tensors=False))
    assert torch.equal(stream.attention_mask(), oracle.visible(rows, mask))


def pieces_of(ids, mask, rows):
    """Return the coordinates of each sample, (axes, tokens), row by row."""
    out = []
    for number, row in enumerate(rows):
        valid = ids[:, number, mask[number]]
        sizes = [sum(oracle.length_of(s) for s in d) for d in oracle.documents_of(row)]
        out += list(valid.split(sizes, -1))
    return out


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_a_packed_sample_has_the_coordinates_of_a_separate_one(name, data):
    scheme = create_scheme({"name": name, **data.draw(OPTIONS[name])})
    rows = data.draw(batches((*PIECES.get(name, EVERY), shared)))
    stream = Stream.of(rows)
    packed = scheme.coordinates(stream)
    samples = [d for row in rows for d in oracle.documents_of(row) if d]
    single = scheme.coordinates(Stream.of(samples, "left"))
    together = [p for p in pieces_of(packed.ids, stream.mask, rows) if p.shape[1]]
    pieces = pieces_of(single.ids, single.mask, samples)
    for a, b in zip(together, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9 if name == "circlerope" else 0)
    ends = [sum(bool(d) for r in rows[: i + 1] for d in oracle.documents_of(r)) - 1 for i in range(len(rows))]
    for row, end in enumerate(ends):
        if rows[row]:
            torch.testing.assert_close(packed.next[row], single.next[end], rtol=0, atol=1e-9)
        else:
            assert packed.next[row] == 0


SAMPLES = [
    [Text(3), Image(2, 3), Text(2)],
    [Video(2, 2, 1, 0.5), Text(4)],
    [Text(1), Image(1, 2, (1, 2), "last"), Text(3)],
]


def attend(q, k, v, rotated, mask):
    return torch.nn.functional.scaled_dot_product_attention(
        rotated.query(q), rotated.key(k), v, attn_mask=mask
    )


@cases("name", NAMES)
def test_attention_over_packed_rows_equals_that_of_separate_samples(name):
    """With the stream's mask; outputs and gradients of q, k and v."""
    scheme, pairs = create_scheme(name), 8
    frequencies = (100 ** (-torch.arange(pairs) / pairs)).float()
    axis = scheme.allocation(pairs, 4)
    stream = Stream.of([SAMPLES])
    n = stream.shape[1]
    q, k, v = (torch.randn(1, 4, n, 2 * pairs, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cotangent = torch.randn(1, 4, n, 2 * pairs, dtype=torch.float64)
    rotated = rotation(scheme.coordinates(stream).ids, frequencies, axis)
    packed = attend(q, k, v, rotated, stream.attention_mask())
    grads = torch.autograd.grad(packed, (q, k, v), cotangent)
    at = 0
    for sample in SAMPLES:
        sample_stream = Stream.of([sample])
        span = slice(at, at + sample_stream.shape[1])
        at += sample_stream.shape[1]
        rotated = rotation(scheme.coordinates(sample_stream).ids, frequencies, axis)
        arguments = [x[:, :, span].detach().requires_grad_() for x in (q, k, v)]
        expected = attend(*arguments, rotated, sample_stream.attention_mask())
        torch.testing.assert_close(packed[:, :, span], expected, rtol=0, atol=1e-6)
        single = torch.autograd.grad(expected, arguments, cotangent[:, :, span])
        for a, b in zip(grads, single, strict=True):
            torch.testing.assert_close(a[:, :, span], b, rtol=0, atol=1e-5)
    assert at == n


def test_answers_with_a_common_start_do_not_affect_each_other():
    """Each of several answers is encoded as if it followed the question directly, in either order."""
    scheme = create_scheme("mrope_i")
    question, answers = [Text(4), Image(2, 3), Text(1)], (Text(3, shared=True), Text(5, shared=True))
    frequencies = torch.rand(8)
    axis = scheme.allocation(8)
    x = torch.randn(3, 1, 2, 19, 16, dtype=torch.float64)
    outs = []
    for order in ((0, 1), (1, 0)):
        stream = Stream.of([[*question, *(answers[i] for i in order)]])
        positions = [torch.arange(11, 14), torch.arange(14, 19)]
        permutation = torch.cat([torch.arange(11), *(positions[i] for i in order)])
        rotated = rotation(scheme.coordinates(stream).ids, frequencies, axis)
        out = torch.empty_like(x[0])
        out[:, :, permutation] = attend(*x[:, :, :, permutation], rotated, stream.attention_mask())
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1])
    for i, positions in enumerate((slice(11, 14), slice(14, 19))):
        single = Stream.of([[*question, Text(answers[i].tokens)]])
        indices = torch.cat([torch.arange(11), torch.arange(positions.start, positions.stop)])
        rotated = rotation(scheme.coordinates(single).ids, frequencies, axis)
        expected = attend(*x[:, :, :, indices], rotated, single.attention_mask())
        torch.testing.assert_close(outs[0][:, :, indices], expected)


def test_segments_after_a_shared_run_start_at_its_start():
    coordinates = create_scheme("mrope").coordinates(Stream.of([[Text(2), Text(3, shared=True)]]))
    assert coordinates.ids[0, 0].tolist() == [0, 1, 2, 3, 4]
    assert coordinates.decode(2)[0, 0].tolist() == [2, 3]


def test_a_start_shifts_the_first_sample_of_a_row_only():
    rows = [[[Text(2)], [Image(1, 2)]], [[Text(1), Image(2, 1)]]]
    scheme = create_scheme("mrope")
    plain = scheme.coordinates(Stream.of(rows))
    shifted = scheme.coordinates(Stream.of(rows), start=torch.tensor([100, 7]))
    assert shifted.ids[0].tolist() == [[100, 101, 0, 0], [7, 8, 8, 0]]
    assert (shifted.ids - plain.ids)[1].tolist() == [[100, 100, 0, 0], [7, 7, 7, 0]]
    assert shifted.next.tolist() == [2, 10]
