"""Common outputs of packed vision towers: rotated queries and keys (n, h, d_h), tables and gradients."""

import vispe


def rotated(case, spec, pos):
    """Return tables, rotated queries and keys, and their gradients, from an encoding at the positions of patches."""
    q, k = (case.input(name).requires_grad_() for name in "qk")
    heads, width = case.config("num_heads"), case.config("head_dim")
    if q.shape[1:] != (heads, width) or k.shape != q.shape:
        raise ValueError(
            f"queries {tuple(q.shape)} and keys {tuple(k.shape)}; the case says {heads} x {width}"
        )
    encoding = vispe.create_encoding(
        spec, dim=heads * width, num_heads=heads, head_dim=width, temperature=case.config("theta", 10000.0)
    )
    transform = encoding.transform(pos, 0)
    cos, sin = (table[0, 0].repeat(1, 2) for table in (transform.cos, transform.sin))
    result = {"cos": cos, "sin": sin}
    result |= {
        f"{name}_rot": rotate(x.transpose(0, 1)[None])[0].transpose(0, 1)
        for name, x, rotate in (("q", q, transform.query), ("k", k, transform.key))
    }
    if case.backward(**{f"cotangent.{name}": result[name] for name in ("q_rot", "k_rot")}):
        result |= {"grad.q": q.grad, "grad.k": k.grad}
    return result
