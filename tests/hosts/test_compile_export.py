"""Compilation, export and ONNX equal eager mode; symbolic height and width: test_symbolic_sizes."""

import copy
import io

import numpy as np
import pytest
import torch
from torch.export import Dim

import vispe
from tests.hosts.helpers import close, grads, image, shake, tiny
from vispe.encodings.parts.rotary.skew_symmetric import exp_by_products, skew_matrix

pytestmark = pytest.mark.slow


def graphs(model, sizes) -> int:
    """Compile `model` without graph breaks, compare it with eager on `sizes`, return the number of compilations."""
    torch._dynamo.reset()
    compilations = []
    compiled = torch.compile(
        model, fullgraph=True, backend=lambda graph, _: compilations.append(graph) or graph.forward
    )
    for size in sizes:
        close(compiled(image(2, 3, *size)), model(image(2, 3, *size)))
    return len(compilations)


def test_compiled_equals_eager_on_several_grids_without_more_recompiles_than_stock():
    sizes = [(24, 40), (40, 24), (16, 64)]
    stock = tiny(dynamic_img_size=True, depth=1)
    most = graphs(stock, sizes)
    for spec in ("alibi2d", "alibi2d(slopes=learned)+learned"):
        assert graphs(vispe.convert(copy.deepcopy(stock), spec), sizes) <= most


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("spec", "checkpointing"), [("alibi2d", True), ("alibi2d(slopes=learned)+sincos2d", False)]
)
def test_compiled_training_equals_eager(spec, checkpointing):
    torch._dynamo.reset()
    eager = vispe.convert(tiny(), spec).train()
    model = copy.deepcopy(eager)
    model.set_grad_checkpointing(checkpointing)
    model.compile(fullgraph=True, backend="aot_eager")
    close(grads(model, model(image())), grads(eager, eager(image())))


def test_compiled_with_jitter_and_dropped_patches():
    torch._dynamo.reset()
    eager = vispe.convert(tiny(patch_drop_rate=0.4), "alibi2d(jitter=0.3)").train()
    compiled = torch.compile(eager, fullgraph=True, backend="eager")
    torch.manual_seed(3)
    expected = eager(image())
    torch.manual_seed(3)
    close(compiled(image()), expected)


@pytest.mark.compiles
@pytest.mark.parametrize("spec", ["alibi2d(slopes=learned)", "sincos2d+alibi2d"])
def test_exported_static_and_with_free_batch(spec):
    model = vispe.convert(tiny(), spec)
    program = torch.export.export(model, (image(),)).module()
    close(program(image()), model(image()))
    program = torch.export.export(model, (image(),), dynamic_shapes=({0: Dim("b", min=1, max=8)},)).module()
    close(program(image(5, 3, 24, 40)), model(image(5, 3, 24, 40)))


def test_export_leaves_no_fake_tensors_in_caches():
    model = vispe.convert(tiny(), "alibi2d")
    with torch.no_grad():
        expected = model(image())
    torch.export.export(model, (image(),))
    assert torch.equal(model(image()), expected)


def exported_to_onnx(model, x, path, **options):
    """Export a model and return a function that runs it on an image."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False, **options)
    session = runtime.InferenceSession(path)
    return lambda image: session.run(None, {"x": image.numpy()})[0]


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("spec", ["alibi2d", "alibi2d(slopes=learned)", "sincos2d", "loope", "comrope_ap"])
def test_onnx(spec, tmp_path):
    model = vispe.convert(tiny(depth=1), spec)
    run = exported_to_onnx(model, image(), tmp_path / "model.onnx")
    np.testing.assert_allclose(run(image()), model(image()).detach().numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("angle", [1e-3, 1.0, 50.0, 3000.0])
def test_exponentials_for_onnx_equal_torch(angle):
    upper = torch.randn(5, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * angle
    total = skew_matrix(upper, 8)
    torch.testing.assert_close(exp_by_products(total), torch.matrix_exp(total), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced():
    model = vispe.convert(tiny(), "alibi2d(slopes=learned)")
    traced = torch.jit.trace(model, image())
    close(traced(image(seed=2)), model(image(seed=2)))


# a mask that is filled window by window, and moves of the last axis
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("spec", ["alibi2d", "rpb", "fire", "gpsa", "liere", "dape", "fope", "loope.cells"])
def test_legacy_onnx_with_free_batch(spec):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, program = shake(vispe.convert(tiny(), spec), 1).eval(), io.BytesIO()
    free = {"x": {0: "batch"}}
    torch.onnx.export(model, (image(),), program, dynamo=False, input_names=["x"], dynamic_axes=free)
    session = runtime.InferenceSession(program.getvalue())
    x = image(3, 3, 24, 40, seed=2)
    actual = session.run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(actual, model(x).detach().numpy(), rtol=1e-3, atol=1e-4)
