"""Common outputs of cases of rotations: rotated queries and keys, their scores, and the gradients of both."""


def rotated(case, transform, dtype=None):
    """Return the transformed queries and keys of a case and their unscaled scores.

    They are computed in `dtype`, by default that of the inputs.
    """
    q, k = (case.input(name).to(dtype).requires_grad_() for name in "qk")
    result = {"q_rot": transform.query(q), "k_rot": transform.key(k)}
    result["scores"] = result["q_rot"] @ result["k_rot"].transpose(-1, -2)
    if case.backward(cotangent=result["scores"]):
        result |= {"grad.q": q.grad, "grad.k": k.grad}
    return {name: value for name, value in result.items() if name in case.output_names}
