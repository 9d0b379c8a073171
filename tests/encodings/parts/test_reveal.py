"""Bands that open during training: closed form, no stale values, no recompilation, exact result at the end."""

import copy
import math
import pickle

import pytest
import torch

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.encodings.metadata import list_encodings
from vispe.encodings.parts.additive.fourier import ProgressiveBands, band_weights
from vispe.encodings.positions import set_progress
from vispe.encodings.registry import encoding_class
from vispe.errors import OptionError

DIM = 24
SPECS = [
    "sincos2d",
    "sincos2d(std=0.02)",
    "sincos3d",
    "sincos3d_points",
    "sincos3d_points(mlp=false)",
    "fourier",
    "fourier(project=true)",
    "fourier(learned=true,features=12)",
    "fourier(basis=octaves)",
    "fourier(basis=octaves,learned=true)",
    "fourier(basis=identity)",
    "fourier_learned",
    "fourier_learned(groups=2,features=8)",
    "neuda",
    "loope.static",
    "loope(context=none,class_token=origin)",
    "countdown",
    "countdown.ratio",
    "border",
    "ranked",
]
every = cases("spec", SPECS)


def built(spec, form, **facts):
    torch.manual_seed(0)
    joined = f"{spec[:-1]},reveal={form})" if spec.endswith(")") else f"{spec}(reveal={form})"
    return create_encoding(joined, **{"dim": DIM, "grid": (3, 4, 2)[: axes(spec)], **facts})


def axes(spec):
    return 3 if "3d" in spec else 2


def grid(spec):
    return Grid((3, 4, 2)[: axes(spec)], prefix=1)


def test_every_encoding_with_bands_is_tested():
    result = {n for n in list_encodings() if issubclass(encoding_class(n), ProgressiveBands)}
    assert result == {spec.partition("(")[0].partition(".")[0] for spec in SPECS}


@cases("count", [1, 2, 5, 12])
def test_weights_of_bands(count):
    for progress in (0.0, 0.1, 1 / 3, 0.5, 0.999, 1.0):
        linear = [min(max(progress * count - k, 0), 1) for k in range(count)]
        torch.testing.assert_close(band_weights(count, progress), torch.tensor(linear, dtype=torch.float64))
        cosine = [(1 - math.cos(math.pi * g)) / 2 for g in linear]
        result = band_weights(count, torch.tensor(progress, dtype=torch.float64), "cosine")
        torch.testing.assert_close(result, torch.tensor(cosine, dtype=torch.float64))
    for form in ("linear", "cosine"):
        assert torch.equal(band_weights(count, 1.0, form), torch.ones(count, dtype=torch.float64))
        assert not band_weights(count, 0.0, form).any()


@every
@cases("form", ["linear", "cosine"])
def test_the_end_equals_no_reveal_bit_for_bit(spec, form):
    encoding, plain = built(spec, form).eval(), built(spec, "none").eval()
    pos, image = grid(spec).positions(), torch.rand(1, 3, 24, 32)
    expected = plain.table(pos, image)
    assert torch.equal(encoding.table(pos, image), expected)  # before anything is said
    for progress in (0.0, 0.4, 1.0):
        set_progress(encoding, progress)
        assert encoding.progress == progress
        assert torch.equal(encoding.table(pos, image), expected) == (progress == 1.0)
    # as a plain attribute, too; what was stored with the positions is not stale
    encoding.progress = 0.4
    part = encoding.table(pos, image)
    assert not torch.equal(part, expected)
    assert torch.equal(part, encoding.table(grid(spec).positions(), image))
    for copied in (copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert copied.progress == 0.4
        assert torch.equal(copied.table(pos, image), part)
    assert encoding.state_dict().keys() == plain.state_dict().keys()
    set_progress(plain, 0.4)
    assert torch.equal(plain.table(pos, image), expected)


def test_sines_of_long_waves_come_first():
    encoding, plain = built("sincos2d", "linear"), built("sincos2d", "none")
    pos = Grid((3, 4)).positions()
    # 6 frequencies for each axis; of them 2.4 are open
    encoding.progress = 0.4
    gate = torch.tensor([0, 0, 0, 0.4, 1, 1])
    expected = plain.table(pos) * gate.repeat(4)
    torch.testing.assert_close(encoding.table(pos), expected)
    three = built("sincos3d(split=[2,1,1])", "linear")
    three.progress = 0.5
    full = built("sincos3d(split=[2,1,1])", "none").table(grid("3d").positions())
    gates = [torch.tensor(g).repeat(2) for g in ([0, 0, 0, 1.0, 1, 1], [0, 0.5, 1.0], [0, 0.5, 1.0])]
    torch.testing.assert_close(three.table(grid("3d").positions()), full * torch.cat(gates))


def test_interleaved_and_repeated_bands():
    pos = Grid((3, 4), prefix=1).positions()
    gate = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0.2, 1, 1, 1, 1])
    loope = built("loope.static(class_token=zero)", "linear")
    loope.progress = 0.35
    torch.testing.assert_close(
        loope.table(pos),
        built("loope.static(class_token=zero)", "none").table(pos) * gate.repeat_interleave(2),
    )
    for name, copies, count in (("border", 4, 3), ("ranked", 1, 12), ("countdown", 1, 12)):
        encoding = built(name, "linear")
        encoding.progress = 0.35
        weights = gate if count == 12 else torch.tensor([0, 0.05, 1])
        torch.testing.assert_close(
            encoding.table(pos), built(name, "none").table(pos) * weights.repeat(2 * copies)
        )
    points = built("sincos3d_points(mlp=false,features=8)", "linear")
    points.progress = 0.35
    weights = torch.tensor([0, 0, 0.4, 1]).repeat_interleave(2).repeat(3)
    points_pos = grid("3d").positions()
    full = built("sincos3d_points(mlp=false,features=8)", "none").table(points_pos)
    torch.testing.assert_close(points.table(points_pos), full * weights)


def test_fourier_features_open_by_the_length_of_their_waves():
    pos = Grid((3, 4)).positions()
    encoding = built("fourier", "linear")
    encoding.progress = 0.35
    length = encoding.frequency.norm(dim=1)
    gate = torch.tensor([min(max(0.35 * 12 - int((length < f).sum()), 0), 1) for f in length])
    torch.testing.assert_close(encoding.table(pos), built("fourier", "none").table(pos) * gate.repeat(2))
    octaves = built("fourier(basis=octaves)", "linear")  # 6 for each axis
    octaves.progress = 0.25
    weights = torch.tensor([1, 0.5, 0, 0, 0, 0]).repeat(4)
    torch.testing.assert_close(
        octaves.table(pos), built("fourier(basis=octaves)", "none").table(pos) * weights
    )
    with pytest.raises(OptionError, match="reveal='linear' has no effect with basis='none'"):
        built("fourier(basis=none)", "linear")


def test_levels_of_anchors():
    encoding, plain = built("neuda(levels=4)", "cosine"), built("neuda(levels=4)", "none")
    encoding.progress = 0.375
    positions = torch.rand(5, 2)
    gate = torch.cat([torch.ones(2), torch.tensor([1, 0.5, 0, 0]).repeat_interleave(4)])
    torch.testing.assert_close(encoding.features(positions), plain.features(positions) * gate)


@cases("spec", ["fourier(learned=true)", "fourier_learned", "neuda(levels=2)", "fourier"])
def test_gradients_of_closed_bands_are_zero(spec):
    encoding = built(spec, "linear", dim=8).double()
    encoding.progress = 0.6
    points = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(encoding.encode, (points,))
    encoding.progress = 0.0
    y = encoding.encode(points)
    y.backward(torch.randn_like(y))
    waves = [p for n, p in encoding.named_parameters() if n.startswith(("frequency", "anchors"))]
    assert all(not p.grad.any() for p in waves if p.grad is not None)


def test_cached_biases_follow_progress():
    torch.manual_seed(0)
    encoding = create_encoding(
        "positional_attention(table='sincos2d(reveal=linear)',pos_dim=8)", num_heads=2, grid=(3, 4)
    ).eval()
    pos = Grid((3, 4)).positions()
    with torch.no_grad():
        biases = []
        for progress in (0.0, 0.5, 1.0, 0.5):
            set_progress(encoding, progress)
            biases.append(encoding.bias(pos, 0).dense())
    assert torch.equal(biases[1], biases[3])
    assert not torch.equal(biases[0], biases[1])
    assert not torch.equal(biases[1], biases[2])


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["sincos2d", "fourier", "neuda", "fourier_learned", "border"])
def test_training_steps_do_not_recompile(spec):
    torch._dynamo.reset()
    encoding = built(spec, "linear")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def model(x):
        return encoding.embed(x, Grid((3, 4), prefix=1).positions())

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(2, 13, DIM)
    for step in range(12):
        set_progress(encoding, step / 11)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1
