"""Tokens that end the rows of images, which no configuration names."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.errors import InputError, counted


def with_row_ends(
    types: Tensor, mask: Tensor, documents: Tensor, kind: int, sizes: list[tuple[int, int]], views: list[int]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Include the tokens that end rows of images in these images; return types and sizes.

    Pixtral's processor writes [IMG_BREAK] after every row of placeholders and [IMG_END] after the last, Molmo's writes
    <im_col>; no configuration names these tokens, so they are detected as a text token after every row. Other
    processors write no such tokens. All images of a view are treated equally. Images of one row are
    ambiguous, and treated like images of several rows.
    """
    kinds, sample = types[mask], torch.arange(len(types), device=types.device)[:, None].expand_as(types)[mask]
    widths = torch.tensor([w for h, w in sizes for _ in range(h)], dtype=torch.long, device=types.device)
    indices = (kinds == kind).nonzero()[:, 0]
    origin = torch.stack([sample, documents[mask]])
    if not len(widths):
        return types, sizes  # the stream raises an error for placeholders without images
    if int(widths.sum()) != len(indices):
        raise InputError(_odd_run(indices, origin, sizes))
    # index of the last placeholder of each row, and of the token after it
    last = indices[widths.cumsum(0) - 1]
    after = (last + 1).clamp(max=len(kinds) - 1)
    has_end = (after > last) & (kinds[after] == 0) & (origin[:, after] == origin[:, last]).all(0)
    all_ended = [bool(part.all()) for part in has_end.split([h for h, _ in sizes])]
    rows = [(view, e) for view, e, (h, _) in zip(views, all_ended, sizes, strict=True) if h > 1]
    of_view = [[e for v, e in rows if v == view] or [e for _, e in rows] for view in views]
    ended = [e and all(others) for e, others in zip(all_ended, of_view, strict=True)]
    for number, (e, others, (h, w)) in enumerate(zip(all_ended, of_view, sizes, strict=True)):
        if h > 1 and not e and any(others):
            start = last[sum(rows for rows, _ in sizes[:number])] - w + 1
            raise InputError(
                f"Sample {int(origin[0, start])}, image {number} of {h} rows and {w} columns: image placeholders need "
                "a token after every row, as in other images of the call, got placeholders without. Pass the tokens of "
                "the model's processor."
            )
    of_row = torch.tensor(
        [e for e, (h, _) in zip(ended, sizes, strict=True) for _ in range(h)], device=types.device
    )
    marked = kinds.index_fill(0, after[of_row], kind)
    wider = [(h, w + e) for e, (h, w) in zip(ended, sizes, strict=True)]
    return types.masked_scatter(mask, marked), wider


def _odd_run(indices: Tensor, origin: Tensor, sizes: list[tuple[int, int]]) -> str:
    """Return a message about the first run of placeholders that does not match the images, if their total is wrong.

    Args:
        indices: index of each placeholder among the tokens that are not padding (k), ascending.
        origin: sample and document of each of these tokens (2, n).
        sizes: rows and columns of the images. Either every row is followed by such a token, or no row is.
    """
    new = torch.ones_like(indices, dtype=torch.bool)
    new[1:] = (indices.diff() != 1) | (origin[:, indices[1:]] != origin[:, indices[:-1]]).any(0)
    starts = new.nonzero()[:, 0]
    runs = starts.diff(append=starts.new_tensor([len(indices)])).tolist()
    # index of the current run, number of its placeholders that are assigned, and its first image
    run = used = began = 0
    which: int | None = None
    for number, (h, w) in enumerate(sizes):
        began = began if used else number
        rows = runs[run : run + h]
        if not used and rows == [w] * h:
            run += h
        elif run < len(runs) and runs[run] - used >= h * w:
            used += h * w
            run, used = (run + 1, 0) if used == runs[run] else (run, used)
        else:
            which = began
            if not used and rows and rows[0] == w:  # the first row that differs
                run += next((n for n, row in enumerate(rows) if row != w), len(rows))
            break
    advice = "Pass as many placeholders as the model's processor."
    if run >= len(runs):
        images = counted(len(sizes), "image")
        return f"The placeholders of image {which} are missing, got a call with {images}. {advice}"
    first = int(indices[starts[run]])
    row = int(origin[0, first])
    token = first - int((origin[0] < row).sum())
    image = f"more than those of the {counted(len(sizes), 'image')} of the call"
    if which is not None:
        image = "but image {} has {} rows and {} columns".format(which, *sizes[which])
    return f"Sample {row}, token {token} (without padding): {runs[run]} adjacent image placeholders, {image}. {advice}"
