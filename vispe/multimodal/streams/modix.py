"""The scale of images and videos that MODIX computes from embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vispe.errors import InputError, ShapeError
from vispe.multimodal.streams.token_stream import Stream
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveFloat, checked


@checked
def modix(
    embeddings: Tensor, *, alpha: Annotated[float, Interval(least=0, most=1)] = 0.5, eps: PositiveFloat = 1e-6
) -> Callable[[Stream], Tensor]:
    """Return the scale of MODIX (arXiv 2604.12537) as a function for `Stream.scaled`.

    The scale of all images and videos of a sample is C_text / C_visual, where C is the geometric mean of two shares:
    of the entropies ``log det(covariance + eps I) / 2``, and of the alignments, the mean over the tokens of one
    modality of the largest cosine similarity with a token of the other. The entropy depends on the norm of the
    embeddings. It is negative for small norms, or for fewer tokens than channels; with two negative entropies the
    formula assigns the larger share to the lower entropy.

    Args:
        embeddings: inputs of the language model (b, s, d), with the features of images and videos in their positions.
        alpha: weight of the entropies, 0 to 1; the rest is the weight of the alignments.
        eps: added to the variances.

    Raises:
        ShapeError: the shape of the embeddings differs from that of the stream.
        InputError: a sample has no text, or entropies or alignments of text and images do not have the same sign.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, create_scheme
        >>> stream = Stream.of([[Text(4), Image(2, 3), Text(2)]])
        >>> scale = modix(torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(0)))
        >>> [round(value, 3) for value in scale(stream).tolist()]
        [1.15]
        >>> ids = create_scheme("rope1d").coordinates(stream.scaled(scale)).ids
    """

    def scale(stream: Stream) -> Tensor:
        if embeddings.ndim != 3 or embeddings.shape[:2] != stream.shape:
            raise ShapeError(
                f"modix: embeddings needs the shape {(*stream.shape, 'd')} of the stream, got "
                f"{tuple(embeddings.shape)}."
            )
        blocks = stream.blocks
        of_token = embeddings.detach()[stream.mask].double()
        sample = blocks.sample * (int(blocks.document.max()) + 1) + blocks.document
        sample_of_token, is_visual = sample[stream.block], blocks.visual[stream.block]
        values = torch.ones(int(blocks.picture.max()) + 1, dtype=torch.float64, device=of_token.device)
        for number in {int(n) for n in sample[blocks.visual]}:
            inside = sample_of_token == number
            step = _step(of_token[inside & ~is_visual], of_token[inside & is_visual], alpha, eps)
            values[blocks.picture[(sample == number) & blocks.visual]] = step
        return values

    return scale


def _step(text: Tensor, visual: Tensor, alpha: float, eps: float) -> float:
    """Return the ratio of the contributions of text (n, d) and of images and videos (m, d) of one sample."""
    if not len(text):
        raise InputError(
            "modix: each sample with images needs text, got a sample without. Use a scale of 1 for it."
        )
    similarity = normalize(text, dim=-1) @ normalize(visual, dim=-1).T
    pairs = {
        "entropies": (_entropy(text, eps), _entropy(visual, eps)),
        "alignments": (float(similarity.amax(1).mean()), float(similarity.amax(0).mean())),
    }
    # the sums that turn both into shares cancel in the ratio
    step = 1.0
    for (name, (of_text, of_visual)), weight in zip(pairs.items(), (alpha, 1 - alpha), strict=True):
        if weight and of_text * of_visual <= 0:
            raise InputError(
                f"modix: the {name} of text and images must have the same sign, got {of_text:g} and {of_visual:g}. "
                f"{'Multiply the embeddings by a factor' if name == 'entropies' else 'Use alpha=1'}."
            )
        step *= (of_text / of_visual) ** weight if weight else 1.0
    return step


def _entropy(x: Tensor, eps: float) -> float:
    """Return log det(covariance + eps I) / 2 of tokens (n, d), by the smaller of n x n and d x d matrices."""
    n, d = x.shape
    x = x - x.mean(0)
    gram = x @ x.T if n < d else x.T @ x
    gram = gram / n + eps * torch.eye(len(gram), dtype=x.dtype, device=x.device)
    return 0.5 * (float(torch.logdet(gram)) + max(0, d - n) * math.log(eps))
