"""Golden cases of PRoPE: projections, transformed queries, keys and values, and attention with gradients."""

import vispe
from vispe import Grid, Positions


def run(case):
    case.ignore("seed", "how the case was made")
    batch, heads, tokens, width = case.input("q").shape
    views, rows, columns = (case.config(name) for name in ("views", "patch_rows", "patch_columns"))
    sizes = (case.config("batch", batch), case.config("num_heads", heads), case.config("head_dim", width))
    if sizes != (batch, heads, width) or tokens != views * rows * columns:
        raise ValueError("the tokens or channels of the case do not add up")
    size = (case.config("image_height", None), case.config("image_width", None))
    attrs = {"extrinsic": case.input("viewmats").double()}
    if case.config("intrinsics", "Ks" in case.inputs):
        attrs |= {"intrinsic": case.input("Ks").double(), "image_size": size}
    elif "Ks" in case.inputs:
        case.input("Ks")  # the reference was called without them
    encoding = vispe.create_encoding(
        "prope", dim=heads * width, num_heads=heads, head_dim=width, base=case.config("freq_base", 100.0)
    )
    scale = width**-0.5 if case.usual_scale(width) else case.config("scale")
    case.config("scale", None)
    # a grid of views, and the same coordinates without a grid
    grid = Grid((views, rows, columns)).positions()
    free = Positions(grid.coords[..., 1:].double())
    for route, pos in (("grid", grid), ("free coordinates", free)):
        pos = encoding.prepare(pos.replace(coords=pos.coords.double()).replace(attrs=attrs))
        for backend in ("reference", "sdpa"):
            q, k, v = (case.input(name).double().requires_grad_() for name in "qkv")
            transform = encoding.transform(pos, 0)
            y = vispe.attention(q, k, v, transform=transform, scale=scale, backend=backend)
            case.backward(cotangent=y)
            first = [view * rows * columns for view in range(views)]
            outputs = {
                "projection": encoding.projections(pos)[:, first],
                "q_t": transform.query(q),
                "k_t": transform.key(k),
                "v_t": transform.value(v),
                "y": y,
                "grad.q": q.grad,
                "grad.k": k.grad,
                "grad.v": v.grad,
            }
            yield f"{route}, {backend}", {n: value for n, value in outputs.items() if n in case.output_names}
