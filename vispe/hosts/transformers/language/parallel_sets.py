"""Pictures without an order: which tokens of a call are members of a set, and what of it a cache must remember.

What is said of every token are its `marks` (rows, b, s), float64: the four columns of `Blocks.parallel`, the length of
its member, the number of its packed sample, whether it is no padding, and, axis by axis, whether it moves with its
member.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError
from vispe.hosts.transformers.language.families import family_of
from vispe.multimodal import Coordinates, Scheme, Stream
from vispe.multimodal.streams.parallel_segments import OUTSIDE, SET, Align, See, seen_by_set
from vispe.multimodal.streams.segments import IMAGE

Beside = Literal["graph_kv", "pine"]
EXTENT, DOCUMENT, VALID, MOVED = range(4, 8)
IDS, MARKS = "parallel_ids", "vispe_marks"  # keywords: of the user, and of a prompt by key, while generating
RULES: dict[str, tuple[See, Align]] = {"graph_kv": ("self", "start"), "pine": ("all", "end")}


def check_beside(parallel: object) -> None:
    """Raise `OptionError` unless `parallel` is a way in which pictures stand side by side, or None."""
    if parallel is not None and parallel not in RULES:
        raise OptionError(f"parallel is 'graph_kv', 'pine' or None, got {parallel!r}.")


def members_of(config: Any, input_ids: Tensor | None, stream: Stream) -> Tensor:
    """Return the member of each token (b, s), -1 outside: every image, with its markers, is one.

    Images that nothing but markers stands between are of one set.
    """
    b = stream.blocks
    # images in two blocks, the small one and that of the tiles
    pieces = 2 if family_of(config).pictures == "one_vision" else 1
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


def marks_of(scheme: Scheme, stream: Stream, coordinates: Coordinates) -> Tensor | None:
    """Return the marks of every token; None where there is no set."""
    b = stream.blocks
    if b.parallel is None or coordinates.extent is None:
        return None
    zero = torch.zeros((), dtype=torch.float64, device=stream.mask.device)
    text = scheme.text(zero + 1) - scheme.text(zero)
    picture = torch.tensor(scheme.follows, dtype=torch.float64, device=zero.device)
    moved = torch.where(b.visual, picture[:, None], (text != 0).double()[:, None])
    of_block = torch.cat([b.parallel.T.double(), torch.zeros_like(b.document)[None].double(),
                          b.document[None].double(), torch.ones_like(moved[:1]), moved])  # fmt: skip
    marks = stream.scatter(of_block[:, stream.block])
    outside = marks.new_tensor(OUTSIDE)[:, None, None]
    marks[: len(OUTSIDE)] = torch.where(stream.mask, marks[: len(OUTSIDE)], outside)
    marks[EXTENT] = coordinates.extent
    return marks


def plain_marks(axes: int, valid: Tensor) -> Tensor:
    """Return the marks of tokens (b, s) outside of sets."""
    marks = torch.zeros(MOVED + axes, *valid.shape, dtype=torch.float64, device=valid.device)
    marks[: len(OUTSIDE)] = marks.new_tensor(OUTSIDE)[:, None, None]
    marks[VALID] = valid.double()
    return marks


def joined(past: Tensor | None, marks: Tensor) -> Tensor:
    """Return the marks of all tokens, those in the cache first; sets and samples of this call are numbered on."""
    if past is None or not past.shape[2]:
        return marks
    marks = marks.clone()
    marks[SET] = torch.where(marks[SET] >= 0, marks[SET] + past[SET].amax() + 1, marks[SET])
    marks[DOCUMENT] += past[DOCUMENT].amax(1, keepdim=True)
    return torch.cat([past, marks], 2)


def seen(marks: Tensor, queries: int) -> Tensor:
    """Return which keys the last tokens may attend to, (b, 1, queries, m) bool."""
    m = marks.shape[2]
    place = torch.arange(m, device=marks.device)
    q, k = marks[:, :, m - queries :], marks
    alike = (q[DOCUMENT][:, None, :, None] == k[DOCUMENT][:, None, None]) & (k[VALID] > 0)[:, None, None]
    causal = alike & (place[m - queries :, None] >= place)
    return seen_by_set(causal, alike, q[: len(OUTSIDE)], k[: len(OUTSIDE)])


def check_whole(marks: Tensor, table: Tensor) -> None:
    """Raise `InputError` where a call has some members of a set only, which an order by importance needs whole.

    Args:
        marks: of the tokens of the call.
        table: of the whole prompt (b, rows, s).
    """
    every = torch.where(table[:, VALID] > 0, table[:, SET], -1.0)  # of short rows the table has an empty end
    here = marks[SET]
    for number in here[here >= 0].unique():
        if int((here == number).sum()) != int((every == number).sum()):
            raise InputError(
                "parallel='pine' needs all images of a set in one call, but the prompt came in pieces; leave "
                "prefill_chunk_size out."
            )
