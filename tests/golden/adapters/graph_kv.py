"""Golden cases of Graph-KV: ids of parallel sources, of a target and of a query."""

import torch

from vispe.multimodal import Parallel, Stream, Text, create_scheme


def run(case):
    prefix, sources = case.config("prefix"), case.config("sources")
    target, query = case.config("target"), case.config("query")
    beside = Parallel([Text(n) for n in sources], see="self", target=Text(target))
    rows = [*([Text(prefix)] if prefix else []), beside, *([Text(query)] if query else [])]
    result = create_scheme("rope1d").coordinates(Stream.of([rows]))
    sizes = (prefix, sum(sources), target, query)
    _, *parts = result.ids[0, 0].long().split(sizes)
    yield "stream", dict(zip(("sources", "target", "query"), parts, strict=True))
    if query:  # what is decoded after the target
        known = Stream.of([rows[:-1]])
        decoded = create_scheme("rope1d").coordinates(known).decode(query)[0, 0].long()
        yield "decode", {"query": decoded}
    types = torch.zeros(1, sum(sizes[:2]), dtype=torch.long)
    members = [-1] * prefix + [m for m, n in enumerate(sources) for _ in range(n)]
    by_ids = Stream.from_ids(types, members=torch.tensor([members]))
    yield "from_ids", {"sources": create_scheme("rope1d").coordinates(by_ids).ids[0, 0, prefix:].long()}
