"""Packing collator: several samples per row, with the position ids of a scheme, by which the model isolates samples."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from vispe.errors import InputError, OptionError, counted
from vispe.hosts.transformers.language.families import language_model_of, model_inside
from vispe.hosts.transformers.language.image_placeholders import stream_of, token_types
from vispe.hosts.transformers.packed_samples import check_layers
from vispe.train.vlm.prompts import OrderedPrompt

IGNORED = -100  # label of tokens without loss, as in transformers
PER_TOKEN = {"mm_token_type_ids": 0, "token_type_ids": 0, "moe_mm_token_type_ids": 0, "parallel_ids": -1}
"""Inputs with one value per token, and their padding values."""


class Packing:
    """Collator that packs samples into rows for a converted model.

    Returns `position_ids` (1 + axes, b, s) and no mask: ordinary ids, which restart at 0 with each sample, and the
    coordinates of the scheme. The converted model isolates samples by the ordinary ids, in training and evaluation,
    with or without a cache. Rows are filled with a padding sample without loss.

    Args:
        model: converted model, which defines the scheme and the image tokens.
        length: largest number of tokens per row.
        training: whether schemes with random coordinates sample them; samples depend on the tokens and `seed` only, so
            resumed runs are identical.
        seed: seed of the random coordinates.

    Raises:
        OptionError: the model is not converted.
        UnsupportedHost: layers of the model do not isolate samples, such as linear attention.
    """

    def __init__(self, model: nn.Module, length: int, *, training: bool = False, seed: int = 0) -> None:
        inner: Any = model_inside(model)
        scheme = getattr(inner, "vispe_scheme", None)
        if scheme is None or length < 1:
            raise OptionError(
                f"Packing: needs a model that vispe.convert has converted to a scheme, and length=1 or more, got a "
                f"{type(model).__name__} {'without' if scheme is None else 'with'} one and length={length}."
            )
        check_layers(language_model_of(inner), "Packing")
        self.inner, self.scheme, self.length = inner, scheme, length
        self.training, self.seed = training, seed

    def __call__(self, samples: Sequence[OrderedPrompt]) -> dict[str, Tensor]:
        """Return the inputs of the model and `labels` (b, s), `IGNORED` except for answers.

        Raises:
            InputError: a sample is longer than a row, has padding, or has several rows; or the inputs of two
                samples cannot be concatenated.
        """
        for number, sample in enumerate(samples):
            _check_sample(number, sample)
        rows = self.rows([s.inputs["input_ids"].shape[1] for s in samples])
        ordered = [samples[k] for row in rows for k in row]
        width = max(sum(samples[k].inputs["input_ids"].shape[1] for k in row) for row in rows)
        tokens, keys, number, labels = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(4))
        labels.fill_(IGNORED)
        per_token = {
            n: torch.full_like(tokens, v) for n, v in PER_TOKEN.items() if any(n in s.inputs for s in samples)
        }
        for row_index, row in enumerate(rows):
            end = 0
            for count, k in enumerate(row):
                start, end = end, end + samples[k].inputs["input_ids"].shape[1]
                tokens[row_index, start:end] = samples[k].inputs["input_ids"][0]
                keys[row_index, start:end] = torch.arange(end - start)
                number[row_index, start:end] = count
                answer = samples[k].answer
                labels[row_index, start + answer.start : start + answer.stop] = samples[k].wanted
                labels[row_index, start] = IGNORED  # the previous token belongs to another sample
                for name, values in per_token.items():
                    if name in samples[k].inputs:
                        values[row_index, start:end] = samples[k].inputs[name][0]
            # padding is a separate sample
            keys[row_index, end:] = torch.arange(width - end)
            number[row_index, end:] = len(row)
        inputs = _concatenated(ordered)
        types = token_types(self.inner.config, tokens, None, tuple(tokens.shape))
        all_tokens = torch.ones_like(tokens, dtype=torch.bool)
        stream = stream_of(self.inner, types, all_tokens, number, dict(inputs))  # type: ignore[arg-type]
        # seeded by the samples, independent of previous random numbers
        generator = torch.Generator().manual_seed(zlib.crc32(tokens.numpy().tobytes()) + self.seed)
        coordinates = self.scheme.coordinates(stream, training=self.training, generator=generator)
        ids = torch.cat([keys[None].double(), coordinates.ids])
        return {"input_ids": tokens, "position_ids": ids, "labels": labels, **per_token, **inputs}

    def rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the sample indices of each row (first-fit decreasing bin packing).

        Raises:
            InputError: a sample is longer than a row.
        """
        rows: list[list[int]] = []
        free: list[int] = []
        for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
            if lengths[k] > self.length:
                raise InputError(
                    f"Packing: samples must have at most length={self.length} tokens, got {lengths[k]}. "
                    "Increase `length`, or reduce the images."
                )
            row_index = next((r for r, left in enumerate(free) if left >= lengths[k]), len(rows))
            if row_index == len(rows):
                rows.append([])
                free.append(self.length)
            rows[row_index].append(k)
            free[row_index] -= lengths[k]
        return rows


def _check_sample(number: int, sample: OrderedPrompt) -> None:
    """Raise `InputError` unless a sample is one row without padding."""
    rows = sample.inputs["input_ids"].shape[0]
    mask = sample.inputs.get("attention_mask")
    if rows != 1 or (mask is not None and not bool((mask == 1).all())):
        raise InputError(
            f"Packing: samples must be one row (1, s) without padding, got sample {number} with {counted(rows, 'row')}"
            f"{'' if mask is None else f' and an attention_mask with the sum {int(mask.sum())} of {mask.numel()}'}. "
            "Split the batch, and remove padding."
        )


def _concatenated(samples: Sequence[OrderedPrompt]) -> dict[str, Any]:
    """Return the concatenated inputs that are not per-token values."""
    names = {n: None for s in samples for n in s.inputs}
    others = ("input_ids", "attention_mask", *PER_TOKEN)
    values = {n: [s.inputs[n] for s in samples if n in s.inputs] for n in names if n not in others}
    for name in [
        n for n in values if n.endswith("token_pooling")
    ]:  # indices into the patches of the whole call
        pixels = "pixel_values_videos" if name.startswith("video") else "pixel_values"
        counts = torch.tensor([0, *(p.shape[:-1].numel() for p in values[pixels])]).cumsum(0).tolist()
        values[name] = [torch.where(v < 0, v, v + n) for v, n in zip(values[name], counts, strict=False)]
    return {n: _concatenate(n, v) for n, v in values.items()}


def _concatenate(name: str, values: list[Any]) -> Any:
    """Return the concatenated values of all samples; images of different sizes are padded as by processors.

    Raises:
        InputError: the values cannot be concatenated.
    """
    if not isinstance(values[0], Tensor):
        if any(value != values[0] for value in values):
            raise InputError(
                f"Packing: {name} must be equal in all samples of a batch, got {values}. Group the samples."
            )
        return values[0]
    if len({v.shape[1:] for v in values}) > 1 and len({v.ndim for v in values}) == 1:
        if not name.startswith("pixel") and not name.endswith("position_ids"):
            raise InputError(
                f"Packing: {name} must have equal shapes in all samples of a batch, got "
                f"{', '.join(str(tuple(v.shape)) for v in values)}. Group the samples."
            )
        fill = -1 if name.endswith("position_ids") else 0
        largest = torch.tensor([v.shape[1:] for v in values]).amax(0).tolist()
        values = [
            pad(
                v,
                [n for m, s in zip(largest[::-1], v.shape[:0:-1], strict=True) for n in (0, m - s)],
                value=fill,
            )
            for v in values
        ]
    return torch.cat(values)
