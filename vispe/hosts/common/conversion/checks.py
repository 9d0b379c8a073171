"""Checks of a conversion: encodings that a host supports, and modules whose classes can be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.errors import UnsupportedCombination, UnsupportedHost, counted
from vispe.hosts.common.host_family import HostFamily
from vispe.hosts.common.layer_access import refuse_parametrized

# number of axes: an encoding supported by every host with this number
EXAMPLES = {
    1: "alibi",
    2: "alibi2d",
    3: "alibi3d",
}
_PER_AXIS = ("split", "spacing", "reference")  # options with one number per axis


def check_axes(encoding: Encoding, axes: int, stock: type[nn.Module]) -> None:
    """Raise `UnsupportedCombination` if an encoding, or one of its options, requires another number of axes."""
    if axes not in encoding.ndim:
        raise UnsupportedCombination(_other_axes(encoding.name, encoding.ndim, axes, stock))
    for option in _PER_AXIS:
        value = getattr(encoding, option, None)
        if isinstance(value, list | tuple) and len(value) != axes:
            raise UnsupportedCombination(
                f"{encoding.name}: {option} must have one number per axis of the {axes}-axis grid of {stock.__name__}, "
                f"got {value}."
            )


def check_term(cls: type[Encoding], axes: int, stock: type[nn.Module]) -> None:
    """Raise `UnsupportedCombination` if an encoding class does not support a number of axes with any options."""
    if axes not in cls.ndim:
        raise UnsupportedCombination(_other_axes(cls.name, cls.ndim, axes, stock))


def _other_axes(name: str, ndim: Sequence[int], axes: int, stock: type[nn.Module]) -> str:
    return (
        f"{name} supports {counted(' or '.join(map(str, ndim)), 'axis')}, got the {axes}-axis grid of "
        f"{stock.__name__}. Use an encoding for {counted(axes, 'axis')}, such as {EXAMPLES[axes]}."
    )


def check_outside(cls: type[Encoding], axes: int, stock: type[nn.Module]) -> None:
    """Raise `UnsupportedCombination` if an encoding acts outside attention, for hosts that only replace layers."""
    if issubclass(cls, Sampler):
        raise UnsupportedCombination(
            f"{cls.name} samples positions for one grid of all tokens, which {stock.__name__} does not "
            f"have. Use a plain timm ViT or Eva, as in '{cls.name}+{cls.reader}'."
        )
    if issubclass(cls, Additive | Mixing) or not (issubclass(cls, Biased | Rotary) or cls.name == "none"):
        raise UnsupportedCombination(
            f"{cls.name} acts on the tokens outside attention, which {stock.__name__} does not support. Use an "
            f"encoding that acts inside attention, such as {EXAMPLES[axes]}."
        )


def check_part(e: Encoding, family: Any, stock: type[Any], axes: int, keep_rope: bool) -> None:
    """Raise `UnsupportedCombination` if no model of a `HostFamily` supports an encoding, for any attention layers."""
    check_axes(e, axes, stock)
    if isinstance(e, Mixing) and not family.has_block_hook:
        raise UnsupportedCombination(
            f"{e.name} mixes tokens between blocks on one grid, got {stock.__name__}, which packs patches of several "
            "grids. Use a plain ViT such as 'vit_base_patch16_224', or another encoding."
        )
    if e.prefix_from and not family.has_late_prefix:
        raise UnsupportedCombination(
            f"{e.name} needs prefix tokens that enter at block {e.prefix_from}, which {stock.__name__} does not "
            "support. Convert a plain ViT such as 'vit_base_patch16_224', or omit late_prefix."
        )
    if isinstance(e, Mixing) and e.per_layer:
        raise UnsupportedCombination(
            f"{e.name} mixes tokens between blocks and needs one set of parameters for all blocks, got per_layer=True. "
            "Set per_layer to False."
        )
    if isinstance(e, Rotary) and keep_rope:
        raise UnsupportedCombination(
            f"rope + {e.name}: two rotary encodings would rotate the same channels. Omit 'rope' (keep_rope=False) to "
            f"replace the rotary embedding of {stock.__name__}."
        )


def refuse_patched(module: nn.Module, where: str, names: Sequence[str]) -> None:
    """Raise `UnsupportedHost` if methods are patched on an instance, as they would hide methods of the new class."""
    patched = [name for name in names if name in vars(module)]
    if patched:
        raise UnsupportedHost(
            f"{where}: {', '.join(patched)} is patched on the instance, which would hide the encoding. Convert the "
            "model before patching it."
        )


def check_swaps(model: Any, family: HostFamily) -> None:
    """Raise `UnsupportedHost` if a module has no converted class, or has patched methods or parametrized weights."""
    for path, module, cls in family.swaps(model):
        if cls is None:
            raise UnsupportedHost(
                f"{path} must be one of {', '.join(c.__name__ for c in family.known)}, got {type(module).__name__}. "
                "Use an additive encoding, or vispe.Attention in your own blocks."
            )
        refuse_patched(module, path, family.patchable)
        refuse_parametrized(path, module)
