"""Samplers on token streams: text has equal coordinates on all axes, decoding continues after the last position."""

import pytest
import torch

from tests.cases import cases
from vispe import create_encoding
from vispe.encodings.positions import set_progress
from vispe.errors import ShapeError, UnsupportedCombination
from vispe.multimodal import Image, Stream, Text, create_scheme, list_schemes
from vispe.multimodal.sampling import sampled

STREAM = Stream.of([[Text(3), Image(2, 3), Text(2)], [Image(3, 2), Text(1)]], padding="left")


@cases("scheme", list_schemes())
@cases("sampler", ["randomized(reach=64)", "rfs(reach=64)", "gaps(rate=0.5)", "increments"])
def test_order_and_equal_coordinates_are_preserved(scheme, sampler):
    before = create_scheme(scheme).coordinates(STREAM)
    if before.scheme.levels > 1:
        with pytest.raises(
            UnsupportedCombination, match=f"A sampler needs a scheme with one counter, got {scheme} with 2"
        ):
            sampled(before, create_encoding(sampler))
        return
    if float(before.ids[:, before.mask].min()) < 0:
        with pytest.raises(ShapeError, match="A sampler needs positions of 0 or more, got -"):
            sampled(before, create_encoding(sampler))
        return
    after, positions = sampled(before, create_encoding(sampler))
    replayed, _ = sampled(before, create_encoding(sampler), places=positions)
    assert torch.equal(after.ids, replayed.ids)
    assert torch.equal(after.next, replayed.next)
    for row in range(2):
        a, b = (
            before.ids[:, row][:, before.mask[row]].flatten(),
            after.ids[:, row][:, before.mask[row]].flatten(),
        )
        order = a.argsort(stable=True)
        steps, moves = a[order].diff(), b[order].diff()
        assert bool(((steps > 0) == (moves > 0)).all())  # equal stay equal, later stay later
        assert bool((after.next[row] > b.max()) == (before.next[row] > a.max()))
    assert torch.equal(after.ids[:, ~before.mask], before.ids[:, ~before.mask])


def test_decoding_continues_after_the_last_position():
    before = create_scheme("mrope").coordinates(STREAM)
    after, positions = sampled(before, create_encoding("rfs(reach=64)"))
    ahead = after.decode(3)
    torch.testing.assert_close(ahead[0].diff(dim=1), torch.ones(2, 2, dtype=torch.float64))
    torch.testing.assert_close(ahead[0, :, 0], after.next)
    assert bool((after.next > after.ids.amax((0, 2))).all())
    assert positions.shape[0] == 1
    per_sample, per_token = sampled(before, create_encoding("rfs(reach=64,per=sample)"))
    assert per_token.shape[0] == 2
    assert not torch.equal(per_sample.ids[0, 0], after.ids[0, 0])


def test_evaluation_seeds_and_errors():
    before = create_scheme("mrope").coordinates(STREAM)
    evaluated, _ = sampled(before, create_encoding("gaps").eval())
    assert evaluated is before
    sampler = create_encoding("rfs(reach=64)")
    set_progress(sampler, 0.5, seed=7)
    one, two = (sampled(before, sampler)[0].ids for _ in range(2))
    assert torch.equal(one, two)
    with pytest.raises(ShapeError, match=r"one number for each of \d+ positions, got \(1, 2\)"):
        sampled(before, sampler, places=torch.zeros(1, 2))
