"""Layers of encodings: values, random numbers and names equal those of torch, no class is one that tools replace."""

import json
from pathlib import Path

import torch
from torch import nn

from tests.cases import cases
from tests.encodings.test_conformance import SPECS, build
from vispe.encodings.parts.layers import EmbeddingTable, PreciseConv, PreciseLinear, PreciseNorm

PARAMETERS = json.loads((Path(__file__).parent / "parameters.json").read_text())
PAIRS = {
    "linear": (lambda: PreciseLinear(5, 3), lambda: nn.Linear(5, 3), (2, 5)),
    "linear without bias": (
        lambda: PreciseLinear(5, 3, bias=False),
        lambda: nn.Linear(5, 3, bias=False),
        (4, 2, 5),
    ),
    "conv1d": (lambda: PreciseConv(1, 4, 6, 3, groups=2), lambda: nn.Conv1d(4, 6, 3, groups=2), (2, 4, 7)),
    "conv2d": (
        lambda: PreciseConv(2, 4, 6, 3, 2, 1),
        lambda: nn.Conv2d(4, 6, 3, 2, 1),
        (2, 4, 7, 5),
    ),
    "conv3d": (
        lambda: PreciseConv(3, 2, 3, 3, padding=1, bias=False),
        lambda: nn.Conv3d(2, 3, 3, padding=1, bias=False),
        (1, 2, 3, 4, 5),
    ),
    "norm": (lambda: PreciseNorm(5, 1e-3), lambda: nn.LayerNorm(5, 1e-3), (2, 5)),
    "table": (lambda: EmbeddingTable(7, 3), lambda: nn.Embedding(7, 3), None),
}


@cases("name", PAIRS)
def test_values_and_random_numbers_are_those_of_torch(name):
    layers = []
    for build_layer in PAIRS[name][:2]:
        torch.manual_seed(0)
        layer = build_layer()
        first = {k: v.clone() for k, v in layer.state_dict().items()}
        layer.reset_parameters()
        layers.append((first, layer, torch.rand(())))
    (ours, layer, random), (theirs, stock, stock_random) = layers
    assert list(ours) == list(theirs)
    assert random == stock_random
    for key in ours:
        assert torch.equal(ours[key], theirs[key])
        assert torch.equal(layer.state_dict()[key], stock.state_dict()[key])
    if PAIRS[name][2] is not None:
        x = torch.randn(PAIRS[name][2])
        torch.testing.assert_close(layer(x), stock(x))


@cases("name", [n for n in PAIRS if n != "table"])
@cases("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_forward_is_in_float32_or_better(name, dtype):
    layer = PAIRS[name][0]().to(dtype)
    x = torch.randn(PAIRS[name][2])
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x.to(wide))
    assert result.dtype == wide
    stock = PAIRS[name][1]().double()
    stock.load_state_dict(layer.double().state_dict())
    torch.testing.assert_close(result.double(), stock(x.double()), rtol=1e-5, atol=1e-5)


@cases("spec", SPECS)
def test_no_weight_belongs_to_a_layer_of_torch(spec):
    """Tools that replace, wrap or re-initialise layers by class must not change the weights of an encoding."""
    layer_types = {type(m) for m in build(spec).modules() if any(True for _ in m.parameters(recurse=False))}
    allowed = {nn.ParameterList, nn.ParameterDict}
    assert not {c for c in layer_types - allowed if c.__module__.startswith("torch.")}


@cases("spec", PARAMETERS)
def test_names_and_shapes_of_weights_are_those_of_earlier_checkpoints(spec):
    assert {k: list(v.shape) for k, v in build(spec).state_dict().items()} == PARAMETERS[spec]
