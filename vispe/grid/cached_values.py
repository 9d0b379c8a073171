"""Cache of values that depend only on positions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch._guards import detect_fake_mode

from vispe.utils.autocast import no_autocast

T = TypeVar("T")


def cached_value(cache: dict[Any, Any], key: Any, make: Callable[[], T], device: torch.device) -> T:
    """Return ``cache[key]``, the result of `make` at its first use; not cached where its tensors cannot outlive it."""
    dispatched = not torch.compiler.is_dynamo_compiling() and torch._C._len_torch_dispatch_stack()  # pyright: ignore
    if dispatched and key not in cache:
        # torch.export runs this code with fake tensors, which must not outlive it
        key = (key, detect_fake_mode())
    if key not in cache:
        compiling = torch.compiler.is_compiling()
        capturing = not compiling and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # torch.func transforms wrap new tensors only for themselves; captured ones have no value before a replay
        if capturing or torch._C._are_functorch_transforms_active():  # pyright: ignore
            return make()
        # values cached in inference mode or under autocast must also be exact and usable outside of it
        in_inference = nullcontext() if compiling else torch.inference_mode(False)
        with in_inference, no_autocast(device):
            cache[key] = make()
    return cache[key]
