"""Token orders for any-order autoregressive models, and positions of the next token (sigma-GPT, arXiv 2404.09562).

An order is a permutation of token indices: order[k] is the token at step k. The first `prompt` tokens stay first and in
order: a known prompt, or the prefix of a grid.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted, is_integer
from vispe.grid.per_token import PerToken
from vispe.grid.positions import Positions

Box = tuple[int, int, int, int]  # row start and stop, column start and stop
# attributes of positions: coordinates and cell of the next token, and the samplers that were applied before ordering
TARGET, TARGET_CELL, TARGET_SAMPLED = "target", "target_cell", "target_moved"


def raster(tokens: int) -> Tensor:
    """Return the raster order (n,) int64: left to right, row by row.

    Raises:
        OptionError: `tokens` is not a positive integer.
    """
    _check(tokens, 0)
    return torch.arange(tokens)


def shuffled(
    keys: Tensor | int, prompt: int = 0, generator: torch.Generator | None = None, device: str | None = None
) -> Tensor:
    """Return a random order: tokens after the prompt sorted by keys.

    Args:
        keys: one number per token (..., n); or the number of tokens, to draw uniform keys.
        prompt: number of tokens that stay first.
        generator: random generator of the keys; the global one by default.
        device: device of drawn keys.

    Returns:
        (..., n) int64; tokens with equal keys keep their order.

    Raises:
        OptionError: the prompt is longer than the sequence, or both keys and a generator are given.
    """
    if not isinstance(keys, Tensor):
        _check(keys, prompt)
        keys = torch.rand(keys, generator=generator, device=device)
    elif generator is not None:
        raise OptionError(
            "shuffled: keys determine the order, so a generator has no effect. Pass either keys or a generator."
        )
    _check(keys.shape[-1], prompt)
    # sort only the tokens after the prompt
    front = torch.arange(prompt, device=keys.device).expand(*keys.shape[:-1], prompt)
    return torch.cat([front, keys[..., prompt:].argsort(dim=-1, stable=True) + prompt], -1)


def fractal(tokens: int, prompt: int = 0) -> Tensor:
    """Return the order of breadth-first bisection (n,): the middle first, then the middles of both halves, and so on.

    The halves of the first, third, ... range are queued right before left, those of the others left before right.

    Args:
        tokens: number of tokens, n.
        prompt: number of tokens that stay first.

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
        # breadth first: both halves go to the end of the queue
        halves = [(middle + 1, stop), (start, middle)]
        queue.extend(halves if step % 2 == 0 else halves[::-1])
        step += 1
    return torch.tensor(order)


def quadtree(height: int, width: int) -> Tensor:
    """Return the order of a grid by breadth-first bisection of boxes (h * w,): the centre first, then four parts.

    The parts are the four rectangles around the centre cell, each with one arm of its row or column, in the order upper
    left, upper right, lower left, lower right, reversed for every second box. A single row is `fractal`.

    Args:
        height: number of rows.
        width: number of columns.

    Raises:
        OptionError: a side is not a positive integer.

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
        # pinwheel around the centre: together they are the box without the centre
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
    """Return inputs and next-token targets of an autoregressive model, both (b, n - 1).

    Args:
        x: token ids (b, n).
        order: (n,) or (b, n).

    Raises:
        ShapeError: the order has another shape.
        OptionError: the order is not a permutation.
    """
    if x.ndim != 2 or order.shape[-1] != x.shape[1] or order.ndim not in (1, 2):
        raise ShapeError(
            f"The order of tokens {tuple(x.shape)} must have shape ({x.shape[-1]},) or {tuple(x.shape)}, got "
            f"{tuple(order.shape)}."
        )
    _check_permutation(order)
    moved = x.gather(1, order.expand_as(x))
    return moved[:, :-1], moved[:, 1:]


def reorder_positions(pos: Positions, order: Tensor) -> Positions:
    """Return positions in an order, with the position of the next token as attributes.

    The encoding `target` adds an embedding of the next position. The last token has none, nor do tokens followed by one
    without a position. Apply samplers first and order the result of their `prepare`.

    Args:
        pos: positions of n tokens.
        order: (n,) or (b, n), a permutation of all of them, including prefix tokens.

    Raises:
        ShapeError: the order has another length.
        OptionError: the order is not a permutation.
    """
    order = order[None] if order.ndim == 1 else order
    if order.ndim != 2 or order.shape[1] != pos.tokens:
        raise ShapeError(
            f"The order of {counted(pos.tokens, 'token')}, including the prefix, must have shape ({pos.tokens},) or "
            f"(b, {pos.tokens}), got {tuple(order.shape)}."
        )
    _check_permutation(order)
    current = pos.gather(order)
    # roll wraps the last token around to the first, which is masked below
    following = pos.gather(order.roll(-1, 1))
    last = torch.arange(pos.tokens, device=order.device) == pos.tokens - 1
    has_next = following.spatial & ~last
    targets: dict[str, Any] = {
        TARGET: PerToken(following.coords, (1,)),
        TARGET_SAMPLED: sorted(current.attrs.get("sampled", ())),
        TARGET_CELL: PerToken(torch.where(has_next, following.numbers(), -1), (1,)),
    }
    return current.replace(attrs={**current.attrs, **targets})


def _check_permutation(order: Tensor) -> None:
    """Raise `OptionError` unless every row of an order (n,) or (b, n) has each index once; not in compiled programs."""
    if torch.compiler.is_compiling():
        return
    n = order.shape[-1]
    rows = order.reshape(-1, n)
    # a repeated index would drop another token
    wrong = (rows.sort(-1).values != torch.arange(n, device=order.device)).any(-1)
    if bool(wrong.any()):
        first = [int(i) for i in rows[wrong][0]]
        raise OptionError(f"An order must be a permutation of the token indices 0 to {n - 1}, got {first}.")


def _check(tokens: object, prompt: object) -> None:
    """Raise `OptionError` unless `tokens` is a positive integer and 0 <= prompt <= tokens."""
    if not is_integer(tokens) or tokens < 1:  # type: ignore[operator]
        raise OptionError(f"An order needs a positive number of tokens, an integer, got {tokens!r}.")
    if not is_integer(prompt) or not 0 <= prompt <= tokens:  # type: ignore[operator]
        raise OptionError(f"prompt must be an integer from 0 to {tokens} tokens, got prompt={prompt!r}.")
