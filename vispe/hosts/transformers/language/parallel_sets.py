"""Parallel sets of images without an order: the members of a set, and the attributes stored with the KV cache.

The `token_attributes` of a call are (k, b, s), float64: the four columns of `Blocks.parallel`, the extent of
the member, the index of the packed sample, whether the token is not padding, and, for each axis, whether the
coordinate moves with the member.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError
from vispe.hosts.transformers.language.families import family_of
from vispe.multimodal import Coordinates, Scheme, Stream
from vispe.multimodal.streams.parallel_segments import OUTSIDE, SET, Align, See, apply_set_rules
from vispe.multimodal.streams.segments import IMAGE

Parallel = Literal["graph_kv", "pine"]
EXTENT, DOCUMENT, VALID, MOVED = range(4, 8)
IDS = "parallel_ids"  # keyword of the user
RULES: dict[str, tuple[See, Align]] = {"graph_kv": ("self", "start"), "pine": ("all", "end")}


def check_parallel(parallel: object) -> None:
    """Raise `OptionError` unless `parallel` is a rule for parallel sets, or None."""
    if parallel is not None and parallel not in RULES:
        raise OptionError(f"parallel must be 'graph_kv', 'pine' or None, got {parallel!r}.")


def members_of(config: Any, input_ids: Tensor | None, stream: Stream) -> Tensor:
    """Return the member of each token (b, s), -1 outside: every image with its markers is a member.

    Images separated by markers only are in one set.
    """
    b = stream.blocks
    pieces = family_of(config).images.pieces
    number = torch.where(b.kind == IMAGE, b.picture.div(pieces, rounding_mode="floor"), -1)
    member = stream.scatter(number[stream.block], -1)
    if input_ids is None:
        return member
    start, end = (getattr(config, f"vision_{name}_token_id", None) for name in ("start", "end"))
    edge = member.new_full((len(member), 1), -1)
    if start is not None:
        after = torch.cat([member[:, 1:], edge], 1)
        member = torch.where((input_ids == start) & (member < 0), after, member)
    if end is not None:
        before = torch.cat([edge, member[:, :-1]], 1)
        member = torch.where((input_ids == end) & (member < 0), before, member)
    return member


def token_attributes_of(scheme: Scheme, stream: Stream, coordinates: Coordinates) -> Tensor | None:
    """Return the attributes of every token; None if there is no set."""
    b = stream.blocks
    if b.parallel is None or coordinates.extent is None:
        return None
    # a token moves along the axes that change from one text token to the next, or that follow it in images
    zero = torch.zeros((), dtype=torch.float64, device=stream.mask.device)
    text = scheme.text(zero + 1) - scheme.text(zero)
    image = torch.tensor(scheme.follows_text, dtype=torch.float64, device=zero.device)
    moved = torch.where(b.visual, image[:, None], (text != 0).double()[:, None])
    of_block = torch.cat([b.parallel.T.double(), torch.zeros_like(b.document)[None].double(),
                          b.document[None].double(), torch.ones_like(moved[:1]), moved])  # fmt: skip
    token_attributes = stream.scatter(of_block[:, stream.block])
    outside = token_attributes.new_tensor(OUTSIDE)[:, None, None]
    token_attributes[: len(OUTSIDE)] = torch.where(stream.mask, token_attributes[: len(OUTSIDE)], outside)
    token_attributes[EXTENT] = coordinates.extent
    return token_attributes


def text_attributes(axes: int, valid: Tensor) -> Tensor:
    """Return the attributes of tokens (b, s) outside sets."""
    token_attributes = torch.zeros(MOVED + axes, *valid.shape, dtype=torch.float64, device=valid.device)
    token_attributes[: len(OUTSIDE)] = token_attributes.new_tensor(OUTSIDE)[:, None, None]
    token_attributes[VALID] = valid.double()
    return token_attributes


def append_attributes(past: Tensor | None, token_attributes: Tensor) -> Tensor:
    """Return the attributes of cached tokens and those of a call, whose sets and samples are renumbered."""
    if past is None or not past.shape[2]:
        return token_attributes
    token_attributes = token_attributes.clone()
    token_attributes[SET] = torch.where(
        token_attributes[SET] >= 0, token_attributes[SET] + past[SET].amax() + 1, token_attributes[SET]
    )
    token_attributes[DOCUMENT] += past[DOCUMENT].amax(1, keepdim=True)
    return torch.cat([past, token_attributes], 2)


def parallel_mask(token_attributes: Tensor, queries: int) -> Tensor:
    """Return the mask of keys that the last `queries` tokens attend to, (b, 1, queries, m) bool."""
    m = token_attributes.shape[2]
    index = torch.arange(m, device=token_attributes.device)
    q, k = token_attributes[:, :, m - queries :], token_attributes
    # valid keys of the same packed sample, (b, 1, queries, m)
    same_sample = (q[DOCUMENT][:, None, :, None] == k[DOCUMENT][:, None, None]) & (k[VALID] > 0)[
        :, None, None
    ]
    causal = same_sample & (index[m - queries :, None] >= index)
    return apply_set_rules(causal, same_sample, q[: len(OUTSIDE)], k[: len(OUTSIDE)])


def check_complete_sets(token_attributes: Tensor, table: Tensor) -> None:
    """Raise `InputError` if a call has only some members of a set, as an order by importance needs all members.

    Args:
        token_attributes: attributes of the tokens of the call.
        table: attributes of the full prompt (b, rows, s).
    """
    every = torch.where(table[:, VALID] > 0, table[:, SET], -1.0)  # short rows of the table are padded
    set_of_token = token_attributes[SET]
    for number in set_of_token[set_of_token >= 0].unique():
        if int((set_of_token == number).sum()) != int((every == number).sum()):
            raise InputError(
                "parallel='pine' needs all images of a set in one call, got a part of the prompt. Omit "
                "prefill_chunk_size."
            )
