"""bam against its definition: shapes of tails, locations, scales of axes, the start, and symmetries."""

import math

import pytest
import torch

from tests.cases import cases
from tests.encodings.bias import offsets
from vispe import Grid, create_encoding
from vispe.errors import OptionError, ShapeError


def defined(encoding):
    """Return the bias of every head at an offset, from the numbers of its parameters."""
    heads = range(encoding.num_heads)
    shape, scale = (p.detach().double().tolist() for p in (encoding.shape, encoding.scale))
    loc, stretch = (
        None if p is None else p.detach().double().tolist() for p in (encoding.loc, encoding.stretch)
    )

    def function(offset):
        out = []
        for h in heads:
            mu = [2 * math.sinh(x) for x in loc[h]] if loc else [0.0] * len(offset)
            factor = [math.exp(x) for x in stretch[h]] if stretch else [1.0] * len(offset)
            length = math.hypot(*(f * (d - m) for d, m, f in zip(offset, mu, factor, strict=True)))
            out.append(-((length + encoding.eps) ** max(shape[h], 0.0)) * math.exp(scale[h]))
        return out

    return function


def random_encoding(spec):
    encoding = offsets.create(spec)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return encoding


@cases("options", ["", "shape_init=linear", "shape_init=2", "scale_init=4,eps=0.1", "shape_init=0"])
def test_values(options):
    encoding = random_encoding(f"bam({options})")
    offsets.check_values(encoding, defined(encoding))


@cases("axes", [1, 2, 3])
def test_locations_and_scales_of_axes(axes):
    encoding = random_encoding(f"bam(train_loc=true,axis_scale=true,axes={axes},loc_init=0.4)")
    offsets.check_values(encoding, defined(encoding), [g for g in offsets.GRIDS if g.axes == axes])


@cases("spec", ["bam", "bam.offset", "bam(axis_scale=true,axes=2,shape_init=1.5)"])
def test_gradients_and_routes(spec):
    encoding = random_encoding(spec)
    offsets.check_routes(encoding, Grid((3, 4), 1))
    offsets.check_gradients(encoding, Grid((2, 3), 1))


def test_symmetries_and_the_torus():
    offsets.check_turned(offsets.create("bam(shape_init=linear)"))
    encoding = random_encoding("bam(train_loc=true,axes=2,wrap=true)")
    dense = encoding.bias(Grid((3, 4)).positions(), 0).dense().reshape(3, 3, 4, 3, 4)
    torch.testing.assert_close(dense.roll((1, 2, 1, 2), (1, 2, 3, 4)), dense)


def test_it_starts_as_alibi():
    pos = Grid((4, 3), 1).positions()
    alibi = create_encoding("alibi2d.local(slopes=alibi)", num_heads=6).bias(pos, 0).dense()
    torch.testing.assert_close(
        create_encoding("bam", num_heads=6).bias(pos, 0).dense(), alibi, rtol=0, atol=1e-4
    )


def test_a_shape_below_zero_acts_as_zero_and_learns():
    encoding = offsets.create("bam")
    with torch.no_grad():
        encoding.shape.fill_(-0.5)
    dense = encoding.bias(Grid((2, 3)).positions(), 0).dense()
    torch.testing.assert_close(dense, -encoding.scale.exp()[:, None, None].expand(1, 3, 6, 6))
    dense.sum().backward()
    assert (encoding.shape.grad != 0).all()


def test_fixed_parameters_are_buffers():
    encoding = offsets.create("bam.gaussian(loc_init=0.5,axes=2)")
    assert [n for n, _ in encoding.named_parameters()] == ["scale"]
    assert [n for n, _ in encoding.named_buffers()] == ["shape", "loc"]
    assert set(encoding.state_dict()) == {"shape", "scale", "loc"}


def test_a_vit():
    offsets.check_vit("bam.offset")


@cases(
    ("options", "message"),
    [
        ("train_loc=true", "bam needs axes, the number of grid axes, .* Use axes=2"),
        ("axis_scale=true", "bam needs axes"),
        ("loc_init=1", "bam needs axes"),
        ("axes=2,spacing=[1]", r"spacing needs one number for each of 2 axes, got spacing=\[1\]"),
        ("shape_init=steep", "shape_init .*number of 0 or more, or linear, got"),
        ("scale_init=0", "scale_init .* got"),
        ("eps=0", "eps needs a number above 0"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(f"bam({options})", num_heads=2)


def test_other_axes_are_refused():
    with pytest.raises(ShapeError, match=r"bam needs 2-axis positions, got 1 axis .*\. Use bam\(axes=1\)"):
        offsets.create("bam.offset").bias(Grid((5,)).positions(), 0)
