"""Extension of learned tables to more tokens than they were trained for (arXiv 2404.12096)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32, exact_product
from vispe.errors import OptionError, is_integer

Longer = Literal["tile", "nearest", "linear"]


def places(tokens: int, entries: int, rule: Longer, device: torch.device | None = None) -> Tensor:
    """Return the indices into a table of one axis that its tokens read, (tokens,) float64.

    'tile' repeats the table (recurrent positions): ``i mod entries``. 'nearest' shares an entry among neighbours
    (grouped positions): ``floor(i / ceil(tokens / entries))``. Both leave the indices of shorter sequences unchanged.
    'linear' interpolates for any number of tokens, with aligned corners: ``i (entries - 1) / (tokens - 1)``.

    Raises:
        OptionError: the rule does not exist.

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


def extended_indices(tokens: int, trained: int, longest: int) -> Tensor:
    """Return the indices that the authors use with a table of `longest` entries made from `trained`, (tokens,) int64.

    Up to the trained length, indices are ``i * (longest // trained)``, beyond it i: they jump at the next token.
    `places` with 'linear' has no such jump.

    Args:
        tokens: number of tokens.
        trained: sequence length in training.
        longest: entries of the table.

    Raises:
        OptionError: a count is not an integer above 0.
    """
    for name, count in (("tokens", tokens), ("trained", trained), ("longest", longest)):
        if not is_integer(count) or count < 1:
            raise OptionError(f"stretched needs an integer above 0 for {name}, got {name}={count!r}.")
    number = torch.arange(tokens)
    return number * max(longest // trained, 1) if tokens <= trained else number


def extend_table(table: Tensor, old: tuple[int, ...], new: tuple[int, ...], rule: Longer) -> Tensor:
    """Return a table (1, prod(old), d) extended axis by axis to the tokens of grid `new` (1, prod(new), d)."""
    values = table.reshape(*old, -1)
    for axis, (entries, tokens) in enumerate(zip(old, new, strict=True)):
        index = places(tokens, entries, rule, table.device)
        if rule != "linear":
            values = values.index_select(axis, index.long())
            continue
        # linear interpolation between the two adjacent entries
        weights = (1 - (index[:, None] - torch.arange(entries, device=index.device)).abs()).clamp(min=0)
        exact = at_least_float32(values).movedim(axis, 0)
        mixed = exact_product(weights.to(exact), exact.flatten(1)).unflatten(1, exact.shape[1:])
        values = mixed.movedim(0, axis)
    return values.flatten(0, -2)[None].to(table.dtype)
