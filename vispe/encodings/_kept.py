"""What a model that is not being trained computes from its parameters alone, kept between forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from vispe.grid import Positions

T = TypeVar("T", Tensor, tuple[Tensor, Tensor])
Entry = tuple[ref[Positions], list[Tensor], Any]
wrapped = cast(
    "Callable[[Tensor], bool]", torch._C._functorch.is_functorch_wrapped_tensor
)  # by vmap, grad, jvp
LIMIT = 64 << 20  # bytes per module
_kept: WeakKeyDictionary[nn.Module, Entry] = WeakKeyDictionary()


def kept(owner: nn.Module, pos: Positions, make: Callable[[], T], trust: bool = False) -> T:
    """Return `make()`, or what it returned last for the same positions and the same parameters of `owner`.

    Kept on CPU only, in eval mode without gradients. Parameters are compared by value: whatever changed them is seen.
    `trust` says that they were compared earlier in this forward pass.
    """
    given = list(owner.parameters())
    if owner.training or torch.is_grad_enabled() or not pos.static or not all(map(_plain, given)):
        return make()
    where, known, value = _kept.get(owner, (None, [], None))
    same_place = where is not None and where() is pos and len(known) == len(given)
    if same_place and (
        trust or all(a.dtype == b.dtype and a.equal(b) for a, b in zip(known, given, strict=True))
    ):
        return value
    value = make()
    made = (value,) if isinstance(value, Tensor) else value
    if all(map(_plain, made)) and sum(t.nbytes for t in made) <= LIMIT:
        _kept[owner] = ref(pos), [p.detach().clone() for p in given], value
    return value


def _plain(x: Tensor) -> bool:
    busy = torch.compiler.is_compiling() or torch.jit.is_tracing() or wrapped(x)
    return not busy and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter)
