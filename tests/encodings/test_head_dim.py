"""Heads whose width is not dim / num_heads."""

import inspect

import pytest
import torch

import vispe
from tests.cases import cases
from tests.encodings.test_conformance import PROMISED
from vispe.encodings.base import Biased, Rotary
from vispe.encodings.registry import encoding_class
from vispe.errors import OptionError

INSIDE = [n for n in vispe.list_encodings() if issubclass(encoding_class(n), Biased | Rotary)]
# dim, heads, head width: wider and narrower heads, and a dim that the heads do not divide
SIZES = [(12, 3, 12), (36, 3, 8), (16, 4, 12)]
SHAPES = {1: (7,), 2: (3, 4), 3: (2, 3, 2)}


@cases("sizes", SIZES, ids=str)
@cases("name", INSIDE)
def test_attention_with_head_dim(name, sizes):
    dim, heads, width = sizes
    axes = encoding_class(name).ndim
    shape = SHAPES[2 if 2 in axes else max(axes)]
    facts = {"dim": dim, "num_heads": heads, "head_dim": width, "depth": 2, "grid": shape}
    encoding = vispe.create_encoding(PROMISED.get(name, name), **facts)
    shape = shape if len(shape) in encoding.ndim else SHAPES[max(encoding.ndim)]
    layer = vispe.Attention(dim, heads, encoding, head_dim=width)
    x = torch.randn(2, vispe.Grid(shape).tokens, dim, requires_grad=True)
    y = layer(x, vispe.Grid(shape, reference=shape))
    assert y.shape == x.shape
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert vispe.create_encoding(encoding.config).config == encoding.config


def test_dim_must_be_a_multiple_only_where_tokens_are_split():
    vispe.Attention(10, 4, "rope_axial", head_dim=8)(torch.randn(1, 6, 10), (2, 3))
    for name in ("tpe2d", "selective_rope"):
        with pytest.raises(OptionError, match=f"{name} needs dim to be a multiple of num_heads, got dim=10"):
            vispe.create_encoding(name, dim=10, num_heads=4, head_dim=8)


def test_xlnet_of_four_heads_of_six_channels():
    encoding = vispe.create_encoding("transformer_xl.xlnet", dim=12, num_heads=4, head_dim=6)
    assert {n: tuple(p.shape) for n, p in encoding.named_parameters()} == {
        "r": (12, 4, 6),
        "r_w_bias": (4, 6),
        "r_r_bias": (4, 6),
    }


def test_the_default_head_dim_is_not_part_of_the_config():
    encoding = vispe.create_encoding("rope_axial", dim=32, num_heads=4, head_dim=8)
    assert encoding.config == vispe.create_encoding("rope_axial", dim=32, num_heads=4).config
    assert "head_dim" not in vispe.create_encoding("rope_axial", dim=32, num_heads=4, head_dim=16).spec


def test_errors():
    with pytest.raises(OptionError, match="rope_axial has head_dim=16 but the model has head_dim=8"):
        vispe.Attention(32, 4, "rope_axial(head_dim=16)")
    encoding = vispe.create_encoding("rope_axial", dim=32, num_heads=4)
    with pytest.raises(OptionError, match="rope_axial has head_dim=8 but the model has head_dim=16"):
        vispe.Attention(32, 4, encoding, head_dim=16)
    with pytest.raises(OptionError, match="Choose another num_heads, or pass head_dim"):
        vispe.Attention(10, 4)


def test_every_encoding_that_checks_head_dim_accepts_it():
    for name in INSIDE:
        cls = encoding_class(name)
        if "_resolve_head_dim" in inspect.getsource(cls):
            assert "head_dim" in inspect.signature(cls).parameters, name
