"""Parallel segments without an order: images, retrieved texts or graph nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.multimodal.streams.segments import Image, Segment, Text, Video
from vispe.utils.options import check_options

SELF, ALL, TARGET = 0, 1, 2  # attention rules of the blocks of a set
SET, MEMBER, RULE, END = range(4)  # columns of `Blocks.parallel`
OUTSIDE = (-1, -1, -1, 0)
See = Literal["self", "all"]
Align = Literal["start", "end"]
Member = Segment | Sequence[Segment]


@dataclass(frozen=True)
class Parallel:
    """Set of unordered members that share their start position.

    ``Parallel([...], see='self')`` are the sources of Graph-KV, ``Parallel([...], see='all', align='end')`` the
    segments of PINE. Later tokens attend to all members and to the tokens before them.

    Attributes:
        members: each a segment or a list of segments.
        see: with ``'self'``, a token of a member attends only to previous tokens of its member; with
            ``'all'`` also to the tokens before the set, and to the other members.
        align: ``'start'``: members start at the same counter, which then advances by the longest; ``'end'``: members
            end at the same counter, which advances by the sum of all, so that they could be placed in sequence.
        target: segments after the members that attend to them and themselves, but to nothing before them (Graph-KV).

    Raises:
        InputError: there are no members, or a member is not a segment.
        OptionError: `see` or `align` is invalid.

    Example:
        >>> from vispe.multimodal import Stream, Text, create_scheme
        >>> stream = Stream.of([[Text(2), Parallel([Text(3), Text(1)]), Text(2)]])
        >>> create_scheme("rope1d").coordinates(stream).ids[0, 0].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 2.0, 5.0, 6.0]
    """

    members: tuple[Member, ...] | Sequence[Member]
    see: See = "self"
    align: Align = "start"
    target: Member | None = None

    def __post_init__(self) -> None:
        check_options(self)
        members = cast("object", self.members)
        if not isinstance(members, Sequence) or not members:
            raise InputError(
                f"Parallel needs a list of at least one member, got {self.members!r}. Use Parallel([Image(4, 6), "
                "Image(4, 6)])."
            )
        for member in (*self.members, *(() if self.target is None else (self.target,))):
            segments: list[object] = [*segments_of(member)]
            if not segments or not all(isinstance(s, Text | Image | Video) for s in segments):
                raise InputError(
                    f"A member of Parallel must be Text, Image or Video, or a list of them, got {member!r}."
                )
            if any(isinstance(s, Text) and (s.shared or s.group) for s in segments):
                raise InputError(
                    f"Text in Parallel cannot be shared or have a group, got {member!r}. Omit both."
                )

    def parts(self) -> list[tuple[Segment, tuple[int, int, int]]]:
        """Return every segment with the index of its member, its attention rule, and the alignment of members."""
        rule, end = (SELF if self.see == "self" else ALL), int(self.align == "end")
        segments = [(s, (n, rule, end)) for n, member in enumerate(self.members) for s in segments_of(member)]
        after = [] if self.target is None else segments_of(self.target)
        return [*segments, *((s, (len(self.members), TARGET, end)) for s in after)]


def segments_of(member: Member) -> list[Segment]:
    """Return the segments of a member."""
    return list(member) if isinstance(member, Sequence) else [member]


def steps(parallel: Tensor, advance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counter steps of blocks in `Parallel` sets.

    Args:
        parallel: `Blocks.parallel` (m, 4).
        advance: counter step of each block by itself (m), float64.

    Returns:
        counter step at each block, with the step of a set at its last block; offset of each block from the
        start of its set; counter step of the member that contains each block, 0 outside of sets; (m) each.
    """
    inside = (parallel[:, SET] >= 0) & (parallel[:, RULE] != TARGET)
    if not bool(inside.any()):
        return advance, torch.zeros_like(advance), torch.zeros_like(advance)
    where = inside.nonzero()[:, 0]
    step, group, end = advance[where], parallel[where, SET], parallel[where, END].bool()
    # index members through all sets
    member = group * (parallel[:, MEMBER].max() + 1) + parallel[where, MEMBER]
    count, sets = int(member.max()) + 1, int(group.max()) + 1
    length = step.new_zeros(count).index_add_(0, member, step)
    total = step.new_zeros(sets).index_add_(0, group, step)
    longest = step.new_zeros(sets).scatter_reduce(0, group, length[member], "amax")
    # blocks of a member are consecutive, so offsets are differences of cumulative sums
    before = step.cumsum(0) - step
    index = torch.arange(len(where), device=where.device)
    first = index.new_full((count,), len(where)).scatter_reduce(0, member, index, "amin")
    offset = before - before[first[member]]
    offset = offset + torch.where(end, total[group] - length[member], 0.0)
    last = index.new_zeros(sets).scatter_reduce(0, group, index, "amax")
    moved = torch.where(index == last[group], torch.where(end, total[group], longest[group]), 0.0)
    zeros = torch.zeros_like(advance)
    return (
        advance.index_copy(0, where, moved),
        zeros.index_copy(0, where, offset),
        zeros.index_copy(0, where, length[member]),
    )


def apply_set_rules(visible: Tensor, same_sample: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the attention mask with the rules of sets applied, (b, 1, s, s) bool.

    Args:
        visible: causal mask (b, 1, n, m).
        same_sample: whether both tokens are in the same packed sample (b, 1, n, m).
        q: rows of `Blocks.parallel` of queries (4, b, n).
        k: those of keys (4, b, m).
    """
    of_q, of_k = q[:, :, None, :, None], k[:, :, None, None, :]
    same_set = (of_q[SET] >= 0) & (of_q[SET] == of_k[SET])
    same_member = same_set & (of_q[MEMBER] == of_k[MEMBER])
    visible = torch.where(of_q[RULE] == SELF, visible & same_member, visible)
    visible = torch.where(of_q[RULE] == TARGET, visible & same_set, visible)
    # members attend to each other in both directions
    return visible | (same_set & ~same_member & same_sample & (of_q[RULE] == ALL) & (of_k[RULE] == ALL))
