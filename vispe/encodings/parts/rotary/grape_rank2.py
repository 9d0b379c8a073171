"""Group actions of GRAPE (arXiv 2512.07805): rotations of rank-2 generators, gated and path-summed biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, exact_product
from vispe.errors import ShapeError
from vispe.grid import Positions


def rank2_rotation(a: Tensor, b: Tensor, angle: Tensor) -> Tensor:
    """Return ``exp(angle (a b^T - b a^T))`` (..., s, s) in closed form.

    Args:
        a: (..., s).
        b: like a.
        angle: (...), broadcastable to the leading axes of a and b.
    """
    generator = a[..., :, None] * b[..., None, :]
    generator = generator - generator.transpose(-1, -2)
    # Rodrigues' formula, because L^3 = -s^2 L for the generator L with area s
    first, second = _coefficients(a, b, angle)
    square = exact_product(generator, generator)
    eye = torch.eye(a.shape[-1], dtype=square.dtype, device=square.device)
    return eye + first[..., None, None] * generator + second[..., None, None] * square


def rotate_rank2(x: Tensor, a: Tensor, b: Tensor, angle: Tensor) -> Tensor:
    """Return ``exp(angle (a b^T - b a^T)) x`` (..., s) in O(s), without the matrix.

    Args:
        x: (..., s).
        a: (..., s), broadcastable to x.
        b: like a.
        angle: (...), broadcastable to the leading axes of x.
    """
    first, second = (f[..., None] for f in _coefficients(a, b, angle))
    # L x and L^2 x need only the products of x with a and b, and those of a and b
    u, v = (a * x).sum(-1, keepdim=True), (b * x).sum(-1, keepdim=True)
    alpha, beta, gamma = _gram(a, b)
    rotated = a * v - b * u
    twice = gamma * (a * v + b * u) - beta * (a * u) - alpha * (b * v)
    return x + first * rotated + second * twice


def _gram(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple((p * q).sum(-1, keepdim=True) for p, q in ((a, a), (b, b), (a, b)))  # pyright: ignore[reportReturnType]  three of them


def _coefficients(a: Tensor, b: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return sin(angle s) / s and (1 - cos(angle s)) / s^2, accurate for small s."""
    alpha, beta, gamma = (t.squeeze(-1) for t in _gram(a, b))
    # s: area spanned by a and b; sinc keeps both quotients accurate as s -> 0
    s = (alpha * beta - gamma.square()).clamp(min=torch.finfo(a.dtype).tiny).sqrt()
    # torch.sinc(x) is sin(pi x) / (pi x)
    turn = angle * s / math.pi
    # 1 - cos(t) = 2 sin(t / 2)^2, which does not cancel for small t
    return angle * turn.sinc(), angle.square() / 2 * (turn / 2).sinc().square()


class OneSidedBias(Bias):
    """``-slope[h] * max(p_i - p_j, 0)`` along one axis, for causal sequences."""

    __slots__ = ("slopes",)

    def __init__(self, slopes: tuple[float, ...], pos: Positions) -> None:
        super().__init__(pos)
        self.slopes = slopes

    @property
    def finite(self) -> bool:
        """True: no entry is infinite."""
        return True

    def _dense(self, request: DenseRequest) -> Tensor:
        pos_q, pos_k = request.positions(self.pos)
        step = (pos_q.coords[:, :, None, 0] - pos_k.coords[:, None, :, 0]).clamp(min=0)
        step = step.masked_fill(~(pos_q.spatial[:, :, None] & pos_k.spatial[:, None]), 0.0)
        return step[:, None] * -request.pick(step.new_tensor(self.slopes))[:, None, None]


class ContentGateBias(GatedBias):
    """``softplus(omega_h) * (gate_q(i) + gate_k(j)) * profile(i, j)``, gates read from queries and keys.

    gate_k(j) = softplus(k_j . u_h / sqrt(d)), gate_q(i) = softplus(q_i . v_h / sqrt(d)).

    Args:
        profile: bias that is gated.
        omega: (h,).
        key: u (h, d), or None for no key gate.
        query: v (h, d), or None for no query gate.
    """

    __slots__ = ("key_gate", "omega", "query_gate")

    def __init__(self, profile: Bias, omega: Tensor, key: Tensor | None, query: Tensor | None) -> None:
        super().__init__(None, None, profile)
        self.omega, self.key_gate, self.query_gate = omega, key, query

    def gates(self, request: DenseRequest) -> tuple[Tensor | None, Tensor | None]:
        """Return the gates of queries and of keys, (b, h, n), None for no gate."""
        strength = F.softplus(at_least_float32(request.pick(self.omega)))[:, None]
        gates: list[Tensor | None] = []
        for name, direction, x in (
            ("keys", self.key_gate, request.k),
            ("queries", self.query_gate, request.q),
        ):
            if direction is not None and x is None:
                raise ShapeError(
                    f"ContentGateBias needs {name} for its gates, got None. Pass q and k to dense()."
                )
            if direction is None or x is None:
                gates.append(None)
                continue
            wide, along = at_least_float32(request.pick(x, 1)), at_least_float32(request.pick(direction))
            gates.append(strength * F.softplus((wide * along[:, None]).sum(-1) * wide.shape[-1] ** -0.5))
        return gates[1], gates[0]


def path_bias(p: Tensor, time: Tensor, on_path: Tensor, slopes: Tensor, base: float) -> Tensor:
    """Return the path sums (b, h, n, n), 0 on and above the diagonal.

    e[t, l] = slope_h logsigmoid(p_t . rot(p_l) / d); bias[t, j] = sum of e[t, l] over j < l <= t. rot divides by the
    root mean square and rotates pairs (c, c + d/2) by minus l base^(-2c/d).

    Args:
        p: (b, h, n, d).
        time: (1 or b, n), position of every token along the sequence.
        on_path: (1 or b, n) bool; other tokens add no penalty, and have rows and columns of 0.
        slopes: (h,).
        base: ratio of the frequencies; 1 rotates all pairs equally.
    """
    # keys: normalised to length sqrt(d), rotated by minus their position
    half = p.shape[-1] // 2
    unit = p * (p.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).rsqrt()
    rates = base ** -(torch.arange(half, device=p.device, dtype=p.dtype) / half)
    angle = (time[..., None].to(p.dtype) * rates)[:, None]
    x, y = unit[..., :half], unit[..., half:]
    cos, sin = angle.cos(), angle.sin()
    rotated = torch.cat([x * cos + y * sin, y * cos - x * sin], -1)
    # penalties e[t, l] of every pair; path sums are differences of cumulative sums
    steps = F.logsigmoid(exact_product(p, rotated.transpose(-1, -2)) / p.shape[-1]) * slopes[:, None, None]
    pairs = (on_path[:, :, None] & on_path[:, None])[:, None]
    upto = (steps * pairs).tril().cumsum(-1)
    return (upto[..., -1:] - upto).tril(-1) * pairs
