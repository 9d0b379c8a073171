"""How far the attention of two models is apart, head by head (after arXiv 2305.19466)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vispe.backbones.attention_recorder import Seen, attention_map
from vispe.errors import ShapeError, UnsupportedHost

if TYPE_CHECKING:
    from vispe.evaluate.audit.audited_model import Host
    from vispe.evaluate.audit.measure import Measure

QUERIES = 64
"""Rows of a map that two models are compared on, evenly spread."""
COMPARED = 8
"""Images on which the heads of two models are compared by the command; more change little."""
TINY = 1e-30


def jensen_shannon(a: Tensor, b: Tensor, *, causal: bool = False) -> Tensor:
    """Return the Jensen-Shannon divergence of all pairs of heads (h_a, h_b) in nats, mean over queries, float64.

    Args:
        a: attention (h_a, n, m), rows of which sum to 1.
        b: (h_b, n, m).
        causal: row t is read over keys 0 to t.

    Raises:
        ShapeError: the maps are of different tokens.

    >>> one, other = torch.eye(2)[None], torch.eye(2).flip(0)[None]
    >>> jensen_shannon(one, other)
    tensor([[0.6931]], dtype=torch.float64)
    """
    a, b = _rows(a, b, causal)
    # one head of a with all of b at a time: memory as for one model
    mixed = torch.stack([_entropy((head + b) / 2) for head in a])
    return (mixed - (_entropy(a)[:, None] + _entropy(b)) / 2).mean(-1)


def mixture_kl(a: Tensor, b: Tensor, *, causal: bool = False) -> Tensor:
    """Return (KL(m, a) + KL(m, b)) / 2 of all pairs of heads (h_a, h_b), m their mean, in nats, mean over queries.

    The code of the paper computes this in place of the Jensen-Shannon divergence, which is (KL(a, m) + KL(b, m)) / 2:
    it has no upper end, and a key that one head never looks at decides it. Probabilities below 1e-30 are taken as
    1e-30. Arguments and errors are those of `jensen_shannon`.
    """
    a, b = _rows(a, b, causal)
    log_a, log_b = a.clamp(min=TINY).log(), b.clamp(min=TINY).log()
    found: list[Tensor] = []
    for p, log_p in zip(a, log_a, strict=True):
        mean = (p + b) / 2
        found.append((-_entropy(mean) - (mean * (log_p + log_b)).sum(-1) / 2).mean(-1))
    return torch.stack(found)


def symmetric_kl(a: Tensor, b: Tensor, *, causal: bool = False) -> Tensor:
    """Return KL(a, b) + KL(b, a) of all pairs of heads (h_a, h_b) in nats, mean over queries, float64.

    Probabilities below 1e-30 are taken as 1e-30, where the reference has infinity. Arguments and errors are those of
    `jensen_shannon`.
    """
    a, b = _rows(a, b, causal)
    log_a, log_b = a.clamp(min=TINY).log(), b.clamp(min=TINY).log()
    pairs = [((p - b) * (log_p - log_b)).sum(-1).mean(-1) for p, log_p in zip(a, log_a, strict=True)]
    return torch.stack(pairs)


def strongest(a: Tensor, *, causal: bool = False) -> Tensor:
    """Return the key that each query attends to most (h, n) int64, of attention (h, n, m)."""
    return (a.tril() if causal else a).argmax(-1)


@torch.no_grad()
def compare_heads(a: Host, b: Host, images: Iterable[Tensor]) -> Tensor:
    """Return how far the layers of two models are apart, (layers of a, layers of b) float64 in nats, from 0 to ln 2.

    That is the smallest Jensen-Shannon divergence over pairs of heads of its mean over images. Memory does not grow
    with images; of each map 64 rows are compared, evenly spread.

    Args:
        a: a model whose attention can be read.
        b: another.
        images: (c, H, W) each, normalised.

    Raises:
        UnsupportedHost: the attention of one cannot be read.
        ShapeError: there are no images, or the models cut them into different tokens.
    """
    for host in (a, b):
        if "attention" not in host.can:
            raise UnsupportedHost(f"Heads of {host.title} cannot be compared: {host.why['attention']}.")
    total: dict[tuple[int, int], Tensor] = {}
    count = 0
    for image in images:
        first: list[Tensor] = []

        def keep(seen: Seen, first: list[Tensor] = first) -> None:
            first.append(_some_rows(seen))

        def compare(seen: Seen, first: list[Tensor] = first) -> None:
            rows = _some_rows(seen)
            for i, other in enumerate(first):
                found = jensen_shannon(other, rows)
                total[i, seen.layer] = total.get((i, seen.layer), 0) + found

        a.watch(image[None], keep)
        b.watch(image[None], compare)
        count += 1
    if not count:
        raise ShapeError("Heads are compared on images; got none.")
    rows, columns = (max(k[axis] for k in total) + 1 for axis in (0, 1))
    return torch.stack(
        [torch.stack([total[i, j].min() / count for j in range(columns)]) for i in range(rows)]
    )


def heads_apart(
    a: Host, b: Host, images: Sequence[Tensor], measures: Sequence[Measure]
) -> tuple[Tensor | None, str]:
    """Return `compare_heads` on the first eight images, or None and why not.

    Args:
        a: a model.
        b: another.
        images: (c, H, W) each, normalised.
        measures: what is asked of both; heads are compared where attention is.
    """
    if not any(m.family == "attention" for m in measures):
        return None, "attention was not asked about"
    try:
        return compare_heads(a, b, (images[k] for k in range(min(len(images), COMPARED)))), ""
    except (UnsupportedHost, ShapeError) as error:
        return None, str(error).rstrip(".")


def _rows(a: Tensor, b: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if a.shape[1:] != b.shape[1:]:
        raise ShapeError(
            f"Heads are compared on the same tokens, got maps (heads, n, m) {tuple(a.shape)} and {tuple(b.shape)}."
        )
    wide = a.double(), b.double()
    return (wide[0].tril(), wide[1].tril()) if causal else wide


def _entropy(p: Tensor) -> Tensor:
    """Return the entropy of rows (..., n, m) in nats, (..., n); 0 ln 0 is 0."""
    return -torch.xlogy(p, p).sum(-1)


def _some_rows(seen: Seen) -> Tensor:
    """Return evenly spread rows of the attention of a layer (h, rows, tokens)."""
    heads, tokens = seen.call.q.shape[1:3]
    step = -(-tokens // QUERIES)
    return torch.cat([attention_map(seen.call, slice(h, h + 1))[1][0, :, ::step].cpu() for h in range(heads)])
