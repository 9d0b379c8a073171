"""Golden cases of deformable anchors: values, and gradients of the anchors."""

import vispe


def run(case):
    axes, levels = case.config("axes", 3), case.config("levels")
    low, high = case.config("bbox", [-1, 1])
    options = {
        "levels": levels,
        "base": case.config("base_resolution"),
        "growth": case.config("growth"),
        "box": (low, high),
        "eps": case.config("eps", 1e-6),
    }
    encoding = vispe.create_encoding(
        "neuda", dim=axes * (1 + 2 * levels), axes=axes, project=False, **options
    )
    if list(encoding.scales) != list(case.config("scales", list(encoding.scales))):
        raise ValueError(f"the case has scales {case.config('scales')}, the encoding {list(encoding.scales)}")
    encoding.load_state_dict({"anchors": case.param("anchors")})
    for route in ("encode", "table"):
        encoding.zero_grad()
        points = case.input("xyz").requires_grad_()
        if route == "encode":
            y = encoding.encode(points)
        else:
            free = vispe.create_encoding({**encoding.config, "normalize": False})
            free.anchors = encoding.anchors
            y = free.table(vispe.Positions(points))[0]
        case.backward(cotangent=y)
        result = {"y": y, "grad.anchors": encoding.anchors.grad, "grad.xyz": points.grad}
        yield route, {name: value for name, value in result.items() if name in case.output_names}
