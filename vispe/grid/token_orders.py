"""Orders in which tokens are read or written, and places of what comes next (arXiv 2404.09562).

An order is a permutation of token numbers: order[k] is the token that stands at place k. The first `prompt` tokens stay
in front, as they are: what is known, or the prefix of a grid.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, is_whole
from vispe.grid.coordinates import PerToken, Positions

Box = tuple[int, int, int, int]  # rows from .. to, columns from .. to, ends excluded
# attributes of positions: coordinates and cell of the next place, and what had moved the tokens when they were read
TARGET, TARGET_CELL, TARGET_MOVED = "target", "target_cell", "target_moved"


def raster(tokens: int) -> Tensor:
    """Return the numbers from 0 on (n,): left to right, row by row.

    Raises:
        OptionError: `tokens` is not a whole number above 0.
    """
    _check(tokens, 0)
    return torch.arange(tokens)


def shuffled(
    keys: Tensor | int, prompt: int = 0, generator: torch.Generator | None = None, device: str | None = None
) -> Tensor:
    """Return a random order: tokens after the prompt by the size of uniform keys, small first.

    Args:
        keys: one number for each token (..., n); or how many tokens, for keys that are drawn.
        prompt: tokens that stay in front.
        generator: for the draw; the global one by default.
        device: of the draw.

    Returns:
        (..., n) int64; tokens with equal keys stay in their order.

    Raises:
        OptionError: the prompt is longer than the sequence; a generator was given beside keys.
    """
    if not isinstance(keys, Tensor):
        _check(keys, prompt)
        keys = torch.rand(keys, generator=generator, device=device)
    elif generator is not None:
        raise OptionError(
            "shuffled was given keys and a generator; the order of keys is not random, so give one."
        )
    _check(keys.shape[-1], prompt)
    front = torch.arange(prompt, device=keys.device).expand(*keys.shape[:-1], prompt)
    return torch.cat([front, keys[..., prompt:].argsort(dim=-1, stable=True) + prompt], -1)


def fractal(tokens: int, prompt: int = 0) -> Tensor:
    """Return the order of breadth-first bisection (n,): the middle first, then those of both halves, and so on.

    The halves of the first, third, ... range queue up right before left, those of the others left before right.

    Args:
        tokens: how many, n.
        prompt: tokens that stay in front.

    Raises:
        OptionError: the prompt is longer than the sequence.

    Example:
        >>> fractal(7).tolist()
        [3, 5, 1, 4, 6, 2, 0]
    """
    _check(tokens, prompt)
    order, queue, step = list(range(prompt)), deque([(prompt, tokens)]), 0
    while queue:
        start, stop = queue.popleft()
        if start == stop:
            continue
        middle = (start + stop) // 2
        order.append(middle)
        halves = [(middle + 1, stop), (start, middle)]
        queue.extend(halves if step % 2 == 0 else halves[::-1])
        step += 1
    return torch.tensor(order)


def quadtree(height: int, width: int) -> Tensor:
    """Return the order of a grid by breadth-first bisection of boxes (h * w,): the centre first, then four parts.

    The parts are the four rectangles around the centre cell, each with one arm of its row and column: upper left, upper
    right, lower left, lower right, then the other way round, box by box in turn. A single row is `fractal`.

    Args:
        height: rows.
        width: columns.

    Raises:
        OptionError: a side is not a whole number above 0.

    Example:
        >>> quadtree(3, 3).tolist()
        [4, 1, 5, 6, 8, 0, 2, 3, 7]
    """
    _check(height, 0)
    _check(width, 0)
    order: list[int] = []
    queue: deque[Box] = deque([(0, height, 0, width)])
    step = 0
    while queue:
        top, bottom, left, right = queue.popleft()
        if top == bottom or left == right:
            continue
        row, column = (top + bottom) // 2, (left + right) // 2
        order.append(row * width + column)
        # around the centre like a windmill: together they are the box without it
        parts = [
            (top, row, left, column + 1),
            (top, row + 1, column + 1, right),
            (row, bottom, left, column),
            (row + 1, bottom, column, right),
        ]
        queue.extend(parts if step % 2 == 0 else parts[::-1])
        step += 1
    return torch.tensor(order)


def inputs_and_targets(x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a model reads and what it is to say next, both (b, n - 1), of tokens x (b, n) in an order.

    Args:
        x: tokens.
        order: (n,) or (b, n).

    Raises:
        ShapeError: the order is not one of these tokens.
    """
    if x.ndim != 2 or order.shape[-1] != x.shape[1] or order.ndim not in (1, 2):
        raise ShapeError(
            f"An order of tokens {tuple(x.shape)} has the shape ({x.shape[-1]},) or {tuple(x.shape)}, got "
            f"{tuple(order.shape)}."
        )
    moved = x.gather(1, order.expand_as(x))
    return moved[:, :-1], moved[:, 1:]


def ordered(pos: Positions, order: Tensor) -> Positions:
    """Return positions in an order, each of which knows the place that comes after it.

    The encoding `target` adds a table of that place. The last token has none, nor has a token before one without a
    place. Samplers come first: order what their `prepare` returns.

    Args:
        pos: positions of n tokens.
        order: (n,) or (b, n), a permutation of all of them, prefix tokens included.

    Raises:
        ShapeError: the order has another length.
    """
    order = order[None] if order.ndim == 1 else order
    if order.ndim != 2 or order.shape[1] != pos.tokens:
        raise ShapeError(
            f"An order of {pos.tokens} tokens, prefix included, has the shape ({pos.tokens},) or (b, {pos.tokens}), "
            f"got {tuple(order.shape)}."
        )
    now = pos.gather(order)
    # the last token wraps round to the first, which is then hidden
    then = pos.gather(order.roll(-1, 1))
    last = torch.arange(pos.tokens, device=order.device) == pos.tokens - 1
    known = then.spatial & ~last
    targets: dict[str, Any] = {
        TARGET: PerToken(then.coords, (1,)),
        TARGET_MOVED: sorted(now.attrs.get("sampled", ())),
        TARGET_CELL: PerToken(torch.where(known, then.numbers(), -1), (1,)),
    }
    return now.replace(attrs={**now.attrs, **targets})


def _check(tokens: object, prompt: object) -> None:
    """Raise `OptionError` unless there are tokens, and no more of them in the prompt."""
    if not is_whole(tokens) or tokens < 1:  # type: ignore[operator]
        raise OptionError(f"An order needs a whole number of tokens above 0, got {tokens!r}.")
    if not is_whole(prompt) or not 0 <= prompt <= tokens:  # type: ignore[operator]
        raise OptionError(f"prompt needs a whole number from 0 to {tokens} tokens, got prompt={prompt!r}.")
