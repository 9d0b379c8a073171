"""Scaled positions of images and videos: exact in every scheme; text continues after the scaled step."""

import pytest
import torch

from tests.cases import cases
from vispe.errors import InputError, ShapeError, UnsupportedCombination
from vispe.multimodal import Image, Stream, Text, Video, alternating, create_scheme, list_schemes, modix
from vispe.multimodal.concatenated_scheme import ConcatenatedScheme
from vispe.multimodal.streams.visual_tokens import VisualTokens

ROWS = [[Text(3), Image(2, 3), Text(2), Video(3, 2, 2), Text(4)], [Image(4, 2), Text(1)]]
NAMES = [name for name in list_schemes() if name != "bilevel"]


def recurrence(kinds, steps):
    """Return the positions p[i + 1] = p[i] + step of the modality of token i."""
    positions = [0.0]
    for kind in kinds[:-1]:
        positions.append(positions[-1] + steps[kind])
    return positions


def test_a_single_position_follows_the_step_of_the_previous_token():
    coordinates = create_scheme("rope1d").coordinates(Stream.of(ROWS).scaled([0.25, 0.5, 3]))
    kinds = "ttt" + "a" * 6 + "tt" + "b" * 12 + "tttt"
    steps = {"t": 1.0, "a": 0.25, "b": 0.5}
    assert coordinates.ids[0, 0].tolist() == recurrence(kinds, steps)
    assert coordinates.ids[0, 1, :9].tolist() == recurrence("c" * 8 + "t", {"c": 3.0, "t": 1.0})
    assert coordinates.next.tolist() == [3 + 1.5 + 2 + 6 + 4, 25]


@cases("name", NAMES)
def test_a_scale_of_one_changes_nothing(name):
    scheme, stream = create_scheme(name), Stream.of(ROWS)
    plain, scaled = scheme.coordinates(stream), scheme.coordinates(stream.scaled(1))
    assert torch.equal(plain.ids, scaled.ids)
    assert torch.equal(plain.next, scaled.next)


@cases("name", [name for name in NAMES if name not in ("v2pe", "ppe")])
def test_the_layout_of_an_image_and_its_step_are_multiplied(name):
    scheme, stream = create_scheme(name), Stream.of([[Text(3), Image(4, 6), Text(2)]])
    plain, scaled = scheme.coordinates(stream), scheme.coordinates(stream.scaled(0.375))
    assert torch.equal(plain.ids[..., :3], scaled.ids[..., :3])
    tokens = VisualTokens(stream.blocks, torch.ones(24, dtype=torch.long), torch.arange(24))
    start = scheme.moved(
        torch.zeros(scheme.axes, 24, dtype=torch.float64), torch.full((24,), 3 * scheme.step).double(), tokens
    )
    image = slice(3, 27)
    torch.testing.assert_close(scaled.ids[:, 0, image] - start, 0.375 * (plain.ids[:, 0, image] - start))
    before, step = (5 * scheme.step, plain.next - 5 * scheme.step)
    torch.testing.assert_close(scaled.next, before + 0.375 * step)
    torch.testing.assert_close(
        scaled.ids[..., 27:], scheme.continue_text(torch.arange(-2, 0)[None], scaled.next)
    )


def test_a_scaled_v2pe_has_another_stride():
    stream = Stream.of([[Text(3), Image(4, 6), Text(2)]])
    scaled = create_scheme("v2pe").coordinates(stream.scaled(0.25))
    other = create_scheme("v2pe(stride=4)").coordinates(stream)
    assert torch.equal(scaled.ids, other.ids)
    assert torch.equal(scaled.next, other.next)


def test_merged_tokens_have_scaled_positions():
    stream = Stream.of([[Text(1), Image(2, 2), Text(1)]]).scaled(0.5)
    ids = create_scheme("ppe(k=2)").coordinates(stream).ids
    assert torch.equal(ids[::2], create_scheme("mrope").coordinates(stream).ids)


def test_layers_with_different_schemes():
    both = ConcatenatedScheme(alternating(["circlerope", "mrope"], 4))
    stream = Stream.of(ROWS).scaled(0.5)
    parts = [create_scheme(name).coordinates(stream).ids for name in ("circlerope", "mrope")]
    assert torch.equal(both.coordinates(stream).ids, torch.cat(parts))


def test_a_scale_may_be_a_function_and_is_multiplied():
    stream, calls = Stream.of(ROWS), []

    def scale(of):
        calls.append(of)
        return torch.tensor([0.5, 2.0, 1.0])

    scaled = stream.scaled(scale).scaled(2)
    assert calls == [stream]
    expected = [1.0] * 5 + [1.0, 1.0]
    expected[1], expected[3], expected[5] = 1.0, 4.0, 2.0
    assert scaled.blocks.scale.tolist() == expected
    assert stream.blocks.scale is None


def test_tiles_of_an_image_have_one_scale():
    stream = Stream.of([[Image(2, 2, (1, 2), "last"), Text(1), Image(1, 1)]]).scaled([0.5, 0.25])
    assert stream.blocks.scale.tolist() == [0.5, 0.5, 0.5, 1, 0.25]


def test_wrong_scales():
    stream = Stream.of(ROWS)
    with pytest.raises(
        ShapeError, match=r"scale needs one value for each of 3 visual segments, got the shape \(2,\)"
    ):
        stream.scaled([1, 2])
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="scale must be finite and above 0, got"):
            stream.scaled(value)
    with pytest.raises(UnsupportedCombination, match=r"does not support Stream\.scaled"):
        create_scheme("bilevel").coordinates(stream.scaled(2))


def test_text_is_not_scaled():
    stream = Stream.of([[Text(5)]])
    assert torch.equal(
        create_scheme("mrope").coordinates(stream.scaled(0.5)).ids,
        create_scheme("mrope").coordinates(stream).ids,
    )


def contribution(variance, other, other_count, alpha, eps):
    """Return the contribution of a modality by the equations of MODIX, before the normalisation of C."""
    entropies, alignments = [], []
    for tokens, others in ((variance, other), (other, variance)):
        mean = sum(tokens) / len(tokens)
        covariance = sum(torch.outer(e - mean, e - mean) for e in tokens) / len(tokens)
        eigenvalues = torch.linalg.eigvalsh(covariance + eps * torch.eye(len(mean), dtype=torch.float64))
        entropies.append(0.5 * eigenvalues.log().sum())
        cosines = [[a @ b / (a.norm() * b.norm()) for b in others] for a in tokens]
        alignments.append(sum(max(row) for row in cosines) / len(tokens))
    intra, inter = entropies[other_count] / sum(entropies), alignments[other_count] / sum(alignments)
    return float(intra**alpha * inter ** (1 - alpha))


@cases("alpha", [0.5, 0.0, 1.0, 0.3])
def test_modix_follows_its_equations(alpha):
    generator = torch.Generator().manual_seed(3)
    stream = Stream.of([*ROWS, [Text(9)]], padding="left")
    for channels in (4, 40):
        embeddings = torch.randn(*stream.shape, channels, generator=generator) + 0.5
        values = []
        for row, visual in ((0, [*range(3, 9), *range(11, 23)]), (1, range(8))):
            tokens = embeddings[row][stream.mask[row]].double()
            parts = [[t for i, t in enumerate(tokens) if (i in visual) == which] for which in (False, True)]
            c = [contribution(*parts, other_count, alpha, 1e-6) for other_count in (0, 1)]
            values += [c[0] / c[1]] * (2 - row)
        assert modix(embeddings, alpha=alpha)(stream).tolist() == pytest.approx(values, rel=1e-6)
    ids = create_scheme("mrope").coordinates(stream.scaled(modix(embeddings, alpha=alpha))).ids
    torch.testing.assert_close(ids, create_scheme("mrope").coordinates(stream.scaled(values)).ids)


def test_modix_of_packed_samples_equals_separate_ones():
    generator = torch.Generator().manual_seed(4)
    embeddings = torch.randn(1, 24, 6, generator=generator)
    first, second = [Text(3), Image(2, 3)], [Text(5), Image(2, 2), Text(2), Image(2, 2)]
    packed = modix(embeddings)(Stream.of([[first, second]]))
    assert packed[0] == modix(embeddings[:, :9])(Stream.of([first]))[0]
    assert packed[1:].tolist() == modix(embeddings[:, 9:])(Stream.of([second])).tolist()


def test_wrong_input_of_modix():
    stream = Stream.of([[Text(3), Image(2, 3)]])
    with pytest.raises(ShapeError, match=r"needs the shape \(1, 9, 'd'\) of the stream, got \(1, 8, 4\)"):
        stream.scaled(modix(torch.ones(1, 8, 4)))
    with pytest.raises(InputError, match="each sample with images needs text"):
        Stream.of([[Image(2, 2)]]).scaled(modix(torch.ones(1, 4, 4)))
    tokens = torch.randn(1, 9, 2, generator=torch.Generator().manual_seed(0)).abs()
    tokens[:, 3:] *= 1e4
    with pytest.raises(InputError, match="the entropies of text and images must have the same sign, got -"):
        stream.scaled(modix(tokens))
    opposed = torch.tensor([[1.0, 0.0]] + [[-1.0, 0.0]] * 2 + [[1.0, 0.0]] * 6)[None]
    with pytest.raises(
        InputError, match=r"alignments of text and images must have the same sign, got -0\.333333"
    ):
        stream.scaled(modix(opposed, alpha=0.5))


@cases("scale", [True, "2", None, 1j, [[1.0], [1.0, 2.0]]])
def test_scales_that_are_not_numbers_raise(scale):
    with pytest.raises(InputError, match="scale needs a number, or one for each visual segment, got"):
        Stream.of(ROWS).scaled(scale)
