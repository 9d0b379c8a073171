"""Checks and helpers of a conversion: supported encodings, weights of `Encoding` instances, saved specs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.compose import Compose
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.parts.rotary.rope.rope_base import RopeBase
from vispe.encodings.parts.rotary.rope.smallest_base import BaseTooSmall
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost, counted
from vispe.grid import Grid

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


def constructor_of(stock: type[nn.Module]) -> Callable[..., None]:
    """Return the constructor of a converted class, which builds an instance of the stock class.

    Args:
        stock: the original class; its constructor may itself be patched to convert the instance.
    """

    @functools.wraps(stock.__init__, updated=())
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if vars(type(self)).get("__init__") is not __init__:
            raise UnsupportedHost(
                f"{type(self).__name__} must not derive from the class of a converted {stock.__name__}. Derive it from "
                f"{stock.__name__} and call vispe.convert on the model."
            )
        self.__class__ = stock
        self.__init__(*args, **kwargs)

    return __init__


def make_converted_class(
    mixin: type[Any],
    stock: type[nn.Module],
    family: type[nn.Module],
    overridden: Sequence[str],
    host: str,
    plain: str,
) -> type[Any]:
    """Return the converted class of a model class: a subclass of `mixin` and `stock`, in this order.

    Args:
        mixin: the overridden methods.
        stock: the original class.
        family: the class of the library that `stock` is or derives from.
        overridden: names of the methods that `mixin` replaces.
        host: name of the library.
        plain: models that can be converted instead, for the message.

    Raises:
        UnsupportedHost: `stock` is a subclass of `family` that overrides one of these methods itself.
    """
    changed = [n for n in overridden if getattr(stock, n) is not getattr(family, n)]
    if changed:
        raise UnsupportedHost(
            f"{stock.__name__} overrides {', '.join(changed)} of {host}'s {family.__name__}, which vispe would "
            f"replace. Convert a plain {plain}, or use vispe.Attention in your own blocks."
        )
    namespace = {"__module__": mixin.__module__, "__doc__": stock.__doc__, "__init__": constructor_of(stock)}
    return type(f"Vispe{stock.__name__}", (mixin, stock), namespace)


def copy_weights(encoding: Encoding, source: Encoding, host: str) -> None:
    """Copy the weights of an `Encoding` instance that the user passed.

    Args:
        encoding: destination, built for the host.
        source: the instance passed by the user.
        host: noun for the host in messages: 'model' or 'tower'.

    Raises:
        UnsupportedCombination: names or shapes of the weights differ.
    """
    theirs, ours = source.state_dict(), encoding.state_dict()
    if differing := sorted(set(theirs) ^ set(ours)):
        raise UnsupportedCombination(
            f"{source.name}: this {host} needs {counted(len(ours), 'weight')}, got {len(theirs)} ({differing[0]} "
            f"exists in only one of them). Create the encoding for this {host}, or pass its spec to initialise new "
            "weights."
        )
    for name, value in ours.items():
        if theirs[name].shape != value.shape:
            raise UnsupportedCombination(
                f"{source.name}: this {host} needs {name} of shape {tuple(value.shape)}, got "
                f"{tuple(theirs[name].shape)}. Create the encoding for this {host}, or pass its spec to initialise new "
                "weights."
            )
        value.copy_(theirs[name])


def feature_blocks(depth: int, indices: int | list[int] | None, host: str = "model") -> tuple[set[int], int]:
    """Return the indices of the blocks whose features are returned, and the last of them.

    Args:
        depth: number of blocks of the model.
        indices: block indices, negative ones from the end; an integer for the last blocks; None for all.
        host: noun for the host in messages: 'model' or 'tower'.

    Raises:
        OptionError: a block does not exist, or `indices` is empty.
    """
    if indices is None or isinstance(indices, int):
        count = depth if indices is None else indices
        take = list(range(depth - count, depth))
    else:
        take = [i + depth if i < 0 else i for i in indices]
    if not take or min(take) < 0 or max(take) >= depth:
        raise OptionError(
            f"indices must select some of the {counted(depth, 'block')} of the {host}, got {indices}."
        )
    return set(take), max(take)


def attach(module: nn.Module, encoding: Encoding | None) -> None:
    """Set `pos_enc` of a module to an encoding, in training or evaluation mode as the module, or None.

    None is not registered as a module: torch would accept every checkpoint entry below a registered None.
    """
    if encoding is None:
        module.__dict__["pos_enc"] = None
    else:
        module.register_module("pos_enc", encoding.train(module.training))


def composed(encodings: list[Encoding]) -> Encoding | None:
    """Return the composition of several encodings; a single encoding itself; None for an empty sequence."""
    return Compose(encodings) if len(encodings) > 1 else encodings[0] if encodings else None


def table_like(
    table: nn.Parameter, like: Tensor, resample: Callable[[Tensor], Tensor] | None = None
) -> nn.Parameter:
    """Return a table in the device and dtype of `like`, optionally resampled; `table` itself if nothing changes."""
    if resample is None and (table.device, table.dtype) == (like.device, like.dtype):
        return table
    values = table.detach() if resample is None else resample(table.detach())
    return nn.Parameter(values.to(like), requires_grad=table.requires_grad)


def with_training_grid(
    spec: Sequence[dict[str, Any]], parts: Sequence[Encoding], grid: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Return a spec with the training grid as `reference` of each encoding that uses it.

    A model built from the returned spec for another image size then computes the same function.

    Args:
        spec: parsed terms.
        parts: the encoding of each term.
        grid: the grid of the training resolution.
    """
    return [
        {**term, "reference": list(grid)} if uses_reference(part, grid) else term
        for term, part in zip(spec, parts, strict=True)
    ]


def uses_reference(encoding: Encoding, grid: tuple[int, ...]) -> bool:
    """Return whether an encoding uses the host's training grid; encodings reject a training grid without effect."""
    accepted = inspect.signature(type(encoding)).parameters
    if "reference" not in accepted or getattr(encoding, "reference", None) is not None:
        return False
    options = {name: getattr(encoding, name) for name in accepted}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        try:
            type(encoding)(**{**options, "reference": list(grid)})
        except OptionError:
            return False
    return True


def base_too_small(
    parts: Sequence[Encoding], shape: tuple[int, ...] | None, reference: tuple[int, ...] | None
) -> list[BaseTooSmall]:
    """Return the rotary encodings whose base is too small for a grid; empty if the host has no fixed grid."""
    if shape is None:
        return []
    grid = Grid(shape, reference=reference)
    reports = [e.base_too_small(grid) for e in parts if isinstance(e, RopeBase)]
    return [report for report in reports if report is not None]
