"""Which entries of a table tokens read when there are more of them than it was trained for (arXiv 2404.12096)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32, exact_product
from vispe.errors import OptionError, is_whole

Longer = Literal["tile", "nearest", "linear"]


def places(tokens: int, entries: int, rule: Longer, device: torch.device | None = None) -> Tensor:
    """Return where in a table of one axis its tokens read, (tokens,) float64.

    'tile' starts over at the end (recurrent positions): ``i mod entries``. 'nearest' gives neighbours one entry
    (grouped positions): ``floor(i / ceil(tokens / entries))``. Both leave fewer tokens where they were. 'linear'
    spreads the table over any number of tokens, its ends on theirs: ``i (entries - 1) / (tokens - 1)``.

    Raises:
        OptionError: there is no such rule.

    Example:
        >>> places(7, 3, "tile").tolist(), places(7, 3, "nearest").tolist(), places(3, 5, "linear").tolist()
        ([0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0], [0.0, 2.0, 4.0])
    """
    if rule not in get_args(Longer):
        raise OptionError(f"rule must be one of {', '.join(get_args(Longer))}, got {rule!r}.")
    number = torch.arange(tokens, dtype=torch.float64, device=device)
    if rule == "tile":
        return number.remainder(entries)
    if rule == "nearest":
        # not -(-tokens // entries): ONNX rounds the quotient of a negative symbolic size towards zero
        return (number / ((tokens + entries - 1) // entries)).floor()
    return number * ((entries - 1) / max(tokens - 1, 1))


def stretched(tokens: int, trained: int, longest: int) -> Tensor:
    """Return where the authors read a table of `longest` entries made from one of `trained`, (tokens,) int64.

    Up to the trained length ids are ``i * (longest // trained)``, beyond they are i: they jump at the next token.
    `places` with 'linear' has no such jump.

    Args:
        tokens: how many.
        trained: length that the model was trained with.
        longest: entries of the table.

    Raises:
        OptionError: a count is not a whole number above 0.
    """
    for name, count in (("tokens", tokens), ("trained", trained), ("longest", longest)):
        if not is_whole(count) or count < 1:
            raise OptionError(f"{name} needs a whole number above 0, got {name}={count!r}.")
    number = torch.arange(tokens)
    return number * max(longest // trained, 1) if tokens <= trained else number


def read_longer(table: Tensor, old: tuple[int, ...], new: tuple[int, ...], rule: Longer) -> Tensor:
    """Return a table (1, prod(old), d) as the tokens of grid `new` read it, axis by axis (1, prod(new), d)."""
    values = table.reshape(*old, -1)
    for axis, (entries, tokens) in enumerate(zip(old, new, strict=True)):
        place = places(tokens, entries, rule, table.device)
        if rule != "linear":
            values = values.index_select(axis, place.long())
            continue
        # each token takes from the two entries beside it, by its distance to them
        weights = (1 - (place[:, None] - torch.arange(entries, device=place.device)).abs()).clamp(min=0)
        exact = at_least_float32(values).movedim(axis, 0)
        mixed = exact_product(weights.to(exact), exact.flatten(1)).unflatten(1, exact.shape[1:])
        values = mixed.movedim(0, axis)
    return values.flatten(0, -2)[None].to(table.dtype)
