"""State of the sequences in a KV cache: what it stores of the positions of its tokens, and how text continues them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, counted
from vispe.hosts.transformers.language.parallel_sets import text_attributes
from vispe.multimodal import Scheme


@dataclass(eq=False)
class NextTokens:
    """Cosines and sines of the next text tokens, computed once for many decoding steps.

    Attributes:
        scheme: scheme of the coordinates.
        token_index: token indices (b, n).
        offset: offset of their coordinates, (b) or (b, k).
        length: number of cached tokens before the first of them.
        rotation: cosines and sines (b, n, width) for each kind of layers.
    """

    scheme: Scheme
    token_index: Tensor
    offset: Tensor
    length: int
    rotation: dict[str, tuple[Tensor, Tensor]]

    def select(self, rows: Tensor) -> NextTokens:
        """Return the values for some rows of the batch."""
        rotation = {
            kind: (cos[rows.to(cos.device)], sin[rows.to(sin.device)])
            for kind, (cos, sin) in self.rotation.items()
        }
        return replace(self, token_index=self.token_index[rows], offset=self.offset[rows], rotation=rotation)


@dataclass(eq=False)
class SequenceState:
    """State after a prompt: the coordinates of text are ``scheme.continue_text(index, offset)``.

    Attributes:
        offset: (b), float64, or (b, k) where layers have k counters.
        padding: number of tokens of each row without a separate index, such as padding (b).
        padded: these tokens, which `crop` may remove: for each call with such tokens, the number of tokens cached
            before it, and their mask (b, s).
        shift: position of the first token of each row (b), if padding before it has positions; None for 0.
        ids: coordinates of all tokens (axes, b, s), where keys are cached without rotation, or layers
            need the rotation of all tokens; otherwise None.
        by_mask: whether indices exclude padding; those of prompts without images include padding, as in the
            stock model.
        token_attributes: attributes of parallel sets for all tokens (k, b, s) as `Blocks.parallel`; None without sets.
        settled: number of cached tokens after which all tokens are text with this offset; None until it is known.
        packed: whether rows are packed samples, which cannot be continued.
        prefix: whether the cache contains only virtual tokens of prefix tuning.
        rotated: whether cached keys are rotated although `ids` is stored, for indexers that rotate cached keys.
        upcoming: rotation of the next text tokens during decoding of single tokens; otherwise None.
        ends_unknown: whether the offset is unknown: the caller passed other coordinates than those of the scheme,
            and the last token is part of an image.
        conversion: identity of the conversion that rotated the cached keys, `TextConversion.of_keys`; None if
            there are no such keys. The scheme in it is None after `reposition`, which accepts any.
    """

    offset: Tensor
    padding: Tensor
    ids: Tensor | None = None
    by_mask: bool = True
    settled: int | Tensor | None = None
    token_attributes: Tensor | None = None
    packed: bool = False
    prefix: bool = False
    rotated: bool = False
    upcoming: NextTokens | None = None
    ends_unknown: bool = False
    conversion: tuple[Any, ...] | None = None
    padded: tuple[tuple[int | Tensor, Tensor], ...] = ()
    shift: Tensor | None = None

    def select(self, rows: Tensor) -> SequenceState:
        """Return the state of some rows of the batch."""
        rows = rows.to(self.offset.device)
        ids, token_attributes = (None if x is None else x[:, rows] for x in (self.ids, self.token_attributes))
        upcoming = None if self.upcoming is None else self.upcoming.select(rows)
        return replace(
            self,
            offset=self.offset[rows],
            padding=self.padding[rows],
            ids=ids,
            token_attributes=token_attributes,
            upcoming=upcoming,
            padded=tuple((cached, padding[rows]) for cached, padding in self.padded),
            shift=None if self.shift is None else self.shift[rows],
        )

    def repeat(self, times: int) -> SequenceState:
        """Return the state with every row repeated."""
        return self.select(torch.arange(len(self.offset), device=self.offset.device).repeat_interleave(times))

    def first_of_each(self, rows: int) -> SequenceState:
        """Return the state of `rows` sequences, each of which the cache may repeat for beams or several answers.

        Raises:
            InputError: the rows of the cache are not repetitions of as many sequences.
        """
        cached = len(self.offset)
        if cached == rows:
            return self
        times = cached // rows
        if times * rows == cached:
            first = self.select(torch.arange(0, cached, times))
            repeated = first.repeat(times)
            if torch.equal(repeated.offset, self.offset) and torch.equal(repeated.padding, self.padding):
                return first
        raise InputError(
            f"The cache must have one row for each of {counted(rows, 'sequence')}, or equal repetitions of it for "
            f"beams or several answers, got {counted(cached, 'row')}. Select or repeat its rows with "
            "batch_select_indices or batch_repeat_interleave."
        )

    def with_padding(self, valid: Tensor, before: SequenceState | None, cache: Any) -> SequenceState:
        """Return the state after a call, in which the padding that the call has added is recorded.

        Args:
            valid: mask of the tokens of the call that are not padding (b, s).
            before: state before the call, or None.
            cache: KV cache before the call, or None.
        """
        compiling = torch.compiler.is_compiling()
        # a record of every compiled step would recompile the step
        if self is before or valid.is_meta or (compiling and valid.shape[1] == 1):
            return self
        padded = () if before is None else before.padded
        # prompts of text are indexed with their padding
        added = self.padding if before is None else self.padding - before.padding
        padding = ~valid & (added > 0)[:, None]
        if compiling or bool(padding.any()):
            cached = 0 if before is None else cache.get_seq_length()
            padded = (*padded, (cached.clone() if isinstance(cached, Tensor) else cached, padding))
        return self if len(padded) == len(self.padded) else replace(self, padded=padded)

    def with_ended_rows(self, mask: Tensor | None, cached: int) -> SequenceState:
        """Return the state in which text after the last image is padding if the mask of a later call excludes it.

        `generate` continues rows that have ended, until all have; their further tokens are not part of the next turn.

        Args:
            mask: padding mask (b, all tokens so far), or None.
            cached: number of cached tokens.
        """
        recorded = sum(int(padding.sum()) for _, padding in self.padded)
        if mask is None or not self.by_mask or self.settled is None or recorded != int(self.padding.sum()):
            return self
        start = int(self.settled)
        ended = ~mask[:, start:cached].bool()
        for first, padding in self.padded:
            known = padding[:, max(start - int(first), 0) :]
            begin = max(int(first) - start, 0)
            ended[:, begin : begin + known.shape[1]] &= ~known
        if not bool(ended.any()):
            return self
        padded = (*self.padded, (start, ended))
        return replace(self, padding=self.padding + ended.sum(1), padded=padded, upcoming=None)

    def cropped(self, length: int) -> SequenceState | None:
        """Return the state of the first `length` tokens, which end with text; None for no tokens.

        Raises:
            InputError: the position of padding is unknown.
        """
        if not length:
            return None
        if int(self.padding.sum()) != sum(int(padding.sum()) for _, padding in self.padded):
            raise InputError(
                "The cache cannot be cropped, as compiled steps with padding do not record where it is. Use a copy of "
                "the cache from before these steps."
            )
        ids, token_attributes = (
            None if x is None else x[..., :length] for x in (self.ids, self.token_attributes)
        )
        padded = tuple(
            (cached, padding[:, : length - int(cached)])
            for cached, padding in self.padded
            if int(cached) < length
        )
        padding = sum((p.sum(1) for _, p in padded), torch.zeros_like(self.padding))
        return replace(self, ids=ids, token_attributes=token_attributes, padded=padded, padding=padding)

    def add_text_attributes(self, mask: Tensor | None) -> None:
        """Add the attributes of cached text, where layers need those of all tokens, before the first set of a sequence.

        Args:
            mask: padding mask (b, all tokens so far), or None.
        """
        if self.token_attributes is not None or self.ids is None:
            return
        axes, rows, length = self.ids.shape
        valid = (
            torch.ones(rows, length, dtype=torch.bool, device=self.ids.device)
            if mask is None
            else mask[:, :length].bool()
        )
        self.token_attributes = text_attributes(axes, valid)
