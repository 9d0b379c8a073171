"""Triton in tests: a faster interpreter in the process that interprets, a fresh cache where kernels are compiled.

With VISPE_TEST_DEVICE=cuda the tests of `check_*.py` run on a GPU instead of in the interpreter.
"""

import os

import pytest

from tests.attention.triton.interpreter import make_faster

# before the modules of the tests, which make tensors as well
if DEVICE := os.environ.get("VISPE_TEST_DEVICE"):
    import torch

    def draw_on_cpu(make):
        """Return a function of random numbers that are those of the interpreter, on the device."""

        def draw(*args, device=None, requires_grad=False, **options):
            numbers = make(*args, device="cpu", **options)
            return numbers.to(DEVICE if device is None else device).requires_grad_(requires_grad)

        return draw

    for name in ("rand", "randn", "randint", "randperm"):
        setattr(torch, name, draw_on_cpu(getattr(torch, name)))
    draw_like = torch.randn_like
    torch.randn_like = lambda x, **options: draw_like(x.detach().cpu(), **options).to(x.device)
    torch.set_default_device(DEVICE)


@pytest.fixture(scope="session", autouse=True)
def _faster_interpreter():
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        make_faster(patch)
        yield


@pytest.fixture(scope="module")
def fresh_kernels(tmp_path_factory):
    """Kernels are compiled into a separate cache."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield
