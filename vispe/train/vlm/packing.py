"""Several samples in a row: position ids of a scheme made by the collator, and attention confined to each sample."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vispe.errors import InputError, OptionError
from vispe.hosts.transformers.language.convert import inner_of
from vispe.hosts.transformers.language.pictures import stream_of, token_types
from vispe.train.vlm.prompts import Arranged

IGNORED = -100  # label of a token that has no loss, as in transformers
PER_TOKEN = ("mm_token_type_ids", "token_type_ids")


class Packing:
    """A collator: samples in, inputs of a converted model out, as many samples in a row as fit.

    It gives `position_ids` (1 + axes, b, s) and no mask: ordinary ids, which start at 0 with each sample and so confine
    attention to it, and the coordinates of the scheme. A row is filled up with a sample of padding, without loss.

    Args:
        model: converted; says which scheme, and which tokens are pictures.
        length: tokens of a row, at most.
        training: whether schemes with random coordinates draw them; the draw follows from the samples and `seed`, so
            a run that goes on draws what it would have drawn.
        seed: of the draw.

    Raises:
        OptionError: the model is not converted, or lays pictures out in another order.
    """

    def __init__(self, model: nn.Module, length: int, *, training: bool = False, seed: int = 0) -> None:
        inner: Any = inner_of(model)
        scheme = getattr(inner, "vispe_scheme", None)
        if scheme is None or length < 1:
            raise OptionError(
                f"Packing needs a model that vispe.convert has given a scheme, and a length of 1 or more, got a "
                f"{type(model).__name__} {'without' if scheme is None else 'with'} one and length={length}."
            )
        self.inner, self.scheme, self.length = inner, scheme, length
        self.training, self.seed = training, seed

    def __call__(self, samples: Sequence[Arranged]) -> dict[str, Tensor]:
        """Return the inputs of the model and `labels` (b, s), `IGNORED` but for answers.

        Raises:
            InputError: a sample is longer than a row.
        """
        rows = self.rows([s.inputs["input_ids"].shape[1] for s in samples])
        ordered = [samples[k] for row in rows for k in row]
        width = max(sum(samples[k].inputs["input_ids"].shape[1] for k in row) for row in rows)
        tokens, keys, number, labels = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(4))
        labels.fill_(IGNORED)
        for at, row in enumerate(rows):
            end = 0
            for count, k in enumerate(row):
                start, end = end, end + samples[k].inputs["input_ids"].shape[1]
                tokens[at, start:end] = samples[k].inputs["input_ids"][0]
                keys[at, start:end] = torch.arange(end - start)
                number[at, start:end] = count
                asked = samples[k].answer
                labels[at, start + asked.start : start + asked.stop] = samples[k].wanted
            # padding is a sample of its own
            keys[at, end:] = torch.arange(width - end)
            number[at, end:] = len(row)
        inputs = _joined(ordered)
        types = token_types(self.inner.config, tokens, None, tuple(tokens.shape))
        everything = torch.ones_like(tokens, dtype=torch.bool)
        stream = stream_of(self.inner, types, everything, number, dict(inputs))  # type: ignore[arg-type]
        # of the samples alone, so that it does not matter what was drawn before
        generator = torch.Generator().manual_seed(zlib.crc32(tokens.numpy().tobytes()) + self.seed)
        found = self.scheme.coordinates(stream, training=self.training, generator=generator)
        ids = torch.cat([keys[None].double(), found.ids])
        return {"input_ids": tokens, "position_ids": ids, "labels": labels, **inputs}

    def rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return which samples stand in each row: longest first, each in the first row with room.

        Raises:
            InputError: a sample is longer than a row.
        """
        rows: list[list[int]] = []
        room: list[int] = []
        for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
            if lengths[k] > self.length:
                raise InputError(
                    f"A sample has {lengths[k]} tokens, more than the {self.length} of a row; give a larger length, or "
                    "smaller pictures."
                )
            at = next((r for r, left in enumerate(room) if left >= lengths[k]), len(rows))
            if at == len(rows):
                rows.append([])
                room.append(self.length)
            rows[at].append(k)
            room[at] -= lengths[k]
        return rows


def _joined(samples: Sequence[Arranged]) -> dict[str, Tensor]:
    """Return what samples hold beside tokens, sample after sample; what is said of each token the model finds anew."""
    names = {n: None for s in samples for n in s.inputs}
    left = ("input_ids", "attention_mask", *PER_TOKEN)
    return {n: torch.cat([s.inputs[n] for s in samples if n in s.inputs]) for n in names if n not in left}
