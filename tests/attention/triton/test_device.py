"""Kernels that fail at run time: one warning, and another backend from then on.

No GPU is needed: tensors in CPU memory report one, and the launch function is replaced.
"""

import importlib
import re
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

import vispe
from vispe import Grid, attention, explain, use_backend
from vispe.attention import DistanceBias, PairRotation, backend_selection
from vispe.attention.automatic_backend import BACKENDS
from vispe.attention.backends import flex
from vispe.attention.backends.triton import device
from vispe.attention.transform import pairs as rotation
from vispe.errors import BackendUnavailable, ShapeError

GRID = Grid((3, 4), 1)
BIAS = DistanceBias((0.5, 0.2, 0.1), GRID.positions())
COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
MEMORY = type("OutOfResources", (Exception,), {})(
    "out of resource: shared memory, Required: 147456, Limit: 65536."
)


def tensors(**options):
    return [torch.randn(1, 3, GRID.tokens, 16, **options) for _ in range(3)]


@pytest.fixture
def gpu(monkeypatch):
    """Tensors report a GPU without earlier launches; return the record of launches."""

    class Gpu:
        launched = 0
        error = None

        def launch(self, device):
            self.launched += 1
            if self.error is not None:
                raise self.error

    gpu = Gpu()
    for name in ("_TRIED", "_WARNED"):
        monkeypatch.setattr(device, name, set())
    monkeypatch.setattr(device, "_FAILED", {})
    monkeypatch.setattr(device, "_INSTALLED", True)
    monkeypatch.setattr(device, "_launch", gpu.launch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda x: False))
    monkeypatch.setattr(device, "_INTERPRETED", True)  # compilers ask the device itself, the CPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda x: warnings.catch_warnings())
    return gpu


@pytest.fixture
def kernels(monkeypatch):
    """Exchange the launch of attention kernels: the function `functions["run"]` is called instead."""
    gpu = {}

    def run(call):
        return gpu["run"](call.q)

    unsupported_reason = BACKENDS["triton"][0]
    monkeypatch.setitem(BACKENDS, "triton", (unsupported_reason, run))
    return gpu


def plain(q, k, v, **arguments):
    return attention(q, k, v, bias=BIAS, backend="reference", **arguments)


# the first launch


@pytest.mark.parametrize("error", [COMPILER, MEMORY, OSError(8, "gcc")], ids=repr)
def test_a_failed_first_launch_warns_once_and_sdpa_runs(gpu, error):
    gpu.error = error
    q, k, v = tensors()
    match = rf"^Triton kernels of vispe failed on cpu \(all kernels: {type(error).__name__}: "
    with pytest.warns(UserWarning, match=match) as caught:
        out = attention(q, k, v, bias=BIAS)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "use_backend('sdpa')" in text
    assert caught[0].filename == __file__
    torch.testing.assert_close(out, plain(q, k, v))
    attention(q, k, v, bias=BIAS)  # a second warning would be an error
    attention(*tensors(dtype=torch.float16), bias=BIAS)
    assert gpu.launched == 1
    result = explain(q, k, v, bias=BIAS)
    assert (result.backend, result.reason) == ("sdpa", "one dense mask, cached with its positions")
    assert type(error).__name__ in result.unsupported["triton"]
    assert type(error).__name__ in result.unsupported["flex"]


def test_a_failed_launch_of_the_named_backend_is_an_error(gpu):
    gpu.error = COMPILER
    q, k, v = tensors()
    for function in (attention, explain):
        with pytest.raises(
            BackendUnavailable,
            match=r"backend='triton' does not support this call: .*Failed to find C compil",
        ):
            function(q, k, v, bias=BIAS, backend="triton")
    with (
        use_backend("triton"),
        pytest.raises(BackendUnavailable, match=r"selected by vispe.use_backend, .*C compiler"),
    ):
        attention(q, k, v, bias=BIAS)
    with use_backend("sdpa"):
        attention(q, k, v, bias=BIAS)  # without a warning
    with pytest.warns(UserWarning, match="C compiler"):
        attention(q, k, v, bias=BIAS)


def test_a_successful_first_launch_is_not_repeated(gpu):
    for _ in range(2):
        assert explain(*tensors(), bias=BIAS).backend == "triton"
    assert gpu.launched == 1


def test_a_launch_without_memory_is_repeated(gpu):
    gpu.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
    q = tensors()[0]
    assert device.device_unsupported_reason(q) is None
    gpu.error = None
    assert device.device_unsupported_reason(q) is None
    assert device.device_unsupported_reason(q) is None
    assert gpu.launched == 2


def test_no_first_launch_while_compiling_or_capturing(gpu, monkeypatch):
    q = tensors()[0]
    assert (
        device.device_unsupported_reason(
            torch.nn.Parameter(q).as_subclass(type("Other", (torch.Tensor,), {}))
        )
        is None
    )
    with FakeTensorMode():
        assert device.device_unsupported_reason(torch.empty(2)) is None
        assert device.device_unsupported_reason(q) is None
    assert torch.vmap(lambda x: x + (device.device_unsupported_reason(x) is None))(q).shape == q.shape
    compiled = torch.compile(
        lambda x: x + (device.device_unsupported_reason(x) is None), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(q), q + 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert device.device_unsupported_reason(q) is None
    assert gpu.launched == 0
    gpu.error = COMPILER
    assert "C compiler" in device.device_unsupported_reason(q)
    assert torch.equal(compiled(q), q)  # compiled again: what is known now decides
    with FakeTensorMode():
        assert "C compiler" in device.device_unsupported_reason(torch.empty(2))
    torch._dynamo.reset()


def test_a_wrong_output_is_a_failure(gpu, monkeypatch):
    monkeypatch.undo()
    launch = importlib.import_module("vispe.attention.backends.triton.grid.launch")
    monkeypatch.setattr(launch, "run_forward", lambda q, *rest: (q * 0.5, None))
    with pytest.raises(RuntimeError, match="wrong results"):
        device._launch(torch.device("cpu"))


def test_rocm_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    result = explain(*tensors(), bias=BIAS)
    assert result.backend == "sdpa"
    assert "not ROCm" in result.unsupported["triton"]
    assert gpu.launched == 0


# later launches


def test_kernels_that_fail_later_are_replaced(gpu, kernels):
    @device.record_failures("table")
    def launch(q):
        raise MEMORY

    kernels["run"] = launch
    q, k, v = tensors()
    with pytest.warns(
        UserWarning, match=r"failed on cpu \(table: OutOfResources: out of resource: shared memory"
    ) as caught:
        out = attention(q, k, v, bias=BIAS)
    assert len(caught) == 1
    torch.testing.assert_close(out, plain(q, k, v))
    attention(q, k, v, bias=BIAS)
    assert "OutOfResources" in explain(q, k, v, bias=BIAS).unsupported["triton"]
    anywhere = DistanceBias((0.5, 0.2, 0.1), GRID.positions().gather(torch.arange(GRID.tokens)[None]))
    assert explain(q, k, v, bias=anywhere).backend == "triton"  # other kernels
    assert explain(q, k, v, bias=BIAS, is_causal=True).backend == "sdpa"


def test_named_kernels_that_fail_later_are_an_error(gpu, kernels):
    @device.record_failures("table")
    def launch(q):
        raise MEMORY

    kernels["run"] = launch
    with pytest.raises(
        BackendUnavailable, match=r"out of resource.*not used from now on. Select another"
    ) as failed:
        attention(*tensors(), bias=BIAS, backend="triton")
    assert failed.value.__cause__ is MEMORY
    with pytest.raises(
        BackendUnavailable, match="does not support this call: Triton kernels of vispe failed"
    ):
        attention(*tensors(), bias=BIAS, backend="triton")


@pytest.mark.parametrize(
    "error",
    [ShapeError("of the user"), torch.OutOfMemoryError("CUDA out of memory."), MemoryError("no")],
    ids=repr,
)
def test_other_errors_are_raised(gpu, kernels, error):
    @device.record_failures("table")
    def launch(q):
        raise error

    kernels["run"] = launch
    with pytest.raises(type(error), match=re.escape(str(error))):
        attention(*tensors(), bias=BIAS)
    assert explain(*tensors(), bias=BIAS).backend == "triton"


def test_flex_is_refused_after_a_failed_compilation(gpu, monkeypatch):
    def compile_(function, **options):
        def run(*arguments):
            raise COMPILER

        return run

    monkeypatch.setattr(torch, "compile", compile_)
    flex._compiled.cache_clear()
    # of causal masks with two prefix tokens, kernels serve none
    q, k, v = (torch.randn(1, 3, 14, 16) for _ in range(3))
    bias = DistanceBias((0.5, 0.2, 0.1), Grid((3, 4), 2).positions())
    with pytest.warns(UserWarning, match=r"\(flex: RuntimeError: Failed to find C compiler") as caught:
        out = attention(q, k, v, bias=bias, is_causal=True)
    flex._compiled.cache_clear()
    assert len(caught) == 1
    expected = attention(q, k, v, bias=bias, is_causal=True, backend="reference")
    torch.testing.assert_close(out, expected)
    assert "C compiler" in explain(q, k, v, bias=bias, is_causal=True).unsupported["flex"]
    assert explain(q, k, v, bias=bias).backend == "triton"


# rotations


def test_rotations_run_without_kernels(gpu, monkeypatch):
    gpu.error = COMPILER
    monkeypatch.setattr(rotation, "INTERPRETED", True)  # which look at the CPU
    angle = torch.randn(1, 1, GRID.tokens, 4)
    rotated = PairRotation(angle.cos(), angle.sin(), "half")
    q, k, v = tensors()
    with pytest.warns(UserWarning, match="C compiler") as caught:
        out = attention(q, k, v, transform=rotated)
    assert len(caught) == 1
    assert torch.equal(attention(q, k, v, transform=rotated), out)


def test_no_launch_with_another_backend_of_the_process(gpu, monkeypatch):
    gpu.error = COMPILER
    monkeypatch.setattr(rotation, "INTERPRETED", True)
    monkeypatch.setattr(backend_selection, "_ENVIRONMENT", "sdpa")
    angle = torch.randn(1, 1, GRID.tokens, 4)
    attention(*tensors(), bias=BIAS, transform=PairRotation(angle.cos(), angle.sin(), "half"))
    assert gpu.launched == 0


def test_a_model_runs_with_one_warning(gpu):
    gpu.error = COMPILER
    layer = vispe.Attention(48, 3, "alibi2d(slopes=learned)")
    x = torch.randn(1, GRID.tokens, 48)
    with pytest.warns(UserWarning, match="C compiler") as caught:
        layer(x, GRID).sum().backward()
    assert len(caught) == 1
    layer(x, GRID).sum().backward()
