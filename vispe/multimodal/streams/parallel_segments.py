"""Segments without an order among them: images, retrieved texts or graph nodes that stand side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.multimodal.streams.segments import Image, Segment, Text, Video
from vispe.options import check_options

SELF, ALL, TARGET = 0, 1, 2  # what a block of a set may see
SET, MEMBER, RULE, END = range(4)  # columns of `Blocks.parallel`
OUTSIDE = (-1, -1, -1, 0)
See = Literal["self", "all"]
Align = Literal["start", "end"]
Member = Segment | Sequence[Segment]


@dataclass(frozen=True)
class Parallel:
    """Members that no order tells apart: each starts where the first one does.

    ``Parallel([...], see='self')`` are the sources of Graph-KV, ``Parallel([...], see='all', align='end')`` the
    segments of PINE. What follows sees all members and what came before them.

    Attributes:
        members: each a segment, or several that belong together.
        see: a token of a member sees what came before it in its member; with ``'self'`` nothing else, with ``'all'``
            what came before the set, and the other members whole.
        align: ``'start'``: members start at one counter, which then moves by the longest; ``'end'``: members end at
            one counter, which moves by all of them, so that there is room to put one behind another.
        target: what follows the members and sees them and itself, but nothing before them (Graph-KV).

    Raises:
        InputError: there is no member, or one that is no segment.
        OptionError: `see` or `align` is another word.

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
        given = cast("object", self.members)
        if not isinstance(given, Sequence) or not given:
            raise InputError(
                f"Parallel needs a list of one member or more, got {self.members!r}; write Parallel([Image(4, 6), "
                "Image(4, 6)])."
            )
        for member in (*self.members, *(() if self.target is None else (self.target,))):
            found: list[object] = [*segments_of(member)]
            if not found or not all(isinstance(s, Text | Image | Video) for s in found):
                raise InputError(
                    f"A member of Parallel is Text, Image or Video, or a list of them, got {member!r}."
                )
            if any(isinstance(s, Text) and (s.shared or s.group) for s in found):
                raise InputError(
                    f"Text in Parallel is neither shared nor of a group of its own, got {member!r}; leave both out."
                )

    def parts(self) -> list[tuple[Segment, tuple[int, int, int]]]:
        """Return every segment with the number of its member, what it may see, and how members are aligned."""
        rule, end = (SELF if self.see == "self" else ALL), int(self.align == "end")
        found = [(s, (n, rule, end)) for n, member in enumerate(self.members) for s in segments_of(member)]
        after = [] if self.target is None else segments_of(self.target)
        return [*found, *((s, (len(self.members), TARGET, end)) for s in after)]


def segments_of(member: Member) -> list[Segment]:
    """Return the segments of a member."""
    return list(member) if isinstance(member, Sequence) else [member]


def steps(parallel: Tensor, advance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how the counter moves where blocks stand side by side.

    Args:
        parallel: `Blocks.parallel` (m, 4).
        advance: how far each block moves the counter on its own (m), float64.

    Returns:
        how far the counter moves at each block, all of a set at its last; how far behind the start of the set each
        block starts; how far the member of each block moves the counter alone, 0 outside; (m) each.
    """
    inside = (parallel[:, SET] >= 0) & (parallel[:, RULE] != TARGET)
    if not bool(inside.any()):
        return advance, torch.zeros_like(advance), torch.zeros_like(advance)
    where = inside.nonzero()[:, 0]
    own, group, end = advance[where], parallel[where, SET], parallel[where, END].bool()
    # number members through all sets
    member = group * (parallel[:, MEMBER].max() + 1) + parallel[where, MEMBER]
    count, sets = int(member.max()) + 1, int(group.max()) + 1
    length = own.new_zeros(count).index_add_(0, member, own)
    total = own.new_zeros(sets).index_add_(0, group, own)
    longest = own.new_zeros(sets).scatter_reduce(0, group, length[member], "amax")
    # blocks of a member stand together, so what precedes one is a difference of sums
    before = own.cumsum(0) - own
    place = torch.arange(len(where), device=where.device)
    first = place.new_full((count,), len(where)).scatter_reduce(0, member, place, "amin")
    behind = before - before[first[member]]
    behind = behind + torch.where(end, total[group] - length[member], 0.0)
    last = place.new_zeros(sets).scatter_reduce(0, group, place, "amax")
    moved = torch.where(place == last[group], torch.where(end, total[group], longest[group]), 0.0)
    zeros = torch.zeros_like(advance)
    return (
        advance.index_copy(0, where, moved),
        zeros.index_copy(0, where, behind),
        zeros.index_copy(0, where, length[member]),
    )


def seen_by_set(seen: Tensor, alike: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return which keys a query may attend to once sets have their say, (b, 1, s, s) bool.

    Args:
        seen: what causal order alone allows (b, 1, n, m).
        alike: whether both are tokens of one packed sample (b, 1, n, m).
        q: rows of `Blocks.parallel` of queries (4, b, n).
        k: those of keys (4, b, m).
    """
    of_q, of_k = q[:, :, None, :, None], k[:, :, None, None, :]
    same = (of_q[SET] >= 0) & (of_q[SET] == of_k[SET])
    own = same & (of_q[MEMBER] == of_k[MEMBER])
    seen = torch.where(of_q[RULE] == SELF, seen & own, seen)
    seen = torch.where(of_q[RULE] == TARGET, seen & same, seen)
    # members see each other whichever comes first
    return seen | (same & ~own & alike & (of_q[RULE] == ALL) & (of_k[RULE] == ALL))
