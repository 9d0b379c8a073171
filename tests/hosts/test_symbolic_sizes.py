"""Models compiled or exported with symbolic height and width equal eager ones at sizes that were not traced.

Every parameter is moved from its start, as training does: a table of zeros hides how it is resampled. Numbers are
compared at sizes that were not traced, since programs of ONNX have no guards.

The whole table, every spec in each of the three ways, takes more than an hour on one core; VISPE_EVERY=1 in the
environment selects it. Otherwise the long tests take every encoding in one of the ways, and a part of presets and sums.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import vispe
from tests.hosts.helpers import EVERY, RELEASE, close, grads, image, shake, tiny
from vispe import Grid
from vispe.encodings.base import Additive
from vispe.encodings.parts.additive import gilbert_curve
from vispe.encodings.parts.additive.gilbert_curve import curve_order, traced_indices

DOCS = Path(__file__).parents[2] / "docs/how-to/models/hosts.md"
SIZES = ((32, 32), (40, 56), (56, 40), (72, 64))  # the grid of the model, the traced one, transposed, larger
TRACED = SIZES[1]

# specs that one of 'export', 'onnx' and 'compile' refuses with symbolic sizes, with the reason; hosts.md lists them
EXCEPTIONS: dict[tuple[str, str], str] = {}

OPTIONS = {"rfs": "rfs(reach=28)", "randomized": "randomized(reach=28)"}
SAMPLERS = vispe.list_encodings(kind="positions")
SINGLE = vispe.list_encodings(ndim=2, exclude=SAMPLERS)
ONE_AXIS = ("carope.scan", "distance_bank.inkling", "fire.causal", "fope.text", "selective_rope.scan")
PRESETS = vispe.list_encodings("*.*", exclude=(*ONE_AXIS, "alibi3d.dinosaw"))
BIASES = vispe.list_encodings(kind="bias", ndim=2)
# two kinds of logits in place of the product cannot be added
SUMS = [f"{a}+{b}" for a, b in pairwise([*BIASES, BIASES[0]])]
# a common shift changes absolute encodings only
SUMS += [
    f"{OPTIONS.get(s, s)}+{'sincos2d' if s == 'shift' else ('alibi2d', 'rope_axial')[i % 2]}"
    for i, s in enumerate(SAMPLERS)
]
SUMS += ["learn+alibi2d", "learn+rpb", "rpb.beit+shaw.values", "rope_mixed+rpb", "sincos2d+rpb"]
VARIANTS = [
    "rpb(resample=bicubic)",
    "shaw(resample=bicubic)",
    "learned(resample=nearest)",
    "loope(rescale=true)",
]
VARIANTS += [
    "alibi2d(slopes=learned,wrap=true,normalize=max)",
    "learned(resample=linear)",
    "learned(resample=tile)",
]
VARIANTS += [
    "rope_axial(schedule=yarn)",
    "rope_axial(schedule=ntk,logit_scale=log_length)",
    "loope(start=even)",
]
SPECS = [*SINGLE, *PRESETS, *SUMS, *VARIANTS]
# for causal sequences only, not exported here; ONNX has no triangular solve, which path needs
CAUSAL = {"path", "xpos"}
OTHER_AXES = {
    1: ["alibi", "grape_path", *ONE_AXIS],
    3: ["alibi3d", "alibi3d.dinosaw", "sincos3d", "sincos3d_points", "rpb", "shaw"],
}


def chosen(way: int) -> list[str]:
    """Return the specs for one way of the long tests: the full table, or a sample with every encoding once."""
    if EVERY:
        return SPECS
    return [*SINGLE[way::3], *SPECS[len(SINGLE) :][3 * way :: 18]]


def model_of(spec: str) -> nn.Module:
    """Return a converted ViT with all parameters changed from their initial values, or skip unsupported specs."""
    stock = tiny(img_size=(32, 32), dynamic_img_size=True, depth=1)
    try:
        model = shake(vispe.convert(stock, spec), 1).eval()
        with torch.no_grad():
            model(image(1, 3, 32, 32))  # some sums are refused by attention, which sees their forms
        return model
    except vispe.VispeError as error:
        if "+" not in spec:
            raise
        pytest.skip(str(error))


def compare(run, model: nn.Module, inputs) -> None:
    for x in inputs:
        with torch.no_grad():
            expected = model(x).numpy()
        np.testing.assert_allclose(run(x), expected, rtol=1e-4, atol=2e-5 * abs(expected).max())


def check_export(spec: str) -> None:
    model = model_of(spec)
    free = {2: 8 * Dim("h", min=2, max=16), 3: 8 * Dim("w", min=2, max=16)}
    free[0] = Dim("b", min=1, max=8)
    program = torch.export.export(model, (image(2, 3, *TRACED),), dynamic_shapes=(free,)).module()
    compare(
        lambda x: program(x).detach().numpy(),
        model,
        [image(b, 3, *size) for b, size in zip((1, 2, 3, 2), SIZES, strict=True)],
    )


def onnx_session(model: nn.Module, x: torch.Tensor, path: Path, free: dict):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False, dynamic_shapes={"x": free})
    session = runtime.InferenceSession(path)
    return lambda x: session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def check_onnx(spec: str, path: Path) -> None:
    model = model_of(spec)
    run = onnx_session(model, image(2, 3, *TRACED), path / "model.onnx", {2: Dim.AUTO, 3: Dim.AUTO})
    compare(run, model, [image(2, 3, *size) for size in SIZES])


def check_compiled(spec: str, backend: str) -> None:
    torch._dynamo.reset()
    model = model_of(spec)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=backend)
    for size in SIZES[1:]:
        x = image(2, 3, *size)
        close(compiled(x), model(x))
        close(
            grads(model, compiled(x), drop="none of them"), grads(model, model(x), drop="none of them"), 1e-4
        )


def skip_exception(mode: str, spec: str) -> None:
    if "learn+" in spec and RELEASE < (1, 0, 31):
        pytest.skip("this timm fixes the size of its own absolute table in an export")
    if (mode, spec) in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[mode, spec])


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("spec", chosen(0))
def test_exported(spec):
    skip_exception("export", spec)
    check_export(spec)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("spec", chosen(1))
def test_onnx(spec, tmp_path):
    skip_exception("onnx", spec)
    check_onnx(spec, tmp_path)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("spec", chosen(2))
def test_compiled(spec):
    skip_exception("compile", spec)
    check_compiled(spec, "eager")


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["irpe", "shaw", "alibi2d(slopes=learned)+rpb"])
def test_compiled_backward(spec):
    check_compiled(spec, "aot_eager")


# a sum of functions, a table that the content reads; a resampled table with prefix values; a sum of tables
@pytest.mark.parametrize("spec", ["t5+bam", pytest.param("shaw", marks=pytest.mark.slow)])
def test_exported_sample(spec):
    check_export(spec)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_sample(tmp_path):
    check_onnx("rpb.beit", tmp_path)


@pytest.mark.slow
def test_compiled_sample():
    check_compiled("alibi2d+rpb", "eager")


@pytest.mark.parametrize(("mode", "spec"), EXCEPTIONS)
def test_exceptions_raise_with_a_message(mode, spec, tmp_path):
    checks = {"export": check_export, "compile": lambda s: check_compiled(s, "eager")}
    with pytest.raises(Exception, match=re.escape(EXCEPTIONS[mode, spec])):
        checks.get(mode, lambda s: check_onnx(s, tmp_path))(spec)


def test_the_documentation_lists_the_exceptions():
    text = " ".join(DOCS.read_text().split())
    actual = re.search(r"support dynamic height and width with every encoding, preset and sum(.*?)\.", text)
    assert actual, "hosts.md lists what can be exported with dynamic sizes"
    assert set(re.findall(r"`([^`]+)`", actual[1])) == {spec for _, spec in EXCEPTIONS}


def test_every_encoding_is_in_the_table():
    listed = [*(s for s in SPECS if "+" not in s), *OTHER_AXES[1], *OTHER_AXES[3]]
    singles = {s.partition("(")[0] for s in listed} | CAUSAL
    assert {*vispe.list_encodings(exclude=SAMPLERS), *vispe.list_encodings("*.*")} <= singles
    for name in BIASES:
        assert sum(name in spec.split("+") for spec in SUMS) >= 2


class Layer(nn.Module):
    """Encoding on a grid of 1 or 3 axes, with attention if the encoding needs it."""

    def __init__(self, spec: str, axes: int) -> None:
        super().__init__()
        grid = (4,) * axes
        self.encoding = vispe.create_encoding(spec, dim=24, num_heads=2, depth=1, grid=grid)
        inside = not isinstance(self.encoding, Additive)
        self.attention = vispe.Attention(24, 2, self.encoding) if inside else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return tokens (b, n, d) for a field (b, n_1, ..., d)."""
        where = Grid(tuple(x.shape[1:-1]))
        tokens = x.flatten(1, -2)
        if self.attention is None:
            return tokens + self.encoding.table(where.positions())
        return self.attention(tokens, where)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(("axes", "spec"), [(a, n) for a, names in OTHER_AXES.items() for n in names])
def test_encodings_of_one_and_three_axes(axes, spec, tmp_path):
    torch.manual_seed(0)
    model = shake(Layer(spec, axes)).eval()
    shapes = [(4, 4, 4)[:axes], (5, 6, 7)[:axes], (7, 5, 6)[:axes], (8, 9, 5)[:axes]]
    inputs = [torch.randn(2, *shape, 24) for shape in shapes]
    free = {i: Dim(f"n{i}", min=4, max=16) for i in range(1, axes + 1)}
    program = torch.export.export(model, (inputs[1],), dynamic_shapes=(free,)).module()
    compare(lambda x: program(x).detach().numpy(), model, inputs)
    compare(onnx_session(model, inputs[1], tmp_path / "model.onnx", free), model, inputs)


@pytest.mark.parametrize("start", ["width", "longer", "even"])
def test_the_curve_in_onnx_operations_equals_the_recursion(start):
    for shape in [(h, w) for h in range(1, 8) for w in range(1, 8)] + [(37, 14), (14, 37)]:
        actual = traced_indices(*shape, start, torch.device("cpu"))
        assert np.array_equal(actual.numpy(), curve_order(shape, start).ravel()), shape


def test_the_curve_is_nan_beyond_its_limit(monkeypatch):
    monkeypatch.setattr(gilbert_curve, "ROUNDS", 3)
    assert traced_indices(3, 3, "width", torch.device("cpu")).isfinite().all()
    assert traced_indices(20, 20, "width", torch.device("cpu")).isnan().all()
