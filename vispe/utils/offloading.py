"""Weights that accelerate offloads, for modules whose weights are read without calling the module.

`accelerate.cpu_offload`, `disk_offload` and `dispatch_model` leave weights on the meta device, and load them around the
forward pass of the module that owns them. Encodings have methods instead of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from vispe.utils.parameters import parameters_of

_HOOK = "_hf_hook"  # attribute of a module with hooks of accelerate
_NOTHING = nullcontext()


def loaded(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Return a context in which all offloaded weights of `modules` have their values.

    Example:
        >>> with loaded([nn.Linear(2, 3)]):
        ...     pass
    """
    if torch.compiler.is_compiling():
        return _NOTHING
    hooked = [part for module in modules for part in module.modules() if _HOOK in part.__dict__]
    return _loaded(hooked) if hooked else _NOTHING


@contextmanager
def _loaded(hooked: list[Any]) -> Iterator[None]:
    for module in hooked:
        module._hf_hook.pre_forward(module)
    try:
        yield
    finally:
        for module in hooked:
            module._hf_hook.post_forward(module, None)


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module runs, also if its weights are offloaded.

    Example:
        >>> device_of(nn.Linear(2, 3))
        device(type='cpu')
    """
    devices = [p.device for p in parameters_of(module)]
    real = next((device for device in devices if device.type != "meta"), None)
    if real is not None or torch.compiler.is_compiling():
        return devices[0] if real is None else real
    hooks = [part.__dict__[_HOOK] for part in module.modules() if _HOOK in part.__dict__]
    hooks = [inner for hook in hooks for inner in getattr(hook, "hooks", (hook,))]
    executing = (getattr(hook, "execution_device", None) for hook in hooks)
    return next(
        (torch.empty(0, device=device).device for device in executing if device is not None), devices[0]
    )
