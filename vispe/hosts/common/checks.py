"""What every host does when it takes an encoding in: checks, weights of finished encodings, and what is saved."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.compose import Compose
from vispe.encodings.parts.rope import RopeBase, TooSmall
from vispe.encodings.parts.sampler import Sampler
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.grid import Grid

EXAMPLES = {
    1: "alibi",
    2: "alibi2d",
    3: "alibi3d",
}  # for each number of axes an encoding that every host takes
_PER_AXIS = ("split", "spacing", "reference")  # options with one number for each axis


def check_axes(encoding: Encoding, axes: int, stock: type[nn.Module]) -> None:
    """Raise when an encoding, or one of its options, is for grids with another number of axes."""
    if axes not in encoding.ndim:
        raise UnsupportedCombination(_other_axes(encoding.name, encoding.ndim, axes, stock))
    for option in _PER_AXIS:
        value = getattr(encoding, option, None)
        if isinstance(value, list | tuple) and len(value) != axes:
            raise UnsupportedCombination(
                f"{encoding.name} has {option}={value}, but the tokens of {stock.__name__} form a {axes}-axis grid; "
                "give one number per axis."
            )


def check_term(cls: type[Encoding], axes: int, stock: type[nn.Module]) -> None:
    """Raise when no encoding of a class is for grids with this number of axes, whatever its options are."""
    if axes not in cls.ndim:
        raise UnsupportedCombination(_other_axes(cls.name, cls.ndim, axes, stock))


def _other_axes(name: str, ndim: Sequence[int], axes: int, stock: type[nn.Module]) -> str:
    return (
        f"{name} is for {' or '.join(map(str, ndim))} axes, but the tokens of {stock.__name__} form a {axes}-axis "
        f"grid; use an encoding for {axes} axes, such as {EXAMPLES[axes]}."
    )


def check_outside(cls: type[Encoding], axes: int, stock: type[nn.Module]) -> None:
    """Raise when an encoding acts outside of attention, for hosts whose attention layers alone are replaced."""
    if issubclass(cls, Sampler):
        raise UnsupportedCombination(
            f"{cls.name} draws positions for one grid of all tokens, which {stock.__name__} does not have; use it in a "
            f"plain ViT or Eva of timm, as in '{cls.name}+{cls.reader}'."
        )
    if issubclass(cls, Additive | Mixing) or not (issubclass(cls, Biased | Rotary) or cls.name == "none"):
        raise UnsupportedCombination(
            f"{cls.name} acts on the tokens outside of attention, which {stock.__name__} does not support; use an "
            f"encoding that acts in attention, such as {EXAMPLES[axes]}."
        )


def check_part(e: Encoding, family: Any, stock: type[Any], axes: int, keep_rope: bool) -> None:
    """Raise when an encoding has no place in a model of a `Family`, whatever its layers are."""
    check_axes(e, axes, stock)
    if isinstance(e, Mixing) and not family.mixes:
        raise UnsupportedCombination(
            f"{e.name} mixes tokens between blocks, on one grid; {stock.__name__} packs patches of several grids, so "
            "use a plain ViT such as 'vit_base_patch16_224' with it, or another encoding here."
        )
    if e.prefix_from and not family.holds_back:
        raise UnsupportedCombination(
            f"{e.name} lets prefix tokens in from block {e.prefix_from} on, and {stock.__name__} has them in all; "
            "convert a plain ViT such as 'vit_base_patch16_224', or leave late_prefix out."
        )
    if isinstance(e, Mixing) and e.per_layer:
        raise UnsupportedCombination(
            f"{e.name} mixes tokens between blocks; keep its parameters in one module for all blocks (per_layer False)."
        )
    if isinstance(e, Rotary) and keep_rope:
        raise UnsupportedCombination(
            f"rope + {e.name} was asked, but two rotary encodings would turn the same channels; leave 'rope' out, "
            f"keep_rope=False, to replace that of {stock.__name__}."
        )


def refuse_patched(module: nn.Module, where: str, names: Sequence[str]) -> None:
    """Raise when an instance carries methods of its own, which would hide those of the class it gets."""
    patched = [name for name in names if name in vars(module)]
    if patched:
        raise UnsupportedHost(
            f"{where} has {', '.join(patched)} replaced on the instance, which would hide the encoding; convert the "
            "model first and patch it then."
        )


def constructor_of(stock: type[nn.Module]) -> Callable[..., None]:
    """Return the constructor of a converted class: it builds the stock class, which only `convert` can change.

    Args:
        stock: the class that was converted; its own constructor may convert what it builds.
    """

    @functools.wraps(stock.__init__, updated=())
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if vars(type(self)).get("__init__") is not __init__:
            raise UnsupportedHost(
                f"{type(self).__name__} derives from the class of a converted {stock.__name__}, which only "
                f"vispe.convert can complete; derive it from {stock.__name__} and convert the model."
            )
        self.__class__ = stock
        self.__init__(*args, **kwargs)

    return __init__


def counterpart(
    mixin: type[Any],
    stock: type[nn.Module],
    family: type[nn.Module],
    overridden: Sequence[str],
    host: str,
    plain: str,
) -> type[Any]:
    """Return the converted counterpart of a model class: `mixin` in front of `stock`.

    Args:
        mixin: what changes in it.
        stock: the class.
        family: the class of the host that it is, or derives from.
        overridden: methods that `mixin` replaces.
        host: name of the library.
        plain: what could be converted instead, in words.

    Raises:
        UnsupportedHost: the class is a subclass of the host's that changes what vispe replaces.
    """
    changed = [n for n in overridden if getattr(stock, n) is not getattr(family, n)]
    if changed:
        raise UnsupportedHost(
            f"{stock.__name__} is a subclass of {host}'s {family.__name__} with its own {', '.join(changed)}, which "
            f"vispe would replace; convert a plain {plain}, or use vispe.Attention in your own blocks."
        )
    inside = {"__module__": mixin.__module__, "__doc__": stock.__doc__, "__init__": constructor_of(stock)}
    return type(f"Vispe{stock.__name__}", (mixin, stock), inside)


def take_over(encoding: Encoding, source: Encoding, host: str) -> None:
    """Copy the weights of a finished encoding, or raise when they are for another host.

    Args:
        encoding: what was made for the host.
        source: what was given.
        host: what the host is called in errors: 'model' or 'tower'.
    """
    theirs, ours = source.state_dict(), encoding.state_dict()
    if differing := sorted(set(theirs) ^ set(ours)):
        raise UnsupportedCombination(
            f"The given {source.name} has {len(theirs)} weights, but this {host} needs {len(ours)} ({differing[0]} is "
            f"in one of them only); make it for this {host}, or give its spec to start anew."
        )
    for name, value in ours.items():
        if theirs[name].shape != value.shape:
            raise UnsupportedCombination(
                f"The given {source.name} has {name} of shape {tuple(theirs[name].shape)}, but this {host} needs "
                f"{tuple(value.shape)}; make it for this {host}, or give its spec to start anew."
            )
        value.copy_(theirs[name])


def taken_blocks(depth: int, indices: int | list[int] | None, host: str = "model") -> tuple[set[int], int]:
    """Return which blocks to take features from, and the last of them.

    Args:
        depth: blocks of the model.
        indices: block numbers, negative ones from the end; a number for the last so many; None for all.
        host: what the host is called in errors: 'model' or 'tower'.

    Raises:
        OptionError: there is no such block, or none was asked for.
    """
    if indices is None or isinstance(indices, int):
        count = depth if indices is None else indices
        take = list(range(depth - count, depth))
    else:
        take = [i + depth if i < 0 else i for i in indices]
    if not take or min(take) < 0 or max(take) >= depth:
        raise OptionError(f"Features of blocks {indices} were asked, but the {host} has {depth} blocks.")
    return set(take), max(take)


def attach(module: nn.Module, encoding: Encoding | None) -> None:
    """Give a module its encoding, or None for none.

    None stays out of the registered modules: torch takes whatever a checkpoint has below a registered None for known.
    """
    if encoding is None:
        module.__dict__["pos_enc"] = None
    else:
        module.register_module("pos_enc", encoding)


def joined(encodings: list[Encoding]) -> Encoding | None:
    """Return one encoding for several, itself for one, None for none."""
    return Compose(encodings) if len(encodings) > 1 else encodings[0] if encodings else None


def moved(
    table: nn.Parameter, like: Tensor, resample: Callable[[Tensor], Tensor] | None = None
) -> nn.Parameter:
    """Return a table on the device and in the dtype of `like`, resampled if need be; itself if nothing changes."""
    if resample is None and (table.device, table.dtype) == (like.device, like.dtype):
        return table
    values = table.detach() if resample is None else resample(table.detach())
    return nn.Parameter(values.to(like), requires_grad=table.requires_grad)


def with_training_grid(
    spec: Sequence[dict[str, Any]], parts: Sequence[Encoding], grid: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Return a spec that says the training grid wherever an encoding asks for it and it has an effect.

    A model that is built again from it, for another size of images, then computes the same as before.

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
    """Return whether the training grid is left to the host; encodings refuse one that has no effect."""
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


def too_small(
    parts: Sequence[Encoding], shape: tuple[int, ...] | None, reference: tuple[int, ...] | None
) -> list[TooSmall]:
    """Return rotations whose base is too small for a grid, where the host has one."""
    if shape is None:
        return []
    grid = Grid(shape, reference=reference)
    found = [e.too_small(grid) for e in parts if isinstance(e, RopeBase)]
    return [one for one in found if one is not None]
