"""Common outputs of rotary cases: tables, rotated queries and keys, and gradients."""

import math

from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import rotation


def transformed(case, ids, axis_of_pair, double=False):
    """Return frequencies, tables (halves joined if `double`) and rotated tensors for coordinates (axes, 1, s)."""
    freqs = inverse_frequencies(case.config("head_dim"), case.config("rope_theta"))
    rotary = rotation(ids, freqs, axis_of_pair)
    cos, sin = (x[0, 0].repeat(1, 2) if double else x[0, 0] for x in (rotary.cos, rotary.sin))
    result = {"inv_freq": freqs, "cos": cos, "sin": sin}
    return requested(case, result | (rotated(case, rotary) if "q" in case.inputs else {}))


def rotated(case, rotary):
    """Return rotated queries and keys, their products, and gradients for the cotangents of the case."""
    q, k = (case.input(name).requires_grad_() for name in "qk")
    result = {"q_rot": rotary.query(q), "k_rot": rotary.key(k)}
    result["logits"] = result["q_rot"] @ result["k_rot"].transpose(-1, -2) / math.sqrt(q.shape[-1])
    has_grad = case.backward(**{f"cotangent.{name}": y for name, y in result.items()})
    return requested(case, result | ({"grad.q": q.grad, "grad.k": k.grad} if has_grad else {}))


def requested(case, result):
    """Return the outputs that the case has."""
    return {name: value for name, value in result.items() if name in case.output_names}
