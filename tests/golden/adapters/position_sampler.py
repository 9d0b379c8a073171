"""Golden cases of randomised positions: sorted draws in sinusoids and rotations, drawn distances in ALiBi."""

import torch

import vispe


def run(case):
    kinds = {"randomized": _positions, "randomized_offsets": _offsets}
    yield from kinds[case.config("kind")](case)


def _positions(case):
    reach, draws = case.config("max_length"), case.input("draws")
    hosts = {"sincos1d": _sinusoid, "rotary": _rotary}
    sampler = vispe.create_encoding("randomized", reach=reach)
    if draws.unique().numel() != len(draws) or not ((draws >= 0) & (draws < reach)).all():
        raise ValueError("the draws are not distinct numbers below max_length")
    pos = vispe.Grid((len(draws),)).positions()
    pos = sampler.prepare(pos, draws={"randomized.0": draws.sort().values.double()})
    result = hosts[case.config("encoding")](case, pos)
    yield "coordinates", {"positions": pos.coords[0, :, 0].long(), **result}


def _sinusoid(case, pos):
    dim = case.config("dim")
    if case.config("length") != pos.tokens:
        raise ValueError("the length is not that of the draws")
    # one axis of frequencies: that of rotations, as sines before cosines
    rotary = vispe.create_encoding(
        "rope_axial", dim=dim, num_heads=1, temperature=case.config("max_time"), split=(dim // 2,)
    )
    transform = rotary.transform(pos, 0)
    return {"table": torch.cat([transform.sin[0, 0], transform.cos[0, 0]], -1)}


def _rotary(case, pos):
    x = case.input("x").transpose(1, 2)
    heads, width = x.shape[1], x.shape[-1]
    rotary = vispe.create_encoding(
        "rope_axial",
        dim=heads * width,
        num_heads=heads,
        temperature=case.config("base"),
        layout=case.config("layout"),
        split=(width // 2,),
    )
    return {"x_rot": rotary.transform(pos, 0).query(x).transpose(1, 2)}


def _offsets(case):
    if case.config("encoding") != "alibi":
        raise ValueError(case.config("encoding"))
    heads, queries, keys = (case.config(name) for name in ("heads", "queries", "keys"))
    both = case.config("both_sides")
    right = case.input("right" if both else "draws")
    left = case.input("left") if both else right
    encoding = vispe.create_encoding(
        "alibi", num_heads=heads, randomized_offsets=case.config("max_length"), both_sides=both
    )
    n = max(queries, keys)
    draws = {name: _longer(d, n - 1) for name, d in (("offsets.right", right), ("offsets.left", left))}
    pos = encoding.prepare(vispe.Grid((n,)).positions(), draws=draws)
    dense = encoding.bias(pos, 0).dense()[0]
    yield "table", {"bias": dense[:, :queries, :keys]}
    for backend in ("reference", "sdpa"):
        q, k, v = torch.randn(3, 1, heads, n, 8, generator=torch.Generator().manual_seed(0)).unbind()
        out = vispe.attention(q, k, v, bias=encoding.bias(pos, 0), backend=backend)
        expected = (q @ k.mT * 8**-0.5 + dense).softmax(-1) @ v
        case.agree(f"the output of {backend}", out, expected)


def _longer(draws, count):
    """Return draws extended after the last one, for the shorter side of a rectangle."""
    largest = draws.amax() if len(draws) else 0  # one token has no offsets
    longer = torch.arange(1, count - len(draws) + 1) + largest
    return torch.cat([draws, longer]).to(torch.float32)
