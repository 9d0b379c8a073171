"""The first launch on a device, and failed launches, in Triton's interpreter, which runs the kernels."""

import importlib

import pytest
import torch

from vispe import Grid, attention, explain, use_backend
from vispe.attention import DistanceBias, PairRotation
from vispe.attention.backends.triton import device
from vispe.errors import BackendUnavailable

POS = Grid((3, 4), 1).positions()
BIAS = DistanceBias((0.5, 0.2, 0.1), POS)
launch = importlib.import_module("vispe.attention.backends.triton.grid.launch")


def tensors():
    return [torch.randn(2, 3, POS.tokens, 16, requires_grad=True) for _ in range(3)]


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    for name, empty in (("_TRIED", set()), ("_WARNED", set()), ("_FAILED", {})):
        monkeypatch.setattr(device, name, empty)


def test_the_first_launch_runs_the_forward_kernel():
    x = torch.zeros(2)
    assert device.device_unsupported_reason(x) is None
    assert {(x.device.type, x.device.index)} == device._TRIED
    assert device._FAILED == {}


def test_a_kernel_that_does_not_compile_is_refused(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler.")

    q, k, v = tensors()
    monkeypatch.setattr(launch, "forward", Broken())
    for _ in range(2):
        with pytest.raises(
            BackendUnavailable, match="does not support this call: Triton kernels of vispe failed on "
        ):
            attention(q, k, v, bias=BIAS, backend="triton")
    angle = torch.randn(1, 1, POS.tokens, 4)
    with pytest.warns(UserWarning, match="C compiler"):  # rotations would have taken a kernel of their own
        rotated = attention(q, k, v, transform=PairRotation(angle.cos(), angle.sin(), "half"))
    monkeypatch.undo()
    expected = attention(
        q, k, v, transform=PairRotation(angle.cos(), angle.sin(), "half"), backend="reference"
    )
    torch.testing.assert_close(rotated, expected)


def test_a_failed_backward_pass_is_an_error_and_the_next_step_runs(monkeypatch):
    op = importlib.import_module("vispe.attention.backends.triton.grid.op")

    def broken(*arguments):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(op, "run_backward", broken)
    q, k, v = tensors()
    with use_backend("triton"):
        out = attention(q, k, v, bias=BIAS)
        with pytest.raises(BackendUnavailable, match=r"\(table: RuntimeError: out of resource.*from now on"):
            out.sum().backward()
        with pytest.raises(BackendUnavailable, match=r"selected by vispe\.use_backend"):
            attention(q, k, v, bias=BIAS)
    with pytest.warns(UserWarning, match="out of resource"):
        attention(q, k, v, bias=BIAS).sum().backward()
    assert q.grad.isfinite().all()
    assert "out of resource" in explain(q, k, v, bias=BIAS).unsupported["triton"]


def test_a_context_selects_kernels_in_a_compiled_function():
    if torch.get_default_device().type != "cpu":
        pytest.skip("on a GPU the kernels are selected without a context")
    q, k, v = tensors()
    expected = attention(q, k, v, bias=BIAS, backend="reference")
    ran = []
    op = importlib.import_module("vispe.attention.backends.triton.grid.op")
    with pytest.MonkeyPatch.context() as patch:
        forward = op._run_forward
        patch.setattr(op, "_run_forward", lambda *a: ran.append(1) or forward(*a))
        compiled = torch.compile(
            lambda q, k, v: attention(q, k, v, bias=BIAS), backend="eager", fullgraph=True
        )
        with torch.no_grad():
            plain = compiled(q, k, v)
            assert ran == []
            with use_backend("triton"):
                fused = compiled(q, k, v)
            assert ran == [1]
    for out in (plain, fused):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()
