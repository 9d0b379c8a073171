"""Jensen-Shannon divergence between the attention heads of two models (arXiv 2305.19466).

The paper, "The Impact of Positional Encoding on Length Generalization in Transformers", compares causal decoders with
and without a positional encoding; here two models are compared on the same images, such as before and after a retrofit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vispe.backbones.attention_recorder import LayerAttention, attention_map
from vispe.errors import ShapeError, UnsupportedHost

if TYPE_CHECKING:
    from vispe.evaluate.measure.audited_model import AuditedModel
    from vispe.evaluate.measure.base import Measure

QUERIES = 64
"""Queries per attention map that are compared, evenly spaced."""
COMPARED = 8
"""Number of images that the command compares heads on; more images change the result little."""
TINY = 1e-30  # lower bound of probabilities in Kullback-Leibler divergences


def jensen_shannon(a: Tensor, b: Tensor, *, causal: bool = False) -> Tensor:
    """Return the Jensen-Shannon divergence of all pairs of heads (h_a, h_b) in nats, mean over queries, float64.

    Args:
        a: attention (h_a, n, m); rows sum to 1.
        b: (h_b, n, m).
        causal: use keys 0 to t of row t only.

    Raises:
        ShapeError: the maps have different numbers of tokens.

    >>> one, other = torch.eye(2)[None], torch.eye(2).flip(0)[None]
    >>> jensen_shannon(one, other)
    tensor([[0.6931]], dtype=torch.float64)
    """
    a, b = _rows(a, b, causal)
    # one head of a against all heads of b at a time, to bound the memory
    mixed = torch.stack([_entropy((head + b) / 2) for head in a])
    return (mixed - (_entropy(a)[:, None] + _entropy(b)) / 2).mean(-1)


def mixture_kl(a: Tensor, b: Tensor, *, causal: bool = False) -> Tensor:
    """Return (KL(m, a) + KL(m, b)) / 2 of all pairs of heads (h_a, h_b), m their mean, in nats, mean over queries.

    The authors' code computes this value instead of the Jensen-Shannon divergence, (KL(a, m) + KL(b, m)) / 2.
    This value is unbounded, and dominated by keys to which one of the heads never attends. Probabilities are
    clamped to at least 1e-30. Arguments and errors are those of `jensen_shannon`.
    """
    a, b = _rows(a, b, causal)
    log_a, log_b = a.clamp(min=TINY).log(), b.clamp(min=TINY).log()
    divergences: list[Tensor] = []
    for p, log_p in zip(a, log_a, strict=True):
        mean = (p + b) / 2
        divergences.append((-_entropy(mean) - (mean * (log_p + log_b)).sum(-1) / 2).mean(-1))
    return torch.stack(divergences)


def symmetric_kl(a: Tensor, b: Tensor, *, causal: bool = False) -> Tensor:
    """Return KL(a, b) + KL(b, a) of all pairs of heads (h_a, h_b) in nats, mean over queries, float64.

    Probabilities are clamped to at least 1e-30, where the reference returns infinity. Arguments and errors are those of
    `jensen_shannon`.
    """
    a, b = _rows(a, b, causal)
    log_a, log_b = a.clamp(min=TINY).log(), b.clamp(min=TINY).log()
    pairs = [((p - b) * (log_p - log_b)).sum(-1).mean(-1) for p, log_p in zip(a, log_a, strict=True)]
    return torch.stack(pairs)


def strongest(a: Tensor, *, causal: bool = False) -> Tensor:
    """Return the index of the key with the most attention per query, (h, n, m) -> (h, n) int64."""
    return (a.tril() if causal else a).argmax(-1)


@torch.no_grad()
def compare_heads(
    a: AuditedModel, b: AuditedModel, images: Iterable[Tensor], images_of_b: Iterable[Tensor] | None = None
) -> Tensor:
    """Return the divergence between the layers of two models, (layers of a, layers of b) float64 in nats, 0 to ln 2.

    This is the minimum over pairs of heads of the Jensen-Shannon divergence averaged over images. Memory does not grow
    with the number of images; 64 evenly spaced queries of each map are compared.

    Args:
        a: a model whose attention can be read.
        b: the other model.
        images: (c, H, W) each, normalised for `a`.
        images_of_b: the same images, normalised for `b`; `images` by default.

    Raises:
        UnsupportedHost: the attention of one model cannot be read.
        ShapeError: there are no images, or the models split them into different tokens.
    """
    for audited in (a, b):
        if "attention" not in audited.can:
            raise UnsupportedHost(
                f"compare_heads: the attention of {audited.title} cannot be read ({audited.why['attention']}). Compare "
                "models whose attention layers are supported."
            )
    total: dict[tuple[int, int], Tensor] = {}
    count = 0
    pairs = ((x, x) for x in images) if images_of_b is None else zip(images, images_of_b, strict=True)
    for image, image_of_b in pairs:
        first: list[Tensor] = []

        def keep(captured: LayerAttention, first: list[Tensor] = first) -> None:
            first.append(_some_rows(captured))

        def compare(captured: LayerAttention, first: list[Tensor] = first) -> None:
            rows = _some_rows(captured)
            for i, other in enumerate(first):
                divergence = jensen_shannon(other, rows)
                total[i, captured.layer] = total.get((i, captured.layer), 0) + divergence

        a.watch(image[None], keep)
        b.watch(image_of_b[None], compare)
        count += 1
    if not count:
        raise ShapeError("compare_heads: no images, got an empty sequence. Pass at least one image.")
    rows, columns = (max(k[axis] for k in total) + 1 for axis in (0, 1))
    return torch.stack(
        [torch.stack([total[i, j].min() / count for j in range(columns)]) for i in range(rows)]
    )


def compare_heads_or_reason(
    a: AuditedModel,
    b: AuditedModel,
    images: Sequence[Tensor],
    images_of_b: Sequence[Tensor],
    measures: Sequence[Measure],
) -> tuple[Tensor | None, str]:
    """Return `compare_heads` on the first eight images and an empty string, or None and the reason.

    Args:
        a: a model.
        b: another one.
        images: (c, H, W) each, normalised for `a`.
        images_of_b: the same images, normalised for `b`.
        measures: the requested measures; heads are compared if any of the family 'attention' is among them.
    """
    if not any(m.family == "attention" for m in measures):
        return None, "no measure of attention was requested"
    numbers = range(min(len(images), COMPARED))
    try:
        return compare_heads(
            a, b, map(images.__getitem__, numbers), map(images_of_b.__getitem__, numbers)
        ), ""
    except (UnsupportedHost, ShapeError) as error:
        return None, str(error).rstrip(".")


def _rows(a: Tensor, b: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if a.shape[1:] != b.shape[1:]:
        raise ShapeError(
            f"jensen_shannon: attention maps (heads, n, m) must have the same tokens, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}. Use the same images and grids for both models."
        )
    both = a.double(), b.double()
    return (both[0].tril(), both[1].tril()) if causal else both


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy of rows (..., n, m) in nats, (..., n); 0 ln 0 is 0."""
    return -torch.xlogy(p, p).sum(-1)


def _some_rows(captured: LayerAttention) -> Tensor:
    """Return evenly spaced rows of the attention of a layer (h, rows, tokens)."""
    heads, tokens = captured.call.q.shape[1:3]
    step = -(-tokens // QUERIES)
    return torch.cat(
        [attention_map(captured.call, slice(h, h + 1))[1][0, :, ::step].cpu() for h in range(heads)]
    )
