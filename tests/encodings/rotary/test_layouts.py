"""Layouts of channel pairs: `interleaved` as in torch, ONNX and transformers, and the same scores in both layouts."""

import pytest
import torch

import vispe
from tests.cases import cases
from vispe import Grid
from vispe.attention.transform.pairs import PairRotation
from vispe.multimodal import to_half, to_interleaved

NAMES = [name for name in vispe.list_encodings() if "layout" in vispe.encoding_info(name).options]
CONTENT = ("carope", "selective_rope")  # need the tokens of a layer


def tables(pairs=8, tokens=5):
    """Return queries and keys (1, 2, tokens, 2 pairs), and angles (1, 1, tokens, pairs)."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 1, 2, tokens, 2 * pairs, generator=generator)
    return states, torch.randn(1, 1, tokens, pairs, generator=generator)


@cases(("layout", "interleaved"), [("half", 0), ("interleaved", 1)])
def test_the_rotation_equals_that_of_onnx(layout, interleaved):
    pytest.importorskip("onnx")
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    (q, _), angles = tables()
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"], interleaved=interleaved)
    kind = [helper.make_tensor_value_info(name, 1, None) for name in ("x", "cos", "sin", "y")]
    graph = helper.make_graph([node], "rotary", kind[:3], kind[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    feeds = {"x": q.numpy(), "cos": angles.cos()[0].numpy(), "sin": angles.sin()[0].numpy()}
    (expected,) = ReferenceEvaluator(model).run(None, feeds)
    actual = PairRotation(angles.cos(), angles.sin(), layout).query(q)
    torch.testing.assert_close(actual, torch.from_numpy(expected))


@cases(("layout", "module"), [("half", "llama"), ("interleaved", "cohere")])
def test_the_rotation_equals_that_of_transformers(layout, module):
    pytest.importorskip("transformers")
    from importlib import import_module

    apply = import_module(f"transformers.models.{module}.modeling_{module}").apply_rotary_pos_emb
    (q, k), angles = tables()
    wide = torch.cat([angles[0]] * 2, -1) if layout == "half" else angles[0].repeat_interleave(2, -1)
    expected = apply(q, k, wide.cos(), wide.sin())
    transform = PairRotation(angles.cos(), angles.sin(), layout)
    torch.testing.assert_close((transform.query(q), transform.key(k)), expected)


@pytest.mark.skipif(not hasattr(torch.nn, "RotaryEmbedding"), reason="torch has no nn.RotaryEmbedding")
def test_docs_of_torch_use_the_word_interleaved():
    import inspect

    assert "interleaved" in inspect.signature(torch.nn.RotaryEmbedding).parameters


@cases("name", [name for name in NAMES if name not in (*CONTENT, "self_extend", "pope")])
def test_layouts_differ_by_the_order_of_the_channels(name):
    (q, k), _ = tables(tokens=6)
    axes = max(vispe.encoding_info(name).ndim) if name == "xpos" else 2
    positions = Grid((2, 3) if axes == 2 else (6,)).positions()
    transforms = []
    for layout in ("half", "interleaved"):
        torch.manual_seed(0)
        options = {"causal": True} if name == "xpos" else {}
        encoding = vispe.create_encoding(name, dim=32, num_heads=2, layout=layout, **options).eval()
        transforms.append(encoding.transform(positions, 0))
    half, interleaved = transforms
    for method in ("query", "key"):
        x = q if method == "query" else k
        expected = to_interleaved(getattr(half, method)(to_half(x)))
        torch.testing.assert_close(getattr(interleaved, method)(x), expected)


def test_encodings_with_a_layout():
    assert set(NAMES) >= {"rope_axial", "rope_mixed", "rope_dinov3", "fope", "pope", "self_extend", *CONTENT}
    for name in NAMES:
        assert vispe.encoding_info(name).options["layout"] in ("half", "interleaved")
