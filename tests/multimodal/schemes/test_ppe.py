"""Merging tokens, and positions of several members of each cluster."""

import pytest
import torch

from tests.cases import cases
from vispe.attention import attention
from vispe.errors import InputError, OptionError, ShapeError
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Image, Stream, Text, Video, allocation, angles, create_scheme, rotation
from vispe.multimodal.schemes.ppe import reference_rotation, reference_sections
from vispe.multimodal.streams.token_merging import merge_tokens

KS = [1, 2, 3, 4, 5, 8]
MIXED = [[Text(4), Image(3, 4), Text(2), Video(2, 2, 3), Text(1)], [Text(3), Image(2, 5), Text(2)]]


def walk(tokens, labels, ids, members, axes, weights, epsilon):
    """Return merged tokens and positions of one sample, cluster by cluster."""
    out, positions, count = [], [], len(ids) // axes
    for cluster in range(max(labels) + 1):
        cluster_members = [n for n, label in enumerate(labels) if label == cluster]
        total = sum(weights[n] for n in cluster_members) + epsilon
        out.append(sum(weights[n] * tokens[n] for n in cluster_members) / total)
        picks = [
            cluster_members[len(cluster_members) - 1 - p % len(cluster_members)]
            for p in range(members // count)
        ]
        positions.append([ids[row, n] for row in range(len(ids)) for n in picks])
    return torch.stack(out), torch.tensor(positions, dtype=torch.float64).T


@cases("epsilon", [0.0, 1e-6, 0.5])
@cases(("members", "held", "axes"), [(1, 1, 3), (2, 1, 3), (5, 1, 1), (8, 2, 3), (6, 6, 2)])
def test_merging_against_a_walk_over_clusters(members, held, axes, epsilon):
    tokens, ids = (
        torch.randn(2, 30, 7, dtype=torch.float64),
        torch.randn(axes * held, 2, 30, dtype=torch.float64),
    )
    labels = torch.stack(
        [torch.cat([torch.randperm(6), torch.randint(6, (24,))])[torch.randperm(30)] for _ in range(2)]
    )
    weights = torch.rand(2, 30, dtype=torch.float64) + 0.1
    for arguments in (None, weights):
        merged = merge_tokens(
            tokens, labels, ids, members=members, axes=axes, weights=arguments, epsilon=epsilon
        )
        used = torch.ones(2, 30, dtype=torch.float64) if arguments is None else arguments
        for n in range(2):
            mean, positions = walk(
                tokens[n], labels[n].tolist(), ids[:, n], members, axes, used[n].tolist(), epsilon
            )
            torch.testing.assert_close(merged.tokens[n], mean, rtol=1e-12, atol=1e-12)
            assert torch.equal(merged.ids[:, n], positions)
            total = torch.zeros(6, dtype=torch.float64).index_add_(0, labels[n], used[n])
            torch.testing.assert_close(merged.weight[n], total)
        assert bool(merged.mask.all())


def test_worked_example():
    grid = Stream.of([[Text(7), Image(3, 4)]])
    ids = create_scheme("mrope").coordinates(grid).ids[..., 7:]
    labels = torch.tensor([[3, 3, 0, 3, 2, 1, 1, 3, 0, 1, 1, 0]])
    merged = merge_tokens(torch.randn(1, 12, 4), labels, ids, members=2)
    assert merged.ids[2:, 0, 0].tolist() == [9, 9, 10, 7]
    assert merged.ids[2:, 0, 2].tolist() == [8, 8, 7, 7]


def test_merging_in_stages_preserves_positions_and_means():
    tokens, ids = torch.randn(1, 12, 4, dtype=torch.float64), torch.arange(36.0).double().reshape(3, 1, 12)
    first = merge_tokens(tokens, torch.arange(12)[None] // 2, ids, members=2)
    second = merge_tokens(
        first.tokens, torch.arange(6)[None] // 3, first.ids, members=4, weights=first.weight
    )
    expected = tokens.unflatten(1, (2, 6)).mean(2)
    torch.testing.assert_close(second.tokens, expected, rtol=1e-12, atol=1e-12)
    assert second.weight.tolist() == [[6, 6]]
    # for each position that was stored, the last cluster of the stage before and the one before it
    for axis in range(3):
        rows = second.ids[4 * axis : 4 * axis + 4, 0, 1] - 12 * axis
        assert rows.tolist() == [11, 9, 10, 8]
    same = merge_tokens(first.tokens, torch.arange(6)[None] // 3, first.ids, members=2)
    assert same.ids[:2, 0, 1].tolist() == [11, 10]


def test_ignored_tokens_and_empty_clusters():
    tokens, ids = torch.randn(2, 4, 3), torch.arange(24.0).reshape(3, 2, 4)
    labels = torch.tensor([[0, -1, 1, 1], [-1, -1, 0, -1]])
    merged = merge_tokens(tokens, labels, ids, clusters=3)
    assert merged.mask.tolist() == [[True, True, False], [True, False, False]]
    assert merged.weight.tolist() == [[1, 2, 0], [1, 0, 0]]
    torch.testing.assert_close(merged.tokens[0, 1], tokens[0, 2:].mean(0))
    assert torch.equal(merged.tokens[0, 2:], torch.zeros(1, 3))
    assert torch.equal(merged.tokens[1, 0], tokens[1, 2])
    assert merged.ids[0].tolist() == [[0, 3, 0], [6, 0, 0]]


def test_other_labels_permute_the_columns():
    tokens, ids = torch.randn(1, 20, 3), torch.randn(3, 1, 20)
    labels, swap = torch.arange(20)[None] % 5, torch.randperm(5)
    one, two = (merge_tokens(tokens, x, ids, members=4) for x in (labels, swap[labels]))
    torch.testing.assert_close(one.tokens, two.tokens[:, swap])
    assert torch.equal(one.ids, two.ids[..., swap])


def test_only_members_get_gradients():
    tokens, labels = (
        torch.randn(1, 6, 2, dtype=torch.float64, requires_grad=True),
        torch.tensor([[0, 1, 0, -1, 0, 1]]),
    )
    ids, cotangent = torch.randn(3, 1, 6, dtype=torch.float64), torch.randn(1, 2, 2, dtype=torch.float64)
    merged = merge_tokens(tokens, labels, ids, members=2)
    assert not merged.ids.requires_grad
    (grad,) = torch.autograd.grad(merged.tokens, tokens, cotangent)
    share = torch.tensor([1 / 3, 1 / 2, 1 / 3, 0, 1 / 3, 1 / 2], dtype=torch.float64)
    torch.testing.assert_close(grad, cotangent[:, [0, 1, 0, 0, 0, 1]] * share[:, None])


def test_half_precision_is_averaged_in_float32():
    tokens = torch.randn(1, 4000, 3).bfloat16()
    merged = merge_tokens(tokens, torch.zeros(1, 4000, dtype=torch.long), torch.zeros(3, 1, 4000))
    assert merged.tokens.dtype == torch.bfloat16
    torch.testing.assert_close(
        merged.tokens[0, 0], tokens.float().mean((0, 1)).bfloat16(), rtol=0.01, atol=1e-4
    )


def test_wrong_arguments_of_merging():
    tokens, labels, ids = torch.randn(1, 4, 2), torch.zeros(1, 4, dtype=torch.long), torch.zeros(3, 1, 4)
    for change, error, text in (
        ({"labels": labels[:, :3]}, ShapeError, r"labels needs the shape \(1, 4\) of tokens, got \(1, 3\)"),
        ({"labels": labels.float()}, ShapeError, "labels needs integers, got torch.float32"),
        ({"tokens": tokens[0]}, ShapeError, r"tokens needs the shape \(b, n, c\)"),
        ({"ids": ids[:, 0]}, ShapeError, r"ids needs the shape \(rows, 1, 4\)"),
        ({"weights": torch.ones(4)}, ShapeError, r"weights needs the shape \(1, 4\)"),
        ({"members": 0}, OptionError, "members=0 positions of 3 coordinates cannot be made of the 3 rows"),
        (
            {"ids": torch.zeros(6, 1, 4), "members": 3},
            OptionError,
            "be a multiple of the positions that a token has, 2",
        ),
        ({"labels": labels + 5, "clusters": 5}, InputError, "labels must be below clusters=5"),
    ):
        with pytest.raises(error, match=text):
            merge_tokens(**{"tokens": tokens, "labels": labels, "ids": ids, **change})


@cases("options", [{}, {"spatial_reset": True, "stride": 2}, {"text_axes": "time"}])
@cases("k", KS)
def test_unmerged_tokens_have_coordinates_of_mrope(k, options):
    stream, freqs = Stream.of(MIXED, padding="left"), inverse_frequencies(32, 1e6)
    for in_turn, name in ((False, "mrope"), (True, "mrope_i")):
        plain = create_scheme(name, **options)
        expected = plain.coordinates(stream)
        for bands in ("chunked", "interleaved"):
            scheme = create_scheme("ppe", k=k, bands=bands, axes_in_turn=in_turn, **options)
            result = scheme.coordinates(stream)
            assert torch.equal(result.ids, expected.ids.repeat_interleave(k, 0))
            assert torch.equal(result.decode(3), expected.decode(3).repeat_interleave(k, 0))
            rotated = [
                angles(c.ids, freqs, s.allocation(16)) for c, s in ((result, scheme), (expected, plain))
            ]
            assert torch.equal(*rotated)


@cases("k", KS)
def test_clusters_of_one_token_change_nothing(k):
    stream, x = Stream.of(MIXED), torch.randn(2, 31, 6)
    scheme = create_scheme("ppe", k=k)
    before = scheme.coordinates(stream)
    labels = torch.where(stream.mask, torch.arange(31), -1)
    tokens, after = scheme.merge(before, x, labels)
    assert torch.equal(after.ids, before.ids)
    assert torch.equal(after.mask, before.mask)
    assert torch.equal(tokens[after.mask], x[stream.mask])
    assert torch.equal(after.decode(2), before.decode(2))


def test_bands_of_members():
    scheme = create_scheme("ppe", k=2, sections=(4, 6, 6))
    expected = [0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert scheme.allocation(16).tolist() == expected
    uneven = create_scheme("ppe", k=4, sections=(4, 6, 6)).allocation(16)
    assert uneven.tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 10, 10, 11]
    turns = create_scheme("ppe", k=2, sections=(4, 6, 6), bands="interleaved").allocation(16)
    assert turns.tolist() == [0, 1] * 2 + [2, 3] * 3 + [4, 5] * 3
    crossed = create_scheme("ppe", k=2, sections=(6, 5, 5), axes_in_turn=True).allocation(16)
    assert (crossed // 2).tolist() == allocation.interleaved((6, 5, 5)).tolist()
    assert crossed[crossed < 2].tolist() == [0] * 3 + [1] * 3
    assert torch.equal(create_scheme("ppe", k=1).allocation(64), create_scheme("mrope").allocation(64))


def test_a_merged_sequence_continues():
    scheme = create_scheme("ppe", k=2)
    stream = Stream.of([[Text(2), Image(2, 3), Text(1)], [Text(3), Image(1, 2)]], padding="left")
    x = torch.randn(2, 9, 4)
    labels = torch.tensor([[0, 1, 2, 3, 2, 3, 3, 2, 4], [-1, -1, -1, -1, 0, 1, 2, 3, 3]])
    tokens, merged = scheme.merge(scheme.coordinates(stream), x, labels)
    assert merged.mask.tolist() == [[True] * 5, [True] * 4 + [False]]
    torch.testing.assert_close(tokens[0, 2], x[0, [2, 4, 7]].mean(0))
    assert merged.ids[:, 0, 2].tolist() == [2, 2, 3, 2, 4, 4]  # tokens (1, 2) and (0, 2) of the image
    assert merged.ids[:, 0, 3].tolist() == [2, 2, 3, 3, 3, 2]  # tokens (1, 1) and (1, 0)
    assert merged.ids[:, 0, 4].tolist() == [5] * 6
    assert merged.decode(1)[..., 0].tolist() == [[6, 5]] * 6
    rotary = rotation(merged.ids, inverse_frequencies(16), scheme.allocation(8))
    q = torch.randn(2, 1, 5, 16)
    causal_mask = merged.mask[:, None, None, :] & torch.ones(5, 5, dtype=torch.bool).tril()
    assert attention(q, q, q, transform=rotary, attn_mask=causal_mask).shape == q.shape
    with pytest.raises(
        InputError, match=r"needs unmerged tokens, got merged ones. Use merge_tokens to merge them again"
    ):
        scheme.merge(merged, tokens, torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"ppe\(k=2\) needs 6 coordinates, got 3"):
        scheme.merge(create_scheme("mrope").coordinates(stream), x, labels)


@cases(("k", "sections"), [(1, (4, 6, 6)), (2, (4, 6, 6)), (4, (8, 12, 12)), (8, (16, 24, 24))])
def test_equals_the_reference_if_k_divides_sections(k, sections):
    pairs = sum(sections)
    ids, freqs, q = (
        torch.randn(3 * k, 1, 5) * 9,
        inverse_frequencies(2 * pairs),
        torch.randn(1, 2, 5, 2 * pairs),
    )
    scheme = create_scheme("ppe", k=k, sections=sections)
    rotary, theirs = (
        rotation(ids, freqs, scheme.allocation(pairs)),
        reference_rotation(ids, freqs, sections, k),
    )
    assert torch.equal(rotary.query(q), theirs.query(q))
    assert torch.equal(attention(q, q, q, transform=rotary), attention(q, q, q, transform=theirs))
    assert reference_sections(sections, k) == tuple(s // k for s in sections for _ in range(k))


def test_the_reference_does_not_rotate_text_if_k_does_not_divide_sections():
    sections, freqs, q = (4, 6, 6), inverse_frequencies(32), torch.randn(1, 1, 9, 32)
    text = torch.arange(9.0).expand(12, 1, 9)
    plain = rotation(text[:3], freqs, create_scheme("mrope").allocation(16))
    assert torch.equal(reference_rotation(text, freqs, sections, 4).query(q), plain.query(q))
    mixed = reference_rotation(torch.randn(12, 1, 9) * 5, freqs, sections, 4)
    assert not torch.allclose(mixed.query(q).norm(dim=-1), q.norm(dim=-1))  # no rotation
    assert reference_sections(sections, 4) == (1,) * 16


def test_wrong_options():
    for options, text in (
        ({"k": 0}, "ppe: k needs an integer above 0, got k=0"),
        ({"bands": "reference"}, "bands must be one of chunked, interleaved"),
        ({"axes_in_turn": 1}, "axes_in_turn is true or false"),
        ({"sections": (1, 2)}, "sections needs a list of 3 integers of 0 or more"),
    ):
        with pytest.raises(OptionError, match=text):
            create_scheme("ppe", **options)
