"""Token indices: ordinary position ids, 0 .. n - 1 in every sequence, with padding and cached tokens.

Masks, packing and caches of the host use only token indices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState


class TokenIndex(NamedTuple):
    """Token indices of a call.

    Attributes:
        ids: token indices (b, s).
        without_padding: whether they count valid tokens only.
        restarts: whether they are the caller's, which may restart: several samples packed into a row.
    """

    ids: Tensor
    without_padding: bool
    restarts: bool


def index_tokens(
    tokens: Tensor,
    of_caller: Tensor | None,
    *,
    cache: Any,
    state: SequenceState | None,
    mask: Tensor | None,
    images: bool,
) -> TokenIndex:
    """Return the token indices of a call.

    Args:
        tokens: tokens (b, s) or (b, s, width).
        of_caller: token indices of the caller (b, s), or None.
        cache: KV cache, or None.
        state: its state before the call, or None.
        mask: padding mask (b, all tokens so far), or None.
        images: whether the call may contain images. Prompts without images are counted with their padding, as in
            the stock model.
    """
    rows, length = tokens.shape[:2]
    if of_caller is not None:
        return TokenIndex(of_caller.expand(rows, length), True, True)
    if state is not None:
        # the first images after text end the count of padding
        by_mask = mask is not None and (state.by_mask or images)
        following = next_token_index(length, cache, state, mask if by_mask else None)
        return TokenIndex(following.expand(rows, length), by_mask, False)
    prompt = prompt_token_index(length, rows, mask if images else None, tokens.device)
    return TokenIndex(prompt.expand(rows, length), False, False)


def check_mask(mask: Tensor | None, owner: str, advice: str) -> None:
    """Raise `InputError` if a mask (b, s) has values other than 0 and 1.

    Args:
        mask: bool, integer or floating-point mask, or None.
        owner: name of the called function, for the message.
        advice: what to do with packed samples, a sentence.
    """
    if mask is None or mask.dtype == torch.bool:
        return
    other = mask[(mask != 0) & (mask != 1)]
    if len(other):
        raise InputError(
            f"{owner}: attention_mask (b, s) must be 1 for tokens and 0 for padding, got the value "
            f"{other[0].item():g}. If it numbers packed samples: {advice}"
        )


def prompt_token_index(length: int, rows: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return the token indices (b, s) of new sequences; 0 for padding."""
    if mask is None:
        return torch.arange(length, device=device).expand(rows, length)
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def next_token_index(length: int, cache: Any, state: SequenceState, mask: Tensor | None) -> Tensor:
    """Return the token indices (b, length) of tokens after a cache; with a mask, padding repeats the previous index."""
    cached_tokens = cache.get_seq_length() - state.padding
    if mask is not None:
        return cached_tokens[:, None] + mask[:, -length:].long().cumsum(1) - 1
    return cached_tokens[:, None] + torch.arange(length, device=cached_tokens.device)


def valid_tokens(token_index: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of tokens that are not padding (b, s); without a mask, padding is a 0 before another 0."""
    if mask is not None:
        return mask[:, -token_index.shape[1] :].bool()
    following = torch.cat([token_index[:, 1:], token_index.new_ones(len(token_index), 1)], 1)
    return (token_index != 0) | (following != 0)


def documents(token_index: Tensor, valid: Tensor) -> Tensor:
    """Return the index of the packed sample of each token (b, s); token indices that restart begin a sample."""
    before = torch.cat([token_index[:, :1] - 1, token_index[:, :-1]], 1)
    was_valid = torch.cat([torch.zeros_like(valid[:, :1]), valid[:, :-1]], 1)
    return ((token_index != before + 1) & valid & was_valid).cumsum(1)
