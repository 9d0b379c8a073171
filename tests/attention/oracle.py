"""Attention and its biases in float64, written from the definitions, as an oracle for tests."""

import itertools
import math

import torch


def cells_of(shape, prefix):
    """Return the cell of every token, None for prefix tokens."""
    return [None] * prefix + list(itertools.product(*(range(n) for n in shape)))


def distance(p, q, shape, spacing, metric, wrap):
    """Return the distance of two cells of a grid."""
    gaps = [abs(a - b) for a, b in zip(p, q, strict=True)]
    if wrap:
        gaps = [min(g, n - g) for g, n in zip(gaps, shape, strict=True)]
    gaps = [g * s for g, s in zip(gaps, spacing, strict=True)]
    return {
        "euclidean": lambda: math.sqrt(sum(g * g for g in gaps)),
        "squared": lambda: sum(g * g for g in gaps),
        "manhattan": lambda: sum(gaps),
        "chebyshev": lambda: max(gaps),
    }[metric]()


def divisor(shape, spacing, metric, wrap, normalize, reference=None):
    """Return the largest distance between two cells of the grid, found by trying all."""
    if normalize == "none":
        return 1.0
    field = shape if normalize == "max" else reference
    cells = cells_of(field, 0)
    return max(distance(cells[0], c, field, spacing, metric, wrap) for c in cells) or 1.0


def distance_matrix(grid, metric, wrap, normalize, reference=None):
    """Return the distances (n, n) of all tokens of a grid, 0 from and to prefix tokens."""
    spacing = grid.spacing or (1.0,) * grid.axes
    largest = divisor(grid.shape, spacing, metric, wrap, normalize, reference or grid.reference)
    cells = cells_of(grid.shape, grid.prefix)
    rows = [
        [
            0.0 if p is None or q is None else distance(p, q, grid.shape, spacing, metric, wrap) / largest
            for q in cells
        ]
        for p in cells
    ]
    return torch.tensor(rows, dtype=torch.float64)


def table_entries(grid):
    """Return for each pair of tokens the index of its table entry, or 'to', 'from', 'both' for prefix tokens."""
    cells = cells_of(grid.shape, grid.prefix)
    kind = {(True, False): 0, (False, True): 1, (True, True): 2}
    return [
        [
            kind[p is None, q is None]
            if p is None or q is None
            else tuple(a - b + n - 1 for a, b, n in zip(p, q, grid.shape, strict=True))
            for q in cells
        ]
        for p in cells
    ]


def table_matrix(values, grid, prefix=None):
    """Return the matrix (h, n, n) that a table describes, entry by entry."""
    heads = values.shape[0] if prefix is None else max(values.shape[0], prefix.shape[0])
    edge = torch.zeros(1, 3, dtype=torch.float64) if prefix is None else prefix
    sizes = values.shape[1:]
    numbers = torch.arange(sizes.numel()).reshape(sizes).tolist()

    def index_of(entry):
        if isinstance(entry, int):
            return sizes.numel() + entry
        result = numbers
        for i in entry:
            result = result[i]
        return result

    index = torch.tensor([[index_of(entry) for entry in row] for row in table_entries(grid)])
    return torch.cat([values.flatten(1).expand(heads, -1), edge.expand(heads, 3)], 1)[:, index]


def attend(q, k, v, *, bias=None, added=None, keep=None, scale=None, groups=1, value_term=None):
    """Return attention in float64, head by head; rows without a key are 0."""
    b, h, n, d = q.shape
    scale = d**-0.5 if scale is None else scale
    outs = []
    for sample in range(b):
        for head in range(h):
            logits = scale * q[sample, head] @ k[sample, head // groups].T
            for term in (bias, added):
                if term is not None:
                    logits = logits + term.expand(b, h, *logits.shape)[sample, head]
            open_ = torch.ones_like(logits, dtype=torch.bool)
            if keep is not None:
                open_ = keep.expand(b, h, *logits.shape)[sample, head]
            open_ = open_ & (logits > -math.inf)
            alive = open_.any(-1, keepdim=True)
            weight = torch.where(
                open_,
                (logits - torch.where(open_, logits, -math.inf).amax(-1, True).nan_to_num(0, 0, 0)).exp(),
                0,
            )
            weight = torch.where(alive, weight / weight.sum(-1, keepdim=True).clamp(min=1e-300), 0)
            out = weight @ v[sample, head // groups]
            if value_term is not None:
                table, buckets = value_term
                read = table[min(head, table.shape[0] - 1)][buckets]  # (n, m, d_v)
                out = out + (weight[..., None] * read).sum(1)
            outs.append(out)
    return torch.stack(outs).reshape(b, h, n, -1)
