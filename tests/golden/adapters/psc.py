"""Golden cases of PSC: calibrated queries and keys, with gradients."""

import vispe


def run(case):
    heads, width, length = case.config("H"), case.config("D"), case.config("N")
    encoding = vispe.create_encoding("psc", dim=heads * width, num_heads=heads)
    encoding.load_state_dict(
        {f"{side}_{name}": case.param(f"{name}_phase") for side in "qk" for name in ("up", "down")}
    )
    encoding.double()
    pos = vispe.Grid((length,)).positions()
    for side, route in (("q", "query"), ("k", "key")):
        x = case.input("x").double().requires_grad_()
        if x.shape != (case.config("B"), heads, length, width):
            raise ValueError(f"x is {tuple(x.shape)}")
        encoding.zero_grad()
        y = getattr(encoding.transform(pos, 0), route)(x)
        result = {"y": y}
        if case.backward(cotangent=y):
            result["grad.x"] = x.grad
            result |= {
                f"grad.{name}_phase": getattr(encoding, f"{side}_{name}").grad for name in ("up", "down")
            }
        yield route, {name: value for name, value in result.items() if name in case.output_names}
    if width % 4:  # too narrow for the rotation
        return
    # before a rotation of a sum, whichever comes first in it
    x = case.input("x").double()
    outs = []
    for spec in ("psc+rope_axial", "rope_axial+psc"):
        both = vispe.create_encoding(spec, dim=heads * width, num_heads=heads).double()
        next(e for e in both.parts() if e.name == "psc").load_state_dict(encoding.state_dict())
        transform = both.transform(pos, 0)
        outs += [
            vispe.attention(x, x.flip(-1), x.flip(-2), transform=transform, backend=b)
            for b in ("reference", "sdpa")
        ]
    for out in outs[1:]:
        case.agree("sums of psc and a rotation", out, outs[0])
