"""torch.func transforms, forward mode, second derivatives of fused operators. `test_interpreter` runs this file."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.differentiation import BACKWARD, FAMILIES, FORWARD, REVERSE, inputs
from vispe import attention
from vispe.attention import Chain, PairRotation, use_backend
from vispe.errors import BackendUnavailable

FUSED = [name for name in FAMILIES if name != "rotation"]


def _arguments(family):
    parameter, arguments = FAMILIES[family]
    return arguments(parameter)


class Operators(TorchDispatchMode):
    """Names of the operators of vispe that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "vispe":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("name", FORWARD | REVERSE)
def test_transforms_are_refused(name, family):
    q, k, v = inputs()
    arguments = _arguments(family)
    expected = (
        "there is no forward-mode derivative" if name in FORWARD else "transforms .* are not implemented"
    )
    with pytest.raises(
        BackendUnavailable, match=rf"backend='triton' does not support this call: .*{expected}"
    ):
        (FORWARD | REVERSE)[name](lambda x: attention(x, k, v, backend="triton", **arguments), q)


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_passes_are_refused(name, family):
    q, k, v = inputs()
    arguments = _arguments(family)
    match = "no second derivative" if name == "double backward" else "no forward-mode derivative"
    with pytest.raises(
        BackendUnavailable, match=rf"attention: the fused kernels have {match}, got .* Use backend="
    ):
        BACKWARD[name](lambda x: attention(x, k, v, backend="triton", **arguments), q)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("name", FORWARD | REVERSE)
def test_rotations_are_correct(name, layout):
    angle, x = FAMILIES["rotation"][0], inputs()[0]

    def rotated(x, angle, dtype):
        rotation = PairRotation(angle.cos().to(dtype), angle.sin().to(dtype), layout)
        return rotation.inputs(x.to(dtype), x.to(dtype), x.to(dtype))[1].double()

    for function, at in (
        (lambda x, dtype: rotated(x, angle, dtype), x),
        (lambda a, dtype: rotated(x, a, dtype), angle),
    ):
        result, expected = (
            (FORWARD | REVERSE)[name](lambda t, dtype=dtype, function=function: function(t, dtype), at)
            for dtype in (torch.float32, torch.float64)
        )
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        assert expected.abs().max() > 0


def test_second_derivatives_of_rotations():
    angle, x = FAMILIES["rotation"][0], inputs()[0]
    double = BACKWARD["double backward"]
    exact = PairRotation(angle.double().cos(), angle.double().sin(), "half")
    fused = PairRotation(angle.cos(), angle.sin(), "half")
    torch.testing.assert_close(double(fused.query, x), double(exact.query, x.double()).float())
    with pytest.raises(BackendUnavailable, match="no second derivative"):
        double(lambda a: PairRotation(a.cos(), a.sin(), "half").query(x), angle)


@pytest.mark.parametrize("wrapped", [False, True], ids=["rotation", "chain"])
@pytest.mark.parametrize("backend", ["auto", "triton", "reference", "sdpa"])
def test_rotations_follow_the_selected_backend(backend, wrapped):
    q, k, v = inputs()
    arguments = _arguments("rotation and bias")
    rotation = arguments["transform"]
    keys = PairRotation(rotation.cos, rotation.sin, "half", keys=(rotation.cos, rotation.sin))
    for transform in (rotation, keys):
        used = Chain(transform, transform) if wrapped else transform
        call = arguments | {"transform": used}
        with Operators() as by_name:
            out = attention(q, k, v, backend=backend, **call)
        with Operators() as by_context, use_backend(backend):
            attention(q, k, v, **call)
            transform.inputs(q, k, v)
        with Operators() as both, use_backend("reference" if backend in ("auto", "triton") else "triton"):
            attention(q, k, v, backend=backend, **call)
        fused = backend in ("auto", "triton")
        assert ("rotate_pairs" in by_name.names) == ("rotate_pairs" in by_context.names) == fused
        # the name in the call has precedence; 'auto' leaves the choice to the context
        assert ("rotate_pairs" in both.names) == (backend == "triton")
        torch.testing.assert_close(out, attention(q, k, v, backend="reference", **call), rtol=1e-5, atol=1e-5)
