"""Golden cases of Inkling's relative logits: bias, growth of the logits and attention, also of decoding steps."""

import torch
from torch.nn.functional import pad

import vispe
from vispe import Grid
from vispe.encodings.compose import transform_of


def run(case):
    case.ignore("seed", "how the case was made")
    states = case.input("states").double().requires_grad_()
    batch, queries, heads, basis = states.shape
    groups, keys, width = case.input("k").shape[1:]
    sizes = {"batch": batch, "queries": queries, "keys": keys, "num_heads": heads}
    sizes |= {"num_key_value_heads": groups, "head_dim": width, "d_rel": basis}
    wrong = [name for name, size in sizes.items() if case.config(name, size) != size]
    extent = case.config("rel_extent", case.param("proj").shape[1])
    if wrong or tuple(case.param("proj").shape) != (basis, extent):
        raise ValueError(f"the shapes of the case do not fit its {wrong or 'rel_extent'}")
    floor, alpha = case.config("log_scaling_n_floor", None), case.config("log_scaling_alpha", 0.1)
    options = {} if floor is None else {"log_floor": floor, "log_alpha": alpha, "log_layers": [1]}
    # block 0 has a sliding window and no growth of the logits, block 1 is global
    sliding = case.config("sliding", False)
    layer = 0 if sliding else 1
    encoding = vispe.create_encoding(
        "distance_bank.inkling", dim=heads * basis, num_heads=heads, head_dim=width, basis=basis, depth=2,
        max_dist=[extent, extent], **options,
    ).double()  # fmt: skip
    with torch.no_grad():  # the states are those after the projection
        encoding.gates.weight.copy_(torch.eye(heads * basis))
        encoding.distance_bank.copy_(case.param("proj"))
    first = case.config("query_offset", 0)
    rows, length = slice(first, first + queries), max(keys, first + queries)
    pos = Grid((length,)).positions()
    index = torch.arange(length)
    offsets = index[:, None] - index
    visible = (offsets >= 0) & (offsets < extent) if sliding else offsets >= 0
    real = (index < keys).expand(batch, -1)
    growth = encoding.growth(pos, layer)
    tau = torch.ones(1, length) if growth is None else growth

    def of_all(x):
        """Return queries (b, h, length, d) of the complete sequence, of which only those of the case are used."""
        return pad(x, (0, 0, first, length - first - queries))

    for backend in ("reference", "sdpa"):
        encoding.zero_grad()
        states.grad = None
        q, k, v = (case.input(name).double().requires_grad_() for name in "qkv")
        x = pad(states.flatten(2), (0, 0, first, length - first - queries))
        bias, transform = encoding.bias(pos, layer, x), transform_of([encoding], pos, layer, x)
        k_all, v_all = (pad(t, (0, 0, 0, length - keys)) for t in (k, v))
        y = vispe.attention(
            of_all(q), k_all, v_all, bias=bias, transform=transform, attn_mask=visible, key_padding_mask=real,
            enable_gqa=True, backend=backend,
        )[:, :, rows]  # fmt: skip
        case.backward(cotangent=y)
        grown = bias.dense()[:, :, rows, :keys]
        products = transform.query(of_all(q))[:, :, rows] @ k.repeat_interleave(heads // groups, 1).mT
        outputs = {
            "bias": grown / tau[0, rows, None],
            "tau": tau[0, rows],
            "logits": products * width**-0.5 + grown,
            "y": y,
            "grad.states": states.grad,
            "grad.proj": encoding.distance_bank.grad,
            "grad.q": q.grad,
            "grad.k": k.grad,
            "grad.v": v.grad,
        }
        yield backend, {name: value for name, value in outputs.items() if name in case.output_names}
