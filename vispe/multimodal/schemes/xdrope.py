"""XD-RoPE of HunyuanVL and HunyuanOCR: sequence position, column, row and image index on four axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, ShapeError, counted
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.parallel_segments import END, steps
from vispe.multimodal.streams.segments import IMAGE, Image
from vispe.multimodal.streams.torch_typing import listed
from vispe.multimodal.streams.visual_tokens import VisualTokens
from vispe.utils.interval import Interval
from vispe.utils.options import NonNegativeInt

AXES = ("sequence", "column", "row", "image")


@register_scheme
@dataclass(frozen=True)
class XDRoPE(Scheme):
    """Sequence position, column, row and image index on four axes (HunyuanOCR, arXiv 2511.19575).

    Text has its sequence position on all axes. The tokens of an image have (position, column, row, index of the image);
    the position continues through the image; columns and rows start at 0 in every image, independent of the
    preceding text. Columns include the newline token after every row, so an image of h x w merged patches is
    ``Image(h, w + 1)``; the tokens before and after an image are text. `newline_images` returns token types
    and images from processor outputs. Tiles, and frames of a video, count as images; members of a `Parallel`
    start at the same index. If coordinates are computed with `start`, image indices begin at 0 again.

    Args:
        sections: pairs of channels of sequence, column, row and image (`mrope_section`, formerly `xdrope_section`); or
            three, of column, row and image, for checkpoints without a sequence axis. Equal parts of four axes by
            default; the remainder goes to the sequence.
        layout: channels that an axis rotates. ``'paired'``: sections divide the pairs, as in MRoPE, in vLLM,
            and in the remote code of the first checkpoints. ``'elementwise'``: transformers 5.24.0, whose
            sections, doubled, divide the channels, so that the two channels of a pair may have different
            axes. Both layouts rotate text equally. For images, ``'elementwise'`` is not a rotation: norms
            change, and scores do not depend on distances only.
        image_index: image indices restart in each ``'sample'``, or, as in transformers 5.24.0, continue
            through the ``'batch'``; in the second case, the coordinates of a sample depend on the samples
            before it.
    """

    name: ClassVar[str] = "xdrope"
    summary: ClassVar[str] = "Sequence position, column, row and image index on four axes (HunyuanVL)."
    paper: ClassVar[str] = "HunyuanOCR Technical Report, https://arxiv.org/abs/2511.19575"

    sections: Annotated[tuple[NonNegativeInt, ...], Interval(least=3, most=4)] | None = None
    layout: Literal["paired", "elementwise"] = "paired"
    image_index: Literal["sample", "batch"] = "sample"

    @property
    def axes(self) -> int:
        """Four axes, or as many as there are sections."""
        return 4 if self.sections is None else len(self.sections)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes; the last three of `AXES` if there are three sections."""
        return AXES[-self.axes :]

    @property
    def numbers_tokens(self) -> bool:
        """Whether there is a sequence axis."""
        return self.axes == 4

    @property
    def follows_text(self) -> tuple[bool, ...]:
        """True for the sequence axis only."""
        return tuple(name == "sequence" for name in self.axis_names)

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the number of tokens (m)."""
        return blocks.tokens.double()

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return index in the block, column, row and image index (axes, k)."""
        image = tokens.of(self._first_image(tokens.blocks)) + tokens.frame
        every = [tokens.index.double(), tokens.column, tokens.row, image]
        return torch.stack(every[-self.axes :])

    def _first_image(self, blocks: Blocks) -> Tensor:
        """Return the number of images and frames before each block (m), float64."""
        images = torch.where(blocks.visual, blocks.size[:, 0], 0).double()
        offset = torch.zeros_like(images)
        if blocks.parallel is not None:
            # members of a set have no order, so the images of each member start at the same index
            parallel = blocks.parallel.clone()
            parallel[:, END] = 0
            images, offset, _ = steps(parallel, images)
        before = images.cumsum(0) - images
        if self.image_index == "batch":
            return before + offset
        # blocks of a sample are consecutive, so its first block has the number of images before it
        sample = torch.stack([blocks.sample, blocks.document])
        new = torch.ones_like(blocks.visual)
        new[1:] = (sample[:, 1:] != sample[:, :-1]).any(0)
        return before - before[new][new.long().cumsum(0) - 1] + offset

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return the axis of each pair (pairs,); with ``layout='elementwise'``, of each channel (2 pairs,).

        Raises:
            OptionError: the sections do not add up to the pairs, or there are fewer pairs than axes.
        """
        sections = self.sections
        if sections is None:
            if pairs < len(AXES):
                raise OptionError(
                    f"xdrope needs at least 4 pairs of channels for its 4 axes, got {pairs} per head. Use sections."
                )
            sections = (pairs - 3 * (pairs // 4), *[pairs // 4] * 3)
        elif sum(sections) != pairs:
            raise OptionError(
                f"sections={list(sections)} add up to {sum(sections)}, but a head has {counted(pairs, 'pair')} of "
                "channels. Use sections that add up to it."
            )
        if self.layout == "paired":
            return allocation.chunked(sections)
        return allocation.chunked([2 * section for section in sections])


def newline_images(
    types: Tensor, grids: Tensor | None, *, merge: int = 2, mask: Tensor | None = None
) -> tuple[Tensor, list[Image]]:
    """Return types and images for `Stream.from_ids`, from the outputs of HunyuanVL's processor.

    An image of h x w patches has ``h // merge`` rows of ``w // merge`` tokens and a newline token each. It may be
    enclosed by two boundary tokens, which are placeholders as well, and text in the returned types.

    Args:
        types: (b, s), 0 text, 1 image (`mm_token_type_ids`).
        grids: (n, 3), frames (1), rows and columns of patches (`image_grid_thw`); None without images.
        merge: divisor of rows and columns (`spatial_merge_size`).
        mask: (b, s), 0 for padding (`attention_mask`).

    Raises:
        ShapeError: shapes do not match.
        InputError: a grid has several frames, or the length of a run of placeholders differs from that of its
            images.

    Example:
        >>> types = torch.tensor([[0, 1, 1, 1, 1, 1, 0]])
        >>> newline_images(types, torch.tensor([[1, 2, 4]]))
        (tensor([[0, 0, 1, 1, 1, 0, 0]]), [Image(h=1, w=3, tiles=(1, 1), thumbnail=None)])
    """
    sizes = _merged_sizes(grids, merge)
    types, images = types.clone(), [Image(*size) for size in sizes]
    start = 0
    for row, first, length in _runs(types, mask):
        count, bounded = _images_of_run(length, [h * w for h, w in sizes[start:]])
        if not count:
            raise InputError(_mismatch(row, first, length, sizes[start:]))
        at = 0
        for h, w in sizes[start : start + count] if bounded else ():
            at += h * w + 2
            valid = _tokens_of(types, mask, row)
            types[row, valid[[first + at - h * w - 2, first + at - 1]]] = 0
        start += count
    return types, images


def _merged_sizes(grids: Tensor | None, merge: int) -> list[tuple[int, int]]:
    """Return the rows and columns of tokens of each image, including newline tokens."""
    if grids is None:
        return []
    if grids.ndim != 2 or grids.shape[1] != 3:
        raise ShapeError(
            f"newline_images: grids needs the shape (n, 3) of frames, rows, columns, got {tuple(grids.shape)}."
        )
    wrong = (grids[:, 0] != 1) | (grids[:, 1:] < merge).any(1)
    if bool(wrong.any()):
        raise InputError(
            f"newline_images: grids must have one frame, and at least {counted(merge, 'row')} and columns, got "
            f"{listed(grids[wrong][0])}. Pass image_grid_thw of the processor."
        )
    return [(h // merge, w // merge + 1) for _, h, w in listed(grids)]


def _tokens_of(types: Tensor, mask: Tensor | None, row: int) -> Tensor:
    """Return the indices of the tokens of a row that are not padding."""
    if mask is None:
        return torch.arange(types.shape[1], device=types.device)
    return mask[row].nonzero()[:, 0]


def _runs(types: Tensor, mask: Tensor | None) -> list[tuple[int, int, int]]:
    """Return (row, first token, length) of each run of image placeholders, without padding."""
    if types.ndim != 2 or (mask is not None and mask.shape != types.shape):
        raise ShapeError(
            f"newline_images: types and mask need one shape (b, s), got {tuple(types.shape)} and "
            f"{None if mask is None else tuple(mask.shape)}."
        )
    runs: list[tuple[int, int, int]] = []
    for row in range(len(types)):
        image = (types[row, _tokens_of(types, mask, row)] == IMAGE).long()
        edges = torch.diff(image, prepend=image.new_zeros(1), append=image.new_zeros(1))
        starts, ends = (listed((edges == step).nonzero()[:, 0]) for step in (1, -1))
        runs += [(row, first, end - first) for first, end in zip(starts, ends, strict=True)]
    return runs


def _images_of_run(length: int, tokens: Sequence[int]) -> tuple[int, bool]:
    """Return the number of next images in a run, and whether it has boundary tokens; 0 if no number fits."""
    total = 0
    for number, count in enumerate(tokens):
        total += count
        if length in (total, total + 2 * (number + 1)):
            return number + 1, length != total
        if total > length:
            break
    return 0, False


def _mismatch(row: int, first: int, length: int, sizes: Sequence[tuple[int, int]]) -> str:
    """Return the message for a run of placeholders that does not match the next grid."""
    where = f"Sample {row}, token {first} (without padding): {counted(length, 'adjacent image placeholder')}"
    if not sizes:
        return f"{where} exceed the image grids. Pass the grid of every image."
    h, w = sizes[0]
    return (
        f"{where}, but the next image has {counted(h, 'row')} of {counted(w, 'token')} with their newlines, {h * w} "
        f"in total, or {h * w + 2} with two boundary tokens. Check the order of the grids and the merge size."
    )
