"""Golden cases of ALiBi over graphs: the bias of given path lengths, which are those of the given graph."""

import torch

import vispe
from vispe.grid import PerToken


def run(case):
    samples, n, heads = (case.config(name) for name in ("B", "N", "heads"))
    lengths = case.input("distance")
    if tuple(lengths.shape) != (samples, n, n):
        raise ValueError(f"the lengths have shape {tuple(lengths.shape)}")
    if "adjacency" in case.inputs:
        case.agree("the path lengths", _paths(case.input("adjacency")), lengths)
    encoding = vispe.create_encoding("alibi_graph", num_heads=heads, unreachable=case.config("unreachable"))
    row = vispe.Grid((n,)).positions()
    free = vispe.Positions(torch.rand(samples, n, 2))
    wide = torch.nn.functional.pad(lengths, (2, 0, 2, 0))
    plain = {"given": (row, lengths), "bound": (row, PerToken(lengths, (1, 2))), "free": (free, lengths)}
    plain["behind prefix tokens"] = vispe.Grid((n,), prefix=2).positions(), wide
    for route, (pos, inputs) in plain.items():
        pos = encoding.prepare(pos.replace(attrs={"distance": inputs}))
        yield route, {"bias": encoding.bias(pos, 0).dense()[..., -n:, -n:].expand(samples, -1, -1, -1)}
    # tokens in another order, and back
    order = torch.stack([torch.randperm(n) for _ in range(samples)])
    rotated = encoding.prepare(row.replace(attrs={"distance": lengths})).gather(order)
    dense, inverse_order = encoding.bias(rotated, 0).dense(), order.argsort(1)
    yield (
        "gathered",
        {"bias": torch.stack([d[:, i][:, :, i] for d, i in zip(dense, inverse_order, strict=True)])},
    )


def _paths(adjacency):
    """Return the lengths of shortest paths, -1 where there is none."""
    n = adjacency.shape[-1]
    reached = torch.eye(n, dtype=torch.bool).expand_as(adjacency)
    lengths = torch.where(reached, 0.0, -1.0)
    for step in range(1, n):
        further = (reached.float() @ adjacency.float() > 0) | reached
        lengths = torch.where(further & ~reached, float(step), lengths)
        reached = further
    return lengths
