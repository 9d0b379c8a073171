"""Encodings that add products of queries, keys and learned vectors: random ones, tokens, and dropped tokens."""

import torch

from vispe import create_encoding

DIM, HEADS, WIDTH = 12, 3, 4


def random_encoding(name, seed=0, **options):
    """Return an encoding in float64 with random parameters."""
    encoding = create_encoding({"name": name, **options}, dim=DIM, num_heads=HEADS).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return encoding


def content(tokens, b=2, seed=1):
    """Return random queries, keys and values (b, heads, tokens, width)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, HEADS, tokens, WIDTH, generator=generator).double() for _ in range(3)]


def check_dropped_tokens(encoding, pos, **scale):
    """Compare the bias after dropping different tokens of two samples with the bias between all tokens."""
    keep = torch.tensor([[0, 1, 3, 4, 9, 13], [0, 1, 12, 2, 7, 3]])
    q, k, _ = content(14)
    gathered = [t.gather(2, keep[:, None, :, None].expand(-1, HEADS, -1, WIDTH)) for t in (q, k)]
    dense = encoding.bias(pos, 0).dense(q=q, k=k, **scale)
    result = encoding.bias(pos.gather(keep), 0).dense(q=gathered[0], k=gathered[1], **scale)
    for b in range(2):
        torch.testing.assert_close(result[b], dense[b][:, keep[b]][:, :, keep[b]])
