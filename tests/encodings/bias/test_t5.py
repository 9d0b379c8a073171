"""t5 against its definition: buckets one by one, tables per axis and by distance."""

import math

import pytest
import torch

from tests.cases import cases
from tests.encodings.bias import offsets
from vispe import Grid, create_encoding
from vispe.encodings.bias.offsets.t5 import relative_buckets
from vispe.errors import OptionError, ShapeError


def bucket(distance, count, far):
    exact = count // 2
    if distance < exact:
        return int(distance)
    return min(count - 1, exact + int(math.log(distance / exact) / math.log(far / exact) * (count - exact)))


def relative(rel, count, far, causal=False):
    if causal:
        return bucket(max(-rel, 0), count, far)
    return bucket(abs(rel), count // 2, far) + (count // 2 if rel >= 1 else 0)


def random_encoding(spec):
    encoding = offsets.create(spec)
    with torch.no_grad():
        encoding.table.normal_()
    return encoding


def defined(encoding):
    table, count, far = encoding.table.detach().double(), encoding.num_buckets, encoding.max_distance

    def function(offset):
        if encoding.mode == "radial":
            return table[0, bucket(math.hypot(*offset), count, far)].tolist()
        return sum(table[a, relative(d, count, far, encoding.causal)] for a, d in enumerate(offset)).tolist()

    return function


@cases(("count", "far"), [(32, 128), (8, 5), (5, 3), (16, 20)])
def test_buckets(count, far):
    rel = [*range(-30, 31), 0.5, -0.5, 2.7, -3.2, 11.6]
    for causal in (False, True):
        result = relative_buckets(torch.tensor(rel), count, far, causal).tolist()
        assert result == [relative(r, count, far, causal) for r in rel]
        assert max(result) < count


def test_offsets_below_one_patch_have_the_bucket_of_offset_0():
    # bucket 16 is not trained on whole patches
    rel = torch.tensor([-0.9, -0.5, 0.0, 0.5, 0.9, 1.0, 1.5])
    assert relative_buckets(rel, 32, 128).tolist() == [0, 0, 0, 0, 0, 17, 17]


@cases("axes", [1, 2, 3])
@cases("mode", ["axial", "radial"])
def test_values(mode, axes):
    encoding = random_encoding(f"t5.{mode}(axes={axes},num_buckets=9,max_distance=6)")
    offsets.check_values(encoding, defined(encoding), [g for g in offsets.GRIDS if g.axes == axes])


def test_causal_values():
    encoding = random_encoding("t5(axes=1,causal=true,num_buckets=6,max_distance=5)")
    offsets.check_values(encoding, defined(encoding), [Grid((7,), 2), Grid((3,))])


@cases("mode", ["axial", "radial"])
def test_gradients_and_routes(mode):
    encoding = random_encoding(f"t5.{mode}(num_buckets=8,max_distance=5)")
    offsets.check_routes(encoding, Grid((3, 4), 1))
    offsets.check_gradients(encoding, Grid((2, 3), 1))


def test_distances_are_invariant_to_rotation():
    offsets.check_turned(random_encoding("t5.radial"))


def test_initial_bias_is_zero():
    assert not offsets.create("t5").bias(Grid((3, 4), 1).positions(), 0).dense().any()
    assert offsets.create("t5(std=0.5)").table.std() > 0.1


def test_a_vit():
    offsets.check_vit("t5")


@cases(
    ("options", "message"),
    [
        ("causal=true", "causal=True counts steps back along 1 axis, got axes=2, mode='axial'. Use axes=1"),
        ("causal=true,axes=1,mode=radial", "got axes=1, mode='radial'"),
        ("num_buckets=3", "t5 needs num_buckets of 4 or more and max_distance above their 0 exact buckets"),
        ("max_distance=8", "above their 8 exact buckets, got num_buckets=32, max_distance=8"),
        ("mode=radial,max_distance=16", "t5 needs num_buckets of 2 or more .* 16 exact buckets"),
        ("axes=4", "axes needs an integer from 1 to 3"),
        ("spacing=[1]", "spacing needs one number for each of 2 axes"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(f"t5({options})", num_heads=2)


def test_other_axes_are_refused():
    with pytest.raises(ShapeError, match=r"t5 needs 2-axis positions, got 3 axes .*\. Use t5\(axes=3\)"):
        offsets.create("t5").bias(Grid((2, 2, 2)).positions(), 0)
