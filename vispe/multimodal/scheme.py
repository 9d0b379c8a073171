"""Base class of position schemes: coordinates of streams, and allocation of axes to pairs of channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, cast

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, UnsupportedCombination, counted
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.parallel_segments import steps
from vispe.multimodal.streams.position_coupling import couple
from vispe.multimodal.streams.token_stream import Stream
from vispe.multimodal.streams.torch_typing import check_exact
from vispe.utils.options import check_options


@dataclass(frozen=True, eq=False)
class VisualTokens:
    """Tokens of images and videos, k in total; coordinates in float64.

    Attributes:
        blocks: all blocks of the stream.
        block: block of each token (k).
        index: index of each token in its block (k).

    Example:
        >>> import torch
        >>> from vispe.multimodal import Image, Stream, Text
        >>> stream = Stream.of([[Text(1), Image(2, 2)]])
        >>> visual = stream.blocks.visual[stream.block]
        >>> tokens = VisualTokens(stream.blocks, stream.block[visual], stream.index[visual])
        >>> tokens.row.tolist(), tokens.column.tolist()
        ([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0])
    """

    blocks: Blocks
    block: Tensor
    index: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Return values of blocks (m, ...) for each token (k, ...)."""
        return values.index_select(0, self.block)

    @cached_property
    def _cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return frame, row and column; quotients of integers below 2 ** 26 are exact in float64."""
        rows, columns = (self.of(n) for n in self.blocks.size[:, 1:].double().unbind(1))
        index = self.index.double()
        line = (index / columns).floor()
        frame = (line / rows).floor()
        return frame, line - frame * rows, index - line * columns

    @property
    def frame(self) -> Tensor:
        """Frame of each token, counted from 0."""
        return self._cells[0]

    @property
    def row(self) -> Tensor:
        """Row of each token in its frame, counted from 0."""
        return self._cells[1]

    @property
    def column(self) -> Tensor:
        """Column of each token in its frame, counted from 0."""
        return self._cells[2]


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Coordinates of every token, and the counters at which sequences continue.

    Attributes:
        ids: (axes, b, s), float64; padding has the requested value.
        mask: (b, s) bool, false for padding.
        next: counter of the token that follows each row (b), float64; (b, k) if layers have k separate
            counters.
        scheme: the scheme of the coordinates.
        draws: random draws of each block (m), or None; pass them again for the same coordinates.
        extent: counter steps of the `Parallel` member that contains a token (b, s), 0 outside; None if
            there is none.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, create_scheme
        >>> coordinates = create_scheme("mrope").coordinates(Stream.of([[Text(1), Image(2, 2)]]))
        >>> coordinates.ids[:, 0].tolist()
        [[0.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0, 1.0, 2.0]]
        >>> coordinates.next.tolist(), coordinates.decode(2)[0].tolist()
        ([3.0], [[3.0, 4.0]])
    """

    ids: Tensor
    mask: Tensor
    next: Tensor
    scheme: Scheme
    draws: Tensor | None = None
    extent: Tensor | None = None

    def decode(self, tokens: int) -> Tensor:
        """Return the coordinates of the next text tokens of each row, (axes, b, tokens)."""
        return self.scheme.continue_text(torch.arange(tokens, device=self.next.device), self.next)

    def delta(self, end: str = "next", padded: bool = False) -> Tensor:
        """Return the offset from token indices to positions of generated text, (b, 1), float64.

        Args:
            end: definition of the next position: ``'next'``, the counter, correct for every scheme; or, as in model
                code, one more than the largest coordinate on all axes (``'max'``) or on the first
                (``'time'``), rounded up if not integers (``'ceil'``).
            padded: whether token indices include padding.

        Raises:
            OptionError: `end` is invalid, or the counter of the scheme has several numbers.
        """
        if end != "next" and self.scheme.levels > 1:
            raise OptionError(
                f"The counter of {self.scheme.name} has {counted(self.scheme.levels, 'number')}, which cannot be "
                f"inferred from the "
                f"largest coordinate, got end={end!r}. Omit end."
            )
        if self.next.ndim > 1:
            raise OptionError(
                f"A delta needs a single counter, got {counted(self.next.shape[1], 'counter')} of layers "
                f"({self.scheme})."
            )
        if end == "next":
            following = self.next
        elif end in ("max", "time", "ceil"):
            rows = self.ids[:1] if end == "time" else self.ids
            largest = rows.masked_fill(~self.mask, -torch.inf).amax((0, 2))
            following = (largest.ceil() if end == "ceil" else largest) + 1
        else:
            raise OptionError(f"end must be 'next', 'max', 'time' or 'ceil', got {end!r}.")
        length = self.mask.shape[1] if padded else self.mask.sum(1)
        return (following - length * self.scheme.step)[:, None]


class Scheme:
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

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    text_exact: ClassVar[bool] = True
    step: ClassVar[float] = 1.0
    first_axis: ClassVar[str] = "time"
    levels: ClassVar[int] = 1
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
    def axes(self) -> int:
        """Number of coordinates of a token."""
        return 3

    @property
    def counts(self) -> int:
        """Number of counters: one, or one per scheme if layers have different schemes."""
        return 1

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

    def text(self, at: Tensor) -> Tensor:
        """Return the coordinates (axes, ...) of text at a counter (...)."""
        return at.expand(self.axes, *at.shape)

    def counter(self, ids: Tensor) -> Tensor:
        """Return the counter (...) at which text has the coordinates (axes, ...); the reverse of `text`."""
        return ids[0]

    def continue_text(self, number: Tensor, counter: Tensor) -> Tensor:
        """Return the coordinates (axes, b, s) of text tokens `number`, (s) or (b, s), after a counter per row."""
        return self.text(number.double() * self.step + counter[:, None])

    def counter_after(self, counter: Tensor, tokens: Tensor) -> Tensor:
        """Return the counter of each row (b) after `tokens` text tokens (b); negative numbers count backwards."""
        return counter + self.step * tokens

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
        if start is not None and start.shape != stream.shape[:1]:
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
        end = (
            torch.searchsorted(blocks.sample, torch.arange(len(stream.mask), device=at.device), right=True)
            - 1
        )
        empty = stream.lengths == 0
        following = after[end.clamp(min=0)]
        following = torch.where(empty, 0.0 if start is None else start.double(), following)
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
        key = (blocks.sample * (blocks.document.max() + 1) + blocks.document) * (
            blocks.group.max() + 1
        ) + blocks.group
        order = key.argsort(stable=True)
        step, key = counter_step[order], key[order]
        before = step.cumsum(0) - step
        new = torch.ones_like(key, dtype=torch.bool)
        new[1:] = key[1:] != key[:-1]
        first = new.nonzero()[:, 0][new.cumsum(0) - 1]
        at = torch.empty_like(before).index_copy_(0, order, before - before[first])
        at = at + self.starts(blocks)
        if start is not None:
            first = blocks.document.index_select(0, torch.searchsorted(blocks.sample, blocks.sample))
            at = at + torch.where(blocks.document == first, start.to(at)[blocks.sample], 0.0)
        return at if offset is None else at + offset, at + counter_step, extent

    def options(self) -> dict[str, object]:
        """Return the options and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}  # type: ignore[arg-type]
        inner = ",".join(f"{k}={_word(v)}" for k, v in changed.items())
        return f"{self.name}({inner})" if inner else self.name


def _word(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if not isinstance(value, tuple | list):
        return str(value)
    return f"[{','.join(map(_word, cast('Sequence[object]', value)))}]"
