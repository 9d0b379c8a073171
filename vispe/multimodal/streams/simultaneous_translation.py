"""Simultaneous translation: streams of source and target, attention masks, and token roles in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, counted, is_integer
from vispe.multimodal.streams.segments import Text
from vispe.multimodal.streams.token_stream import Stream
from vispe.multimodal.streams.torch_typing import listed

SOURCE, TARGET = 0, 1  # groups
Lengths = Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True, eq=False)
class Streamed:
    """Pairs of source and target, with the full source first, as used in training.

    Attributes:
        stream: source in group 0, target in group 1; all in group 0 if reading and writing do not overlap.
        source_lengths: tokens of each source, prompt and end included (b).
        target_lengths: tokens of each target, prompt and end included (b).
        prompt: tokens of the source's prompt.
        streaming: whether the target is generated while the source arrives.
        source_word: (b, s), word index of each source token: 0 for the prompt, then 1, 2, ..., and one more for
            the end; -1 elsewhere.
        target_word: (b, s), the same for targets.

    Example:
        >>> pairs = streamed([[2, 1]], [[1, 1]], source_prompt=1, target_prompt=1, end=1)
        >>> pairs.stream.shape, pairs.attention_mask(wait=1).shape
        (torch.Size([1, 9]), torch.Size([1, 1, 9, 9]))
    """

    stream: Stream
    source_lengths: Tensor
    target_lengths: Tensor
    prompt: int
    streaming: bool
    source_word: Tensor
    target_word: Tensor

    def mask_index(self) -> Tensor:
        """Return the role of each token in training (b, s).

        0 for source and padding; for targets 1, or 2 if they are generated while the source arrives. In
        streaming mode, the first token after the source's prompt has -1; it predicts the target's prompt.
        """
        roles = (self.target_word >= 0).long() * (2 if self.streaming else 1)
        if self.streaming:
            number = self.stream.mask.cumsum(1) - 1
            roles[self.stream.mask & (number == self.prompt)] = -1
        return roles

    def attention_mask(self, wait: int) -> Tensor:
        """Return the attention mask of the wait-k policy, (b, 1, s, s) bool.

        The i-th word of the target, counted from 1, is predicted when ``wait + i - 1`` words of the source have been
        read (the source's end counts as a word), the target's prompt when ``wait - 1`` have; all attend to the source's
        prompt. Source tokens do not attend to the target.

        Args:
            wait: number of source words read before the first target word, k; 1 or more.

        Raises:
            OptionError: the mode is not ``'streaming'``, or `wait` is not an integer of 1 or more.
        """
        if not self.streaming:
            raise OptionError(
                "With mode='batch', the full source is read first. Use stream.attention_mask()."
            )
        if not is_integer(wait) or wait < 1:
            raise OptionError(f"wait needs an integer of 1 or more, got {wait!r}.")
        after = torch.cat([self.target_word[:, 1:], torch.full_like(self.target_word[:, :1], -1)], 1)
        predicted = torch.maximum(after, self.target_word)  # next word, or the current one for the last token
        read = torch.where(self.target_word >= 0, predicted + wait, self.source_word.amax() + 1)
        return group_mask(self.stream) & (self.source_word[:, None, None, :] < read[:, None, :, None])


def streamed(
    source: Lengths,
    target: Lengths,
    *,
    source_prompt: int,
    target_prompt: int,
    end: int,
    length: int | None = None,
    mode: Literal["streaming", "batch"] = "streaming",
    padding: Literal["left", "right"] = "right",
) -> Streamed:
    """Create the stream of source-target pairs from the token counts of their words (arXiv 2505.16983).

    Args:
        source: number of tokens of each word or segment per sample; a tensor (b, words) is padded with 0.
        target: like `source`.
        source_prompt: number of tokens before the words of a source.
        target_prompt: number of tokens before the words of a target.
        end: number of tokens after the words of each.
        length: length of the sequences; that of the longest by default.
        mode: ``'streaming'`` for targets generated while the source arrives, ``'batch'`` for targets after
            their full source.
        padding: side of the padding of shorter sequences.

    Raises:
        InputError: the numbers of sources and targets differ, a source or target is empty, or one is too long.
        OptionError: a count is not an integer of 0 or more.

    Example:
        >>> pairs = streamed([[2, 1]], [[1, 1]], source_prompt=1, target_prompt=1, end=1)
        >>> pairs.source_word.tolist()
        [[0, 1, 1, 2, 3, -1, -1, -1, -1]]
        >>> pairs.target_word.tolist()
        [[-1, -1, -1, -1, -1, 0, 1, 2, 3]]
    """
    if mode not in ("streaming", "batch"):
        raise OptionError(f"mode must be 'streaming' or 'batch', got {mode!r}.")
    sources, targets = _words(source, source_prompt, end), _words(target, target_prompt, end)
    if len(sources) != len(targets):
        raise InputError(
            f"Every source needs a target, got {counted(len(sources), 'source')} and {counted(len(targets), 'target')}."
        )
    group = TARGET if mode == "streaming" else SOURCE
    pairs = list(zip(sources, targets, strict=True))
    rows = [[Text(sum(s)), Text(sum(t), group=group)] for s, t in pairs]
    stream = Stream.of(rows, padding, length)
    source_word = _spread(stream, [x for s, t in pairs for x in (_numbers(s), _hidden(t))])
    target_word = _spread(stream, [x for s, t in pairs for x in (_hidden(s), _numbers(t))])
    source_lengths, target_lengths = (torch.tensor([sum(words) for words in x]) for x in (sources, targets))
    return Streamed(
        stream, source_lengths, target_lengths, source_prompt, mode == "streaming", source_word, target_word
    )


def group_mask(stream: Stream) -> Tensor:
    """Return the causal attention mask without attention to later groups, (b, 1, s, s) bool.

    With tokens in the order of arrival, source in group 0 and target in group 1, a target attends to all previous
    tokens, a source token only to the source: the cache of the source does not depend on the target.

    Example:
        >>> stream = Stream.of([[Text(2), Text(1, group=1)]])
        >>> group_mask(stream)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    group = stream.scatter(stream.blocks.group[stream.block])
    return stream.attention_mask() & (group[:, None, :, None] >= group[:, None, None, :])


def _words(lengths: Lengths, prompt: int, end: int) -> list[list[int]]:
    """Return the checked counts of prompt, words and end of each sample."""
    rows: Sequence[Sequence[int]] = listed(lengths) if isinstance(lengths, Tensor) else lengths
    samples = [[prompt, *(w for w in words if w != 0), end] for words in rows]
    for n, words in enumerate(samples):
        if not all(is_integer(w) and w >= 0 for w in words):
            raise OptionError(
                f"Token counts of prompts and words must be integers of 0 or more, got {words} in sample {n}."
            )
        if not sum(words):
            raise InputError(f"Sample {n} has a source or target without tokens. Omit the sample.")
    return samples


def _numbers(words: list[int]) -> Tensor:
    return torch.arange(len(words)).repeat_interleave(torch.tensor(words))


def _hidden(words: list[int]) -> Tensor:
    return torch.full((sum(words),), -1)


def _spread(stream: Stream, parts: list[Tensor]) -> Tensor:
    return stream.scatter(torch.cat(parts), -1)
