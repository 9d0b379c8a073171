"""Compute dtypes under autocast, exact products, and checks of tensor values without a device sync."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is active for tensors on `device`."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which SDPA computes with `x`: that of `x`, or that of autocast (not for float64)."""
    if x.dtype != torch.float64 and autocast_on(x.device):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast on `device`."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else nullcontext()


def exporting() -> bool:
    """Whether a program is being exported."""
    # torch.compiler.is_exporting of torch 2.11 is True in any compiled program
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def fixed_size(n: int) -> bool:
    """Return whether a size is a concrete integer, not a symbol of a compiled or exported program."""
    if not torch.compiler.is_compiling():
        return not isinstance(n, torch.SymInt)
    # local import: it takes a second, and compilation has already imported it
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(n)


def same_grid(old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether two grid shapes are known to be equal; False for symbolic sizes, for which no guard is added."""
    return all(map(fixed_size, new)) and tuple(old) == tuple(new)


def all_equal(old: Sequence[int], new: Sequence[int], device: torch.device) -> Tensor:
    """Return whether `new`, which may have symbolic sizes, equals `old`: a bool tensor (), which adds no guard."""
    pairs = zip(old, new, strict=True)
    return torch.stack([torch.full((), n, device=device) == o for o, n in pairs]).all()


def readable(x: Tensor) -> bool:
    """Whether the values can be read for free: on the CPU, and not while compiling or tracing."""
    if x.device.type != "cpu" or type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    # under fake tensors and other dispatch modes the values of plain tensors cannot be read either
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():  # pyright: ignore
        return False
    return not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def no_infinity(*tensors: Tensor | None) -> bool:
    """Whether all tensors are known to be free of infinities; False if that cannot be read for free (`readable`)."""
    return all(
        tensor is None or (readable(tensor) and not bool(tensor.detach().isinf().any())) for tensor in tensors
    )


def every_row_open(mask: Tensor) -> bool:
    """Whether each row of an additive mask (..., n, m) has a finite maximum; False if that cannot be read for free.

    SDPA gives NaN in rows that are -inf throughout, and in rows that contain +inf or NaN.
    """
    return readable(mask) and bool(mask.detach().amax(-1).isfinite().all())


def rounded(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask cast to `dtype`; finite values are clamped to its range, -inf remains."""
    # casting large finite values would give infinities
    largest = torch.finfo(dtype).max
    if largest >= torch.finfo(mask.dtype).max:
        return mask.to(dtype)
    return torch.where(mask == float("-inf"), mask, mask.clamp(-largest, largest)).to(dtype)


def narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias cast to `dtype`; clamped only for float16, whose range is smaller than that of float32."""
    return rounded(bias, dtype) if dtype == torch.float16 else bias.to(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in float32 or float64, even under autocast."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    with no_autocast(a.device):
        return a.to(dtype) @ b.to(dtype)


def float32_buffers(module: nn.Module, suffix: str = "") -> dict[str, Tensor]:
    """Return the module's own float32 and float64 buffers by name, not those of submodules, for `restore_buffers`."""
    return {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith(suffix) and buffer.dtype in (torch.float32, torch.float64)
    }


def restore_buffers(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Restore buffers that a cast has rounded to half precision, on their current device.

    Frequencies in half precision would give angles that are off by radians at a few thousand positions, whatever the
    dtype of the angles.
    """
    for name, old in before.items():
        new: Tensor = getattr(module, name)
        if not new.is_floating_point() or new.dtype.itemsize >= 4:
            continue
        if old.is_meta:
            setattr(module, name, torch.empty_like(old, dtype=torch.float32, device=new.device))
        else:
            setattr(module, name, old.to(device=new.device, dtype=torch.float32))
