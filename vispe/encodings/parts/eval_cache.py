"""What a model that is not being trained computes from its parameters alone, kept between forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from vispe.grid import Positions

T = TypeVar("T", Tensor, tuple[Tensor, Tensor])
Entry = tuple[ref[Positions], list[Tensor], list[float], Any]
LIMIT = 64 << 20  # bytes
_wrapped = cast(
    "Callable[[Tensor], bool]", torch._C._functorch.is_functorch_wrapped_tensor
)  # by vmap, grad, jvp


class Kept:
    """Keeps the last value that a module has computed from its parameters and positions.

    On CPU only, in eval mode without gradients. Parameters, and how far training is, are compared by value: whatever
    changed them is seen. It is left out of copies, pickles and state dicts.
    """

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def __call__(self, owner: nn.Module, pos: Positions, make: Callable[[], T], trust: bool = False) -> T:
        """Return `make()`, or what it returned last for the same positions and the same parameters of `owner`.

        `trust` says that they were compared earlier in this forward pass.
        """
        given = list(owner.parameters())
        if (
            owner.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not pos.static
            or not all(map(_plain, given))
        ):
            return make()
        # what is revealed in training changes with it
        steps = [m.progress for m in owner.modules() if hasattr(m, "progress")]
        if self.entry is not None:
            where, known, at, value = self.entry
            if where() is pos and (trust or (at == steps and _equal(known, given))):
                return value
        value = make()
        made = (value,) if isinstance(value, Tensor) else value
        if all(map(_plain, made)) and sum(t.nbytes for t in made) <= LIMIT:
            self.entry = ref(pos), [p.detach().clone() for p in given], steps, value
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


def _equal(known: list[Tensor], given: list[nn.Parameter]) -> bool:
    if len(known) != len(given):
        return False
    return all(a.dtype == b.dtype and a.equal(b) for a, b in zip(known, given, strict=True))


def _plain(x: Tensor) -> bool:
    busy = torch.compiler.is_compiling() or torch.jit.is_tracing() or _wrapped(x)
    return not busy and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter)
