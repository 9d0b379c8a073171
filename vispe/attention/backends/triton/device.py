"""Where the kernels can run, and what is known of that; nothing of Triton is imported before they are tried.

Kernels also need a C compiler, a driver that suits, and enough shared memory. So the first call on a device launches
one tiny kernel, and every later launch is watched: kernels that failed once are refused from then on, with the reason.
While a program is compiled, traced or captured, nothing is launched to find out, and what is known decides.
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
from torch import Tensor, nn

from vispe.errors import BackendUnavailable, VispeError, is_memory

P = ParamSpec("P")
R = TypeVar("R")
_INSTALLED = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels then run on the CPU, slowly, for tests
_ALL = "all kernels"
_TRIED: set[tuple[str, int | None]] = set()  # devices on which the first launch was made
_FAILED: dict[tuple[str, int | None, str], str] = {}  # (device, its index, kernels) -> reason
_SAID: set[tuple[str, int | None, str]] = set()  # failures that were warned of


class KernelsFailed(BackendUnavailable):
    """Kernels that should have run did not; they are refused from now on."""


def no_device(x: Tensor) -> str | None:
    """Return why kernels cannot run where `x` is, or None; the first call on a device tries it."""
    if not _INSTALLED:
        return "Triton is not installed"
    if not x.is_cuda:
        if not (_INTERPRETED and x.device.type == "cpu"):
            return f"Triton kernels do not run on {x.device}"
    elif torch.version.hip is not None:
        return "the kernels are made for CUDA and not for ROCm (HIP)"
    elif torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if not torch.compiler.is_compiling():
        _try(x)
    return failed(x, _ALL)


def failed(x: Tensor, *kernels: str) -> str | None:
    """Return why kernels, by default any, failed where `x` is, or None where they are not known to."""
    place = x.device.type, x.device.index
    for key, reason in _FAILED.items():
        if key[:2] == place and (not kernels or key[2] in kernels):
            return reason
    return None


def say_once(x: Tensor) -> None:
    """Warn, once, of kernels that failed where `x` is, for a call that takes something else instead."""
    if not _FAILED or torch.compiler.is_compiling():
        return
    for key, reason in _FAILED.items():
        if key[:2] == (x.device.type, x.device.index) and key not in _SAID:
            _SAID.add(key)
            warnings.warn(
                f"{reason}; other backends are taken from now on, which need more time and memory. Choose one with "
                "vispe.use_backend('sdpa') or VISPE_BACKEND=sdpa to be rid of this warning.",
                stacklevel=4,
            )


def watched(kernels: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for what launches kernels: errors of theirs are remembered, and raised as KernelsFailed.

    Args:
        kernels: their family, by which `failed` is asked later.
    """

    def decorate(launch: Callable[P, R]) -> Callable[P, R]:
        # torch reads the signature, and the names in it, here: `Tensor` must be known in this module
        @wraps(launch)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return launch(*args, **kwargs)
            except (VispeError, torch.AcceleratorError):  # bad input, a lost device
                raise
            except Exception as error:
                x = args[0]
                if is_memory(error) or not isinstance(x, Tensor):
                    raise
                raise KernelsFailed(
                    f"{_remember(x, kernels, error)}; attention does without them from now on. Name another backend, "
                    "with vispe.use_backend('sdpa') or VISPE_BACKEND=sdpa, so that they are never tried."
                ) from error

        return run

    return decorate


def _try(x: Tensor) -> None:
    """Launch one tiny kernel where `x` is, unless that was done or is not possible now."""
    place = x.device.type, x.device.index
    if place in _TRIED or not _may_launch(x):
        return
    _TRIED.add(place)
    try:
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            _launch(x.device)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # Triton, its compiler and the driver raise what they like
        if is_memory(error):
            _TRIED.discard(place)
            return
        _remember(x, _ALL, error)


def _launch(device: torch.device) -> None:
    """Run the forward kernel on one head of 16 equal tokens, whose values must come back."""
    from vispe.attention.backends.triton.grid.launch import run_forward

    ones = torch.ones(1, 1, 16, 16, dtype=torch.float16, device=device)
    out, _ = run_forward(ones, ones, ones, None, None, None, None, 0, 0.25)
    if not torch.allclose(out, ones, rtol=0.0, atol=0.01):
        raise RuntimeError("a first kernel gave wrong numbers")


def _may_launch(x: Tensor) -> bool:
    """Whether a kernel can be launched now, for a plain tensor and outside of tracers, modes and captured graphs."""
    if type(x) not in (Tensor, nn.Parameter) or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():  # pyright: ignore
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _remember(x: Tensor, kernels: str, error: Exception) -> str:
    """Return the reason why kernels failed where `x` is, which is kept."""
    said = " ".join(str(error).split()).rstrip(".")
    reason = f"Triton kernels of vispe failed on {x.device} ({kernels}: {type(error).__name__}: {said[:300]})"
    _FAILED[x.device.type, x.device.index, kernels] = reason
    return reason
