"""Golden cases of MD-LRPE: the widened or rotated tokens, with gradients."""

import torch

import vispe

FORMS = {"md_lrpe_cosine": "cosine", "md_lrpe_rotate": "rotate"}


def run(case):
    case.ignore("seed", "how the case was made")
    heads, width, shape = case.config("heads"), case.config("head_dim"), case.config("shape")
    encoding = vispe.create_encoding(
        "lightnet",
        dim=heads * width,
        num_heads=heads,
        axes=len(shape),
        form=FORMS[case.config("kind", "md_lrpe_cosine")],
        learned=True,
    )
    encoding.load_state_dict({"theta": case.param("theta")})
    pos = vispe.Grid(tuple(shape), prefix=case.config("prefix_tokens", 0)).positions()
    for route in ("query", "key"):
        x = case.input("x").requires_grad_()
        encoding.zero_grad()
        y = getattr(encoding.transform(pos, 0), route)(x)
        case.backward(cotangent=y)
        result = {"y": y, "grad.x": x.grad, "grad.theta": encoding.theta.grad}
        yield route, {name: value for name, value in result.items() if name in case.output_names}
    # both backends take the wider queries and keys
    q, k, v = torch.randn(3, 2, heads, pos.tokens, width, generator=torch.Generator().manual_seed(0))
    transform = encoding.transform(pos, 0)
    outs = [vispe.attention(q, k, v, transform=transform, backend=b) for b in ("reference", "sdpa")]
    case.agree("the outputs of the backends", *outs)
