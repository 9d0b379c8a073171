"""In which precision attention is computed when autocast is on, and when numbers may be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is active for tensors on `device`."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which SDPA computes with `x`: its own, or that of autocast (never for float64)."""
    if x.dtype != torch.float64 and autocast_on(x.device):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast rounds nothing."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else nullcontext()


def exporting() -> bool:
    """Whether a program is being exported; `torch.compiler.is_exporting` of torch 2.11 says so of any compiled one."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def fixed_size(n: int) -> bool:
    """Return whether a size is a number, rather than the symbol of a compiled or exported program."""
    if not torch.compiler.is_compiling():
        return not isinstance(n, torch.SymInt)
    # here: its import takes a second; what is compiled has it already
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(n)


def same_grid(old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether two grids are known to be equal; False for symbolic sizes, which are compared without a guard."""
    return all(map(fixed_size, new)) and tuple(old) == tuple(new)


def all_equal(old: Sequence[int], new: Sequence[int], device: torch.device) -> Tensor:
    """Return whether sizes that may be symbols equal given ones, a bool tensor (), without a guard on them."""
    pairs = zip(old, new, strict=True)
    return torch.stack([torch.full((), n, device=device) == o for o, n in pairs]).all()


def readable(x: Tensor) -> bool:
    """Whether looking at the values costs nothing: not while compiling or tracing, and not on another device."""
    if x.device.type != "cpu" or type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    # under fake tensors and other dispatch modes real tensors have no values that could be looked at either
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():  # pyright: ignore
        return False
    return not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def no_infinity(*tensors: Tensor | None) -> bool:
    """Whether all tensors are known to hold no infinity; False where a look at them would cost, see `readable`."""
    return all(t is None or (readable(t) and not bool(t.detach().isinf().any())) for t in tensors)


def rounded(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask in `dtype`, in which large finite numbers stay finite and -inf remains."""
    top = torch.finfo(dtype).max
    if top >= torch.finfo(mask.dtype).max:
        return mask.to(dtype)
    return torch.where(mask == float("-inf"), mask, mask.clamp(-top, top)).to(dtype)


def narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in `dtype`; only float16 has a smaller range than the float32 of biases."""
    return rounded(bias, dtype) if dtype == torch.float16 else bias.to(dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32 or, if it is that already, in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in float32 or better, also under autocast."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    with no_autocast(a.device):
        return a.to(dtype) @ b.to(dtype)


def float32_buffers(module: nn.Module, suffix: str = "") -> dict[str, Tensor]:
    """Return the buffers of a module itself that are float32 or float64, by name, for `restore_buffers`."""
    return {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith(suffix) and buffer.dtype in (torch.float32, torch.float64)
    }


def restore_buffers(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Give buffers that a cast has rounded to half precision their values back, on the device that they are on now.

    Frequencies in half precision would be off by radians at a few thousand positions, whatever the angles are computed
    in.
    """
    for name, old in before.items():
        new: Tensor = getattr(module, name)
        if not new.is_floating_point() or new.dtype.itemsize >= 4:
            continue
        if old.is_meta:
            setattr(module, name, torch.empty_like(old, dtype=torch.float32, device=new.device))
        else:
            setattr(module, name, old.to(device=new.device, dtype=torch.float32))
