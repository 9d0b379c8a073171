"""Text format of streams, such as ``text:6 image:4x6 video:3x4x4@0.5 text:3``."""

from __future__ import annotations

import re
from typing import Literal

from vispe.errors import OptionError, did_you_mean
from vispe.multimodal.streams.segments import Image, Segment, Text, Video

_FORMS = {  # pattern and description of each kind
    "text": (
        r"(\d+)(?:#(\d+))?(\.)?(?:@(\d+(?:,\d+){1,4})(?:of(\d+))?)?",
        "text:TOKENS, such as text:6 (text:6#1 for tokens of group 1; text:6. ends a segment; text:2@1,3 names row 1, "
        "column 3 of the visual segment, text:2@0,0,3,5 a box, text:2@1,3of1 a cell of the second visual segment)",
    ),
    "shared": (r"(\d+)", "shared:TOKENS, such as shared:3, for one of several answers"),
    "image": (
        r"(\d+)x(\d+)(?:\*(\d+)x(\d+)(?:\+(first|last))?)?",
        "image:ROWSxCOLUMNS of tokens, such as image:4x6 (image:4x6*2x3+last for 2 x 3 tiles and a thumbnail)",
    ),
    "video": (
        r"(\d+)x(\d+)x(\d+)(?:@(\d+(?:\.\d+)?|\.\d+))?",
        "video:FRAMESxROWSxCOLUMNS of tokens, such as video:3x4x4 (video:3x4x4@0.5 for a frame every 0.5 seconds)",
    ),
}


def parse_segments(text: str) -> list[Segment]:
    """Parse the text description of a sequence into segments.

    Args:
        text: parts separated by spaces: ``text:6``, ``text:6.`` (ends a segment), ``text:2@1,3``
            (refers to a cell of an image), ``shared:3``, ``image:4x6``, ``image:4x4*2x3+last`` (tiles and a thumbnail),
            ``video:3x4x4`` or ``video:3x4x4@0.5`` (seconds from frame
            to frame); sizes count tokens.

    Raises:
        OptionError: a part cannot be parsed, or there is none.
    """
    parts = text.split()
    if not parts:
        raise OptionError("The stream is empty. Use parts such as 'text:6 image:4x6 text:4'.")
    return [_segment(part) for part in parts]


def _segment(part: str) -> Segment:
    kind, _, size = part.partition(":")
    if kind not in _FORMS:
        raise OptionError(
            f"The stream has the part {part!r}, which is not one of {', '.join(_FORMS)}.{did_you_mean(kind, _FORMS)} "
            "Write for example 'text:6 image:4x6 text:4 video:3x4x4@0.5 text:3'."
        )
    pattern, form = _FORMS[kind]
    match = re.fullmatch(pattern, size)
    if match is None:
        raise OptionError(f"The part {part!r} of the stream cannot be read. Write {form}.")
    if kind == "text":
        group, _, cell, of = match.groups()[1:]
        cells = None if cell is None else (tuple(int(x) for x in cell.split(",")),)
        return Text(
            int(match[1]), group=int(group or 0), boundary=match[3] is not None, cells=cells,
            of=None if of is None else int(of),
        )  # fmt: skip
    n = [int(digits) for digits in match.groups() if digits is not None and digits.isdigit()]
    if kind == "shared":
        return Text(n[0], shared=True)
    if kind == "video":
        return Video(n[0], n[1], n[2], None if match[4] is None else float(match[4]))
    tiles = (n[2], n[3]) if len(n) > 2 else (1, 1)
    thumbnail: Literal["first", "last"] | None = match[5]  # type: ignore[assignment]
    return Image(n[0], n[1], tiles, thumbnail)
