"""Cache of tensors that depend on parameters, buffers and positions only, in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from vispe.grid import Positions
from vispe.utils.parameters import parameters_of

T = TypeVar("T", Tensor, tuple[Tensor, Tensor])
Entry = tuple[ref[Positions], list[Tensor], list[float], Any]
LIMIT = 64 << 20  # bytes
# by vmap, grad, jvp
_wrapped = cast("Callable[[Tensor], bool]", torch._C._functorch.is_functorch_wrapped_tensor)


class EvalCache:
    """Caches the last tensors that a module computed from its parameters and positions.

    Active only on CPU, in eval mode, without gradients. Parameters, buffers and training progress are compared by
    value, so any change invalidates the cache. Copies, pickles and state dicts exclude it.
    """

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def __call__(self, owner: nn.Module, pos: Positions, make: Callable[[], T], trust: bool = False) -> T:
        """Return `make()`, or its last result for the same positions and equal parameters and buffers of `owner`.

        With `trust`, these are not compared: they were compared earlier in this forward pass.
        """
        parameters = [*parameters_of(owner), *owner.buffers()]
        if (
            owner.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not pos.static
            or not all(map(_plain, parameters))
        ):
            return make()
        # tables with `reveal` depend on progress
        steps = [m.progress for m in owner.modules() if hasattr(m, "progress")]
        if self.entry is not None:
            pos_ref, old_parameters, old_steps, value = self.entry
            if pos_ref() is pos and (trust or (old_steps == steps and _equal(old_parameters, parameters))):
                return value
        value = make()
        tensors = (value,) if isinstance(value, Tensor) else value
        if all(map(_plain, tensors)) and sum(t.nbytes for t in tensors) <= LIMIT:
            self.entry = ref(pos), [p.detach().clone() for p in parameters], steps, value
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> EvalCache:
        return EvalCache()

    def __reduce__(self) -> tuple[type[EvalCache], tuple[()]]:
        return EvalCache, ()


def _equal(old: list[Tensor], parameters: list[Tensor]) -> bool:
    if len(old) != len(parameters):
        return False
    return all(a.dtype == b.dtype and a.equal(b) for a, b in zip(old, parameters, strict=True))


def _plain(x: Tensor) -> bool:
    busy = torch.compiler.is_compiling() or torch.jit.is_tracing() or _wrapped(x)
    return not busy and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter)
