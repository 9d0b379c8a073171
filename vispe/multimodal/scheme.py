"""Base class of position schemes: coordinates of streams, and allocation of axes to pairs of channels."""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

import torch
from torch import Tensor

from vispe.encodings.spec import spec_to_text
from vispe.errors import ShapeError, UnsupportedCombination, counted
from vispe.multimodal.block_counters import row_ends, row_starts, steps_before
from vispe.multimodal.coordinates import Coordinates
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.parallel_segments import steps
from vispe.multimodal.streams.position_coupling import couple
from vispe.multimodal.streams.token_stream import Stream
from vispe.multimodal.streams.torch_typing import check_exact
from vispe.multimodal.streams.visual_tokens import VisualTokens
from vispe.multimodal.text_counter import TextCounter
from vispe.utils.options import check_options


class Scheme(TextCounter):
    """Base of position schemes: a counter runs through text; visual segments have their own rule.

    A subclass is a frozen dataclass whose fields are its options, checked by their annotations. It defines the
    coordinates of visual tokens in `local`, the step of the counter over a visual segment in `counter_step`, and the
    axis of every pair of channels in `allocation`.

    Attributes:
        name: name in the registry.
        summary: one-line description.
        paper: title and link.
        text_exact: whether pure text is encoded exactly (bitwise) as by 1D RoPE.
        step: counter step of a text token.
        first_axis: quantity counted by the first of three axes in visual segments.
        levels: numbers in the counter; with more than one, it is not a position.
        applies_scale: whether `local` and `counter_step` include `Blocks.scale`, instead of being multiplied by it.

    Raises:
        OptionError: an option has an invalid value.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, create_scheme
        >>> scheme = create_scheme("mrope(stride=2)")
        >>> scheme.axes, scheme.stride
        (3, 2)
        >>> scheme.coordinates(Stream.of([[Text(2), Image(1, 2)]])).ids.shape
        torch.Size([3, 1, 4])
    """

    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    text_exact: ClassVar[bool] = True
    first_axis: ClassVar[str] = "time"
    applies_scale: ClassVar[bool] = False

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes; empty for time, row and column, or a single position."""
        return ()

    @property
    def numbers_tokens(self) -> bool:
        """Whether the first of several axes counts all tokens, including those of images."""
        return False

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def follows_text(self) -> tuple[bool, ...]:
        """For each axis, whether visual segments are counted from their position in the text, or from 0."""
        return (True,) * self.axes

    @property
    def added(self) -> tuple[int, ...]:
        """Axes without rotated channels; a table added to the tokens encodes them."""
        return ()

    def draw(self, blocks: Blocks, training: bool, generator: torch.Generator | None) -> Tensor | None:
        """Return the random draws of each block (m), or None."""
        return None

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the counter step over each block (m), float64; entries of text are ignored."""
        raise NotImplementedError

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the coordinates of visual tokens relative to the start of their block (axes, k), float64."""
        raise NotImplementedError

    def moved(self, local: Tensor, at: Tensor, tokens: VisualTokens) -> Tensor:
        """Return the coordinates (axes, k) of visual tokens whose blocks start at counters (k)."""
        follows_text = torch.tensor(self.follows_text, dtype=torch.float64, device=at.device)[:, None]
        return torch.addcmul(local, follows_text, at)

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return the axis of each pair of channels, (pairs,), or for each key head, (kv_heads, pairs).

        Or, if the two channels of a pair may read different axes, of each channel in the layout ``'half'``, (2 pairs,).
        """
        raise NotImplementedError

    def starts(self, blocks: Blocks) -> Tensor:
        """Return where the counter of each block's document and group starts (m), float64.

        Raises:
            UnsupportedCombination: the stream has several groups, and the scheme has one counter.
        """
        if bool((blocks.group != blocks.group[:1]).any()):
            raise UnsupportedCombination(
                f"{self.name} has one counter for all tokens, but the stream has several groups. Use group_pe."
            )
        return torch.zeros_like(blocks.group, dtype=torch.float64)

    def coordinates(
        self,
        stream: Stream,
        *,
        start: Tensor | None = None,
        training: bool = False,
        generator: torch.Generator | None = None,
        draws: Tensor | None = None,
        padding: float = 0,
    ) -> Coordinates:
        """Return the coordinates of every token of a stream.

        Args:
            stream: the token stream.
            start: counter from which the first sample of each row continues (b); 0 by default.
            training: whether random schemes draw.
            generator: source of the draws; the global generator by default.
            draws: `Coordinates.draws` of an earlier call (m), used instead of drawing.
            padding: coordinate of padding tokens.

        Raises:
            UnsupportedCombination: the scheme has no rule for such a stream.
            ShapeError: `start` or `draws` has the wrong shape.
            InputError: `start` has a dtype that rounds positions.
        """
        blocks = stream.blocks
        if start is not None:
            check_exact("start", start)
            if start.shape != stream.shape[:1]:
                raise ShapeError(
                    f"start needs one value for each of {counted(len(stream.mask), 'row')}, got {tuple(start.shape)}."
                )
        if draws is None:
            draws = self.draw(blocks, training, generator)
        elif draws.shape != blocks.tokens.shape:
            raise ShapeError(
                f"draws needs one value for each of {counted(len(blocks.tokens), 'block')}, got {tuple(draws.shape)}."
            )
        at, after, extent = self.counters(blocks, draws, start)
        ids = self.text(at.index_select(0, stream.block) + self.step * stream.index).clone()
        visual = blocks.visual.index_select(0, stream.block).nonzero()[:, 0]
        if len(visual):
            tokens = VisualTokens(blocks, *(x.index_select(0, visual) for x in (stream.block, stream.index)))
            local = self.local(tokens, draws)
            if blocks.scale is not None and not self.applies_scale:
                local = local * tokens.of(blocks.scale)
            ids.index_copy_(1, visual, self.moved(local, tokens.of(at), tokens))
        if stream.coupled is not None:
            ids = couple(ids, stream.coupled)
        following = row_ends(blocks, after, stream.lengths, start)
        extent = None if extent is None else stream.scatter(extent[stream.block])
        return Coordinates(stream.scatter(ids, padding), stream.mask, following, self, draws, extent)

    def counters(
        self, blocks: Blocks, draws: Tensor | None, start: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the counters at the start and end of each block (m), cumulative within its document and group.

        Also the counter step of the `Parallel` member that contains the block (m), or None without `Parallel`.
        """
        text = torch.where(blocks.shared, 0.0, self.step * blocks.tokens.double())
        visual = self.counter_step(blocks, draws)
        if blocks.scale is not None and not self.applies_scale:
            visual = visual * blocks.scale
        counter_step = torch.where(blocks.visual, visual, text)
        extent = offset = None
        if blocks.parallel is not None:
            counter_step, offset, extent = steps(blocks.parallel, counter_step)
        at = steps_before(blocks, counter_step) + self.starts(blocks)
        if start is not None:
            at = at + row_starts(blocks, start.to(at))
        return at if offset is None else at + offset, at + counter_step, extent

    def options(self) -> dict[str, object]:
        """Return the options and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}  # type: ignore[arg-type]
        return spec_to_text([{"name": self.name, **changed}])
