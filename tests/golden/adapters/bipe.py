"""Golden cases of bilevel positions: numbers of segments, positions inside them, and ALiBi over segments."""

import torch

import vispe
from vispe.multimodal import Stream, Text, create_scheme


def run(case):
    tokens = case.input("ids")
    ends = torch.isin(tokens, torch.tensor(case.config("separators")))
    length = case.config("train_length", None)
    scheme = create_scheme("bilevel", **({} if length is None else {"train_length": length}))
    yield "from_ids", _outputs(case, scheme.coordinates(_typed(ends)))
    yield "segments", _outputs(case, scheme.coordinates(_by_hand(ends)))


def _typed(ends):
    return Stream.from_ids(torch.zeros_like(ends, dtype=torch.long), boundaries=ends)


def _by_hand(ends):
    """Return the same sequences, one text for each segment."""
    rows = []
    for row in ends.tolist():
        cuts = [0, *(k + 1 for k, end in enumerate(row) if end)]
        lengths = [b - a for a, b in zip(cuts, [*cuts[1:], len(row)], strict=True)]
        closed = [True] * (len(cuts) - 1) + [False]
        rows.append([Text(n, boundary=end) for n, end in zip(lengths, closed, strict=True) if n])
    return Stream.of(rows)


def _outputs(case, result):
    inter, intra, intra_copy = result.ids.long()
    if not torch.equal(intra, intra_copy):
        raise ValueError("rows and columns of text differ")
    outputs = {"inter": inter, "intra": intra}
    if "key_bias" in case.output_names:
        outputs["key_bias"] = _key_bias(case, inter)
    return {name: value for name, value in outputs.items() if name in case.output_names}


def _key_bias(case, inter):
    """Return the bias of the last query relative to that of keys of segment 0."""
    if case.config("form") != "key":
        raise ValueError("only the form of keys alone is known")
    heads, factor = case.config("heads"), case.config("slope_factor")
    alibi = vispe.create_encoding("alibi", num_heads=heads, factor=factor)
    pos = vispe.Positions(inter[..., None].float())
    last = alibi.bias(pos, layer=0).dense()[:, :, -1:]
    return last + torch.tensor(alibi.head_slopes())[:, None, None] * inter[:, None, None, -1:]
