"""Prompts with several items in arbitrary order, assembled from pieces of tokens and pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens with their pixels.

    Attributes:
        tokens: (n,) int64.
        inputs: further inputs of the model, such as pixel_values; pieces are concatenated along the first axis.
        per_token: per-token inputs, such as mm_token_type_ids, (n,); 0 for pieces without them.
    """

    tokens: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    per_token: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class OrderedPrompt:
    """Prompt with its items in a specific order.

    Attributes:
        inputs: inputs of the model, a batch of one.
        items: token range of each item, in order.
        answer: token range of the answer.
    """

    inputs: dict[str, Any]
    items: tuple[slice, ...]
    answer: slice

    @property
    def asking(self) -> slice:
        """Token range whose logits predict the answer."""
        return slice(self.answer.start - 1, self.answer.stop - 1)

    @property
    def wanted(self) -> Tensor:
        """Tokens of the answer, (m,)."""
        return self.inputs["input_ids"][0, self.answer]


@dataclass(frozen=True, eq=False)
class Prompt:
    """Items, such as images, a question about them, and its answer.

    >>> items = [Piece(torch.tensor([7, k])) for k in range(3)]
    >>> prompt = Prompt(items, answer=Piece(torch.tensor([9])), after=Piece(torch.tensor([5])))
    >>> prompt.arranged([2, 0, 1]).inputs["input_ids"].tolist()
    [[7, 2, 7, 0, 7, 1, 5, 9]]

    Attributes:
        items: items whose order does not affect the answer.
        answer: the answer.
        before: tokens before the items.
        after: tokens between items and answer, such as the question.

    Raises:
        OptionError: there are no items, or the answer is empty.
    """

    items: Sequence[Piece]
    answer: Piece
    before: Piece | None = None
    after: Piece | None = None

    def __post_init__(self) -> None:
        if not self.items or not len(self.answer.tokens):
            raise OptionError(
                f"Prompt: needs one or more items and an answer, got {counted(len(self.items), 'item')} and an "
                f"answer of {counted(len(self.answer.tokens), 'token')}."
            )

    def arranged(self, order: Iterable[int], device: torch.device | str = "cpu") -> OrderedPrompt:
        """Return the prompt with item `order[k]` at index k.

        Raises:
            OptionError: `order` is not a permutation of the items.
            ShapeError: the length of a per-token input differs from that of the tokens.
        """
        order = [int(k) for k in order]
        if sorted(order) != list(range(len(self.items))):
            raise OptionError(
                f"Prompt: order must be a permutation of {counted(len(self.items), 'item')}, got {order}."
            )
        pieces = [p for p in (self.before, *(self.items[k] for k in order), self.after, self.answer) if p]
        first = self.before is not None
        bounds = torch.tensor([len(p.tokens) for p in pieces]).cumsum(0).tolist()
        slots = [slice(a, b) for a, b in zip([0, *bounds], bounds, strict=False)]
        inputs: dict[str, Any] = {"input_ids": torch.cat([p.tokens for p in pieces])[None]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in sorted({name for p in pieces for name in p.inputs}):
            inputs[name] = torch.cat([p.inputs[name] for p in pieces if name in p.inputs])
        for name in sorted({name for p in pieces for name in p.per_token}):
            values = [p.per_token.get(name, torch.zeros_like(p.tokens)) for p in pieces]
            if any(v.shape != p.tokens.shape for v, p in zip(values, pieces, strict=True)):
                raise ShapeError(
                    f"Prompt: {name} must have one value per token, got {[tuple(v.shape) for v in values]}."
                )
            inputs[name] = torch.cat(values)[None]
        inputs = {name: value.to(device) for name, value in inputs.items()}
        return OrderedPrompt(inputs, tuple(slots[first : first + len(order)]), slots[-1])
