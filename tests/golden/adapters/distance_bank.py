"""Golden cases of the bank of functions of distance: the bias of a causal sequence, more keys than queries included."""

from torch.nn.functional import pad

import vispe
from vispe import Grid


def run(case):
    queries, basis, dim = case.config("queries"), case.config("basis"), case.config("dim")
    keys = case.config("keys") or queries
    heads, reach = case.config("heads"), case.config("max_dist")
    names = {"gates.weight": "weight", "gates.bias": "bias", "distance_bank": "distance_bank"}
    # one axis of n tokens, and an image of one column: the same distances, of which the causal half is compared
    for route, options, shape in (
        ("causal", {"causal": True}, (keys,)),
        ("column", {}, (keys, 1)),
    ):
        encoding = vispe.create_encoding(
            "distance_bank", dim=dim, num_heads=heads, basis=basis, max_dist=reach, **options
        )
        encoding.load_state_dict({mine: case.param(theirs) for mine, theirs in names.items()})
        encoding.double()
        x = case.input("x").double().requires_grad_()
        if tuple(x.shape) != (case.config("B"), queries, dim):
            raise ValueError("the tokens are not those that the case says")
        # queries are the last of the keys; the tokens of other keys are not read
        tokens = pad(x, (0, 0, keys - queries, 0))
        bias = encoding.bias(Grid(shape).positions(), 0, tokens).dense()[:, :, keys - queries :]
        bias = bias.tril(keys - queries)
        case.backward(cotangent=bias)
        result = {"bias": bias, "grad.x": x.grad}
        result |= {f"grad.{theirs}": encoding.get_parameter(mine).grad for mine, theirs in names.items()}
        yield route, {name: value for name, value in result.items() if name in case.output_names}
