"""Source and target of simultaneous translation in one sequence: streams, masks, and what tokens are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, is_whole
from vispe.multimodal.streams.segments import Text
from vispe.multimodal.streams.token_stream import Stream
from vispe.multimodal.streams.torch_typing import listed

SOURCE, TARGET = 0, 1  # groups
Lengths = Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True, eq=False)
class Streamed:
    """Pairs of source and target, the whole source first, as models are trained on them.

    Attributes:
        stream: source in group 0, target in group 1; all in group 0 where reading and writing do not overlap.
        source_lengths: tokens of each source, prompt and end included (b).
        target_lengths: tokens of each target, prompt and end included (b).
        prompt: tokens of the source's prompt.
        streaming: whether the target is written while the source arrives.
        source_word: (b, s), number of the word of each source token: 0 for the prompt, then 1, 2, ..., and one more for
            the end; -1 elsewhere.
        target_word: (b, s), the same for targets.
    """

    stream: Stream
    source_lengths: Tensor
    target_lengths: Tensor
    prompt: int
    streaming: bool
    source_word: Tensor
    target_word: Tensor

    def mask_index(self) -> Tensor:
        """Return what each token is for in training (b, s).

        0 for source and padding; for targets 2 if they are written while the source arrives, 1 if not; in the former
        case -1 for the first token after the source's prompt, which predicts the target's prompt.
        """
        marks = (self.target_word >= 0).long() * (2 if self.streaming else 1)
        if self.streaming:
            number = self.stream.mask.cumsum(1) - 1
            marks[self.stream.mask & (number == self.prompt)] = -1
        return marks

    def attention_mask(self, wait: int) -> Tensor:
        """Return which keys a query may attend to under the wait-k policy, (b, 1, s, s) bool.

        The i-th word of the target, counted from 1, is predicted when ``wait + i - 1`` words of the source have been
        read (the source's end counts as a word), the target's prompt when ``wait - 1`` have; all see the source's
        prompt. Source tokens see no target.

        Args:
            wait: words of the source that are read before the first word of the target, k; from 1 on.

        Raises:
            OptionError: the target is not written while the source arrives, or `wait` is not a whole number from 1 on.
        """
        if not self.streaming:
            raise OptionError(
                "With mode='batch' the whole source is read first; use stream.attention_mask()."
            )
        if not is_whole(wait) or wait < 1:
            raise OptionError(f"wait needs a whole number of words from 1 on, got {wait!r}.")
        after = torch.cat([self.target_word[:, 1:], torch.full_like(self.target_word[:, :1], -1)], 1)
        predicted = torch.maximum(after, self.target_word)  # word that comes next; the last token's own
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
    """Describe pairs of source and target by the tokens of their words (arXiv 2505.16983).

    Args:
        source: for each sample the tokens of each word or segment; a tensor (b, words) has 0 where there is none.
        target: like `source`.
        source_prompt: tokens before the words of a source.
        target_prompt: tokens before the words of a target.
        end: tokens after the words of each.
        length: of the sequences; that of the longest by default.
        mode: ``'streaming'`` for targets that are written while the source arrives, ``'batch'`` for one after the
            other.
        padding: where shorter sequences are filled up.

    Raises:
        InputError: there are not as many sources as targets, a source or target is empty, or one is too long.
        OptionError: a count is not a whole number from 0 on.
    """
    if mode not in ("streaming", "batch"):
        raise OptionError(f"mode is 'streaming' or 'batch', got {mode!r}.")
    sources, targets = _words(source, source_prompt, end), _words(target, target_prompt, end)
    if len(sources) != len(targets):
        raise InputError(
            f"Every source needs its target; got {len(sources)} sources and {len(targets)} targets."
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
    """Return which keys a query may attend to, (b, 1, s, s) bool: causal, and no later group.

    With tokens in the order of arrival, source in group 0 and target in group 1, a target sees all that came before it,
    a source token only the source: what is cached of the source does not depend on the target.
    """
    group = stream.scatter(stream.blocks.group[stream.block])
    return stream.attention_mask() & (group[:, None, :, None] >= group[:, None, None, :])


def _words(given: Lengths, prompt: int, end: int) -> list[list[int]]:
    """Return prompt, words and end of each sample, checked."""
    rows: Sequence[Sequence[int]] = listed(given) if isinstance(given, Tensor) else given
    samples = [[prompt, *(w for w in words if w != 0), end] for words in rows]
    for n, words in enumerate(samples):
        if not all(is_whole(w) and w >= 0 for w in words):
            raise OptionError(
                f"Tokens of prompts and words are whole numbers from 0 on; sample {n} has {words}."
            )
        if not sum(words):
            raise InputError(f"Sample {n} has a source or target without tokens; leave it out.")
    return samples


def _numbers(words: list[int]) -> Tensor:
    return torch.arange(len(words)).repeat_interleave(torch.tensor(words))


def _hidden(words: list[int]) -> Tensor:
    return torch.full((sum(words),), -1)


def _spread(stream: Stream, parts: list[Tensor]) -> Tensor:
    return stream.scatter(torch.cat(parts), -1)
