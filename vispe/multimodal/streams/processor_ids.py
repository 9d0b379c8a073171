"""Streams from processor outputs: token types and grids."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, counted, is_integer
from vispe.multimodal.streams.attention_blocks import Blocks, check_same_shape
from vispe.multimodal.streams.parallel_segments import ALL, SELF, Align, Parallel, See
from vispe.multimodal.streams.processor_grids import visual_blocks
from vispe.multimodal.streams.segments import IMAGE, TEXT, VIDEO, WHOLE, Image, Text, Video
from vispe.multimodal.streams.torch_typing import distinct, listed


def blocks_from_ids(
    types: Tensor,
    images: Tensor | Sequence[Image] | None,
    videos: Tensor | Sequence[Video] | None,
    mask: Tensor | None,
    merge: int,
    seconds: Tensor | Sequence[float] | None,
    separate_frames: bool,
    documents: Tensor | None,
    groups: Tensor | None,
    boundaries: Tensor | None,
    members: Tensor | None,
    see: See,
    align: Align,
) -> tuple[Blocks, Tensor]:
    """Return the blocks and the mask of `Stream.from_ids`, which has the same arguments."""
    token_attributes = {"documents": documents, "groups": groups, "members": members}
    check_same_shape(types, mask=mask, **token_attributes, boundaries=boundaries)
    _check_values(types, mask, merge, **token_attributes)
    device = types.device
    valid = torch.ones_like(types, dtype=torch.bool) if mask is None else mask.bool()
    (size, clock, number, tile), image_blocks = visual_blocks(
        images, videos, merge, seconds, separate_frames, device
    )
    kind = types.flatten()
    kind = (kind if mask is None else kind.index_select(0, valid.flatten().nonzero()[:, 0])).long()
    if not len(kind):
        raise InputError("A stream needs at least one token, got a mask that is 0 everywhere.")
    if bool(((kind < TEXT) | (kind > VIDEO)).any()):
        raise InputError(
            f"types must be 0 for text, 1 for image and 2 for video, got {listed(distinct(kind))} among them."
        )
    block, enough = _blocks_of(kind, size.prod(1), image_blocks)
    sample = torch.arange(len(types), device=device)[:, None].expand_as(types)[valid]
    supplied = (documents, groups)
    document, group = (torch.zeros_like(sample) if x is None else x[valid].long() for x in supplied)
    if bool(((document < 0) | (group < 0)).any()):
        raise InputError(
            f"documents and groups must be 0 or more, got {int(torch.minimum(document, group).min())}."
        )
    ends = torch.zeros_like(block, dtype=torch.bool) if boundaries is None else _ends(boundaries[valid], kind)
    parallel_rows = _beside(members, valid, sample, document, see, align)
    keys = torch.stack([sample, document, group, block, *(() if parallel_rows is None else parallel_rows.T)])
    new = torch.ones_like(sample, dtype=torch.bool)
    new[1:] = (keys[:, 1:] != keys[:, :-1]).any(0) | ends[:-1]
    first = new.nonzero()[:, 0]
    tokens = torch.diff(first, append=first.new_tensor([len(sample)]))
    at = block[first]
    text = at < 0
    size = torch.cat([size, size.new_ones(1, 3)])  # entry -1 is for text
    tile = torch.cat([tile, tile.new_tensor([WHOLE])])
    number = torch.cat([number, number.new_tensor([-1])])
    clock = torch.cat([clock, clock.new_tensor([torch.nan])])
    wrong = ~text & ((tokens != size[at].prod(1)) | ~enough[first])
    blocks = Blocks(
        sample[first], document[first], group[first], kind[first], tokens, size[at], clock[at],
        _counted(number[at], len(number)), tile[at], torch.zeros_like(text), ends[first + tokens - 1],
        None if parallel_rows is None else parallel_rows[first],
    )  # fmt: skip
    used = at[~text]
    if bool(wrong.any()) or len(used) < len(size) - 1:
        raise InputError(_mismatch(blocks, wrong, used, len(size) - 1, enough[first]))
    return blocks, valid


def _ends(boundaries: Tensor, kind: Tensor) -> Tensor:
    """Return the checked mask of tokens that end their segment (n); images end theirs implicitly."""
    if boundaries.dtype != torch.bool:
        is_integer = not (boundaries.is_floating_point() or boundaries.is_complex())
        if not is_integer or bool(((boundaries < 0) | (boundaries > 1)).any()):
            raise InputError(
                f"boundaries must be 1 where a token ends its segment and 0 elsewhere, got {boundaries.dtype} with "
                f"{listed(distinct(boundaries))[:8]}."
            )
    ends = boundaries.bool()
    if bool((ends & (kind != TEXT)).any()):
        raise InputError(
            "boundaries must be 0 at tokens of images and videos, which are separate segments. Mark only text."
        )
    return ends


def _beside(
    members: Tensor | None, valid: Tensor, sample: Tensor, document: Tensor, see: See, align: Align
) -> Tensor | None:
    """Return the row of `Blocks.parallel` of each non-padding token (n, 4), or None without `Parallel` sets."""
    Parallel([Text(1)], see, align)  # checks `see` and `align`
    if members is None or not bool((members[valid] >= 0).any()):
        return None
    member = members[valid].long()
    inside = member >= 0
    # a set starts with its first member, at a new sample, and where indices restart
    starts = inside.clone()
    is_same_segment = (sample[1:] == sample[:-1]) & (document[1:] == document[:-1]) & inside[:-1]
    starts[1:] &= ~is_same_segment | ((member[1:] == 0) & (member[:-1] != 0))
    number = torch.where(inside, starts.long().cumsum(0) - 1, -1)
    back = inside[1:] & (number[1:] == number[:-1]) & (member[1:] < member[:-1])
    if bool(back.any()):
        raise InputError(
            "members must increase inside a set, so that each member is one run of tokens, got "
            f"{int(member[1:][back][0])} after {int(member[:-1][back][0])}."
        )
    rule, end = (SELF if see == "self" else ALL), int(align == "end")
    outside = torch.where(inside, rule, -1), torch.where(inside, end, 0)
    return torch.stack([number, torch.where(inside, member, -1), *outside], 1)


def _blocks_of(kind: Tensor, tokens: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Return for every token the index of its visual block, -1 for text, and whether the block exists."""
    block, enough = torch.full_like(kind, -1), torch.ones_like(kind, dtype=torch.bool)
    for which, part, before in ((IMAGE, tokens[:images], 0), (VIDEO, tokens[images:], images)):
        is_kind = kind == which
        if not len(part):  # placeholders without any grid
            block, enough = block.masked_fill(is_kind, len(tokens)), enough & ~is_kind
            continue
        position = torch.searchsorted(part.cumsum(0), is_kind.cumsum(0) - 1, right=True)
        enough = enough & (~is_kind | (position < len(part)))
        block = torch.where(is_kind, position.clamp(max=len(part) - 1) + before, block)
    return block, enough


def _counted(number: Tensor, count: int) -> Tensor:
    """Renumber images and videos in order of appearance instead of images before videos; text keeps -1."""
    place = torch.arange(len(number), device=number.device)
    first = number.new_full((count + 1,), len(number)).scatter_reduce(0, number + 1, place, "amin")
    first[0] = -1
    return first.argsort().argsort()[number + 1] - 1


def _check_values(types: Tensor, mask: Tensor | None, merge: object, **others: Tensor | None) -> None:
    """Raise unless types and indices are integers, and the mask is 0 and 1."""
    if types.is_meta:
        raise InputError(
            "types needs values, got a tensor on the meta device. Pass tokens on another device."
        )
    if not is_integer(merge) or merge < 1:  # type: ignore[operator]
        raise OptionError(f"merge needs an integer above 0, got {merge!r}.")
    for name, supplied in (("types", types), ("mask", mask), *others.items()):
        if supplied is None or (name == "mask" and supplied.dtype == torch.bool):
            continue
        if supplied.is_floating_point() or supplied.is_complex() or supplied.dtype == torch.bool:
            kinds = "bool, or integers 0 and 1" if name == "mask" else "integers"
            raise InputError(f"{name} needs {kinds}, got {supplied.dtype}.")
    if mask is not None and mask.dtype != torch.bool and bool(((mask < 0) | (mask > 1)).any()):
        raise InputError(
            f"mask must be 1 for tokens and 0 for padding, got {listed(distinct(mask))} among them. Pass the "
            "indices of packed samples as documents."
        )


def _mismatch(blocks: Blocks, wrong: Tensor, used: Tensor, grids: int, enough: Tensor) -> str:
    """Return the message for the segment and sample that do not match their grid."""
    if not bool(wrong.any()):
        return (
            f"There are grids for {counted(grids, 'image')}, tiles, frames or videos, but placeholders for only "
            f"{len(used)}. Pass only the grids of the sequences, in order."
        )
    m = int(wrong.nonzero()[0, 0])
    about = torch.stack([blocks.kind, blocks.sample, blocks.document])
    other: list[int] = listed((about != about[:, m : m + 1]).any(0).nonzero()[:, 0])
    start = max((o + 1 for o in other if o < m), default=0)
    run = slice(start, min((o for o in other if o > m), default=len(wrong)))
    name = "image" if int(blocks.kind[m]) == IMAGE else "video"
    segment = start - int((blocks.sample < blocks.sample[m]).sum())
    placeholders = f"{int(blocks.tokens[run].sum())} {name} placeholders"
    where = f"Sample {int(blocks.sample[m])}, segment {segment}"
    if not bool(enough[start]):
        return f"{where}: {placeholders} exceed the {name} grids."
    of_run: list[list[int]] = listed(blocks.size[run])
    sizes = [s if s[0] > 1 or name == "video" else s[1:] for s in of_run]
    named = [f"{' x '.join(map(str, s))} = {math.prod(s)}" for s in sizes[:4]]
    hint = ", or pass separate_frames=True if text separates frames" if name == "video" else ""
    return (
        f"{where}: {placeholders} are adjacent, but the next {name} grids have {', '.join(named)}"
        f"{', ...' if len(sizes) > 4 else ''} tokens after merging. Check the order of the grids and the merge size"
        f"{hint}."
    )
