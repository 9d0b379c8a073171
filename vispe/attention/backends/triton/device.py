"""Availability of Triton kernels per device; Triton is not imported before the first launch.

Kernels also need a C compiler, a compatible driver and enough shared memory. Therefore the first call on a device
launches one tiny kernel, and errors of every later launch are recorded: kernels that failed once are not used again.
While a program is compiled, traced or captured nothing is launched, and the recorded state decides.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from vispe.attention.precision import is_eager
from vispe.errors import BackendUnavailable, VispeError, is_out_of_memory, short

P = ParamSpec("P")
R = TypeVar("R")
_INSTALLED = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on the CPU, slowly, for tests
_ALL = "all kernels"
_TRIED: set[tuple[str, int | None]] = set()  # devices with a completed first launch
_FAILED: dict[tuple[str, int | None, str], str] = {}  # (device, its index, kernels) -> reason
_WARNED: set[tuple[str, int | None, str]] = set()  # failures that a warning was issued for


class KernelsFailed(BackendUnavailable):
    """Raised when a kernel launch fails; the kernels are not used again in this process."""


def device_unsupported_reason(x: Tensor) -> str | None:
    """Return why kernels cannot run on the device of `x`, or None; the first call on a device launches one."""
    if not _INSTALLED:
        return "Triton is not installed"
    if not x.is_cuda:
        if not (_INTERPRETED and x.device.type == "cpu"):
            return f"Triton kernels do not run on {x.device}"
    elif torch.version.hip is not None:
        return "the kernels support CUDA, not ROCm (HIP)"
    elif torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if not torch.compiler.is_compiling():
        _try(x)
    return failure_reason(x, _ALL)


def failure_reason(x: Tensor, *kernels: str) -> str | None:
    """Return why the named kernels (by default any) have failed on the device of `x`, or None."""
    device = x.device.type, x.device.index
    for key, reason in _FAILED.items():
        if key[:2] == device and (not kernels or key[2] in kernels):
            return reason
    return None


def warn_once(x: Tensor) -> None:
    """Warn once per failure that kernels have failed on the device of `x` and another backend is used."""
    if not _FAILED or torch.compiler.is_compiling():
        return
    for key, reason in _FAILED.items():
        if key[:2] == (x.device.type, x.device.index) and key not in _WARNED:
            _WARNED.add(key)
            warnings.warn(
                f"{reason}. Other backends are used from now on, which need more time and memory. Select one with "
                "vispe.use_backend('sdpa') or VISPE_BACKEND=sdpa to silence this warning.",
                stacklevel=4,
            )


def record_failures(kernels: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for functions that launch kernels: errors are recorded and raised as `KernelsFailed`.

    Args:
        kernels: name of the kernel family, as passed to `failure_reason`.
    """

    def decorate(launch: Callable[P, R]) -> Callable[P, R]:
        # torch.library evaluates the signature in this module, so `Tensor` must be imported here
        @wraps(launch)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return launch(*args, **kwargs)
            # invalid input, or a lost device: not a failure of the kernels
            except (VispeError, torch.AcceleratorError):
                raise
            except Exception as error:
                x = args[0]
                if is_out_of_memory(error) or not isinstance(x, Tensor):
                    raise
                raise KernelsFailed(
                    f"{_record_failure(x, kernels, error)}. They are not used from now on. Select another backend with "
                    "vispe.use_backend('sdpa') or VISPE_BACKEND=sdpa to avoid them from the start."
                ) from error

        return run

    return decorate


def _try(x: Tensor) -> None:
    """Launch one tiny kernel on the device of `x`, unless this was done or is not possible now."""
    device = x.device.type, x.device.index
    if device in _TRIED or not _may_launch(x):
        return
    _TRIED.add(device)
    try:
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            _launch(x.device)
    except torch.AcceleratorError:
        raise
    # Triton, its compiler and the driver raise various types
    except Exception as error:
        if is_out_of_memory(error):
            _TRIED.discard(device)
            return
        _record_failure(x, _ALL, error)


def _launch(device: torch.device) -> None:
    """Run the forward kernel on one head of 16 equal tokens, whose output must equal the values."""
    from vispe.attention.backends.triton.grid.launch import run_forward

    ones = torch.ones(1, 1, 16, 16, dtype=torch.float16, device=device)
    out, _ = run_forward(ones, ones, ones, None, None, None, None, 0, 0.25)
    if not torch.allclose(out, ones, rtol=0.0, atol=0.01):
        raise RuntimeError("the first kernel returned wrong results")


def _may_launch(x: Tensor) -> bool:
    """Whether a kernel can be launched now: plain tensor, no tracer, dispatch mode or CUDA graph capture."""
    return is_eager(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _record_failure(x: Tensor, kernels: str, error: Exception) -> str:
    """Record and return the reason why kernels failed on the device of `x`."""
    reason = (
        f"Triton kernels of vispe failed on {x.device} ({kernels}: {type(error).__name__}: {short(error)})"
    )
    _FAILED[x.device.type, x.device.index, kernels] = reason
    return reason
