"""Errors of a random call relative to its definition, and whether they exceed what rounding explains."""

import math
from functools import cached_property

import torch
from torch import Tensor

from tests.attention.fuzz.random_calls import CONDITION, LIMITS, RandomCall


def results_and_gradients(
    results: tuple[Tensor, ...], inputs: list[Tensor], cotangents: list[Tensor]
) -> dict[str, Tensor]:
    """Return output, log-sum-exp and gradients by name, with -inf of closed rows as 0."""
    named = dict(zip(("output", "lse"), results, strict=False))
    learned = [i for i, t in enumerate(inputs) if t.requires_grad]
    graded = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    if learned and graded:
        finite = [r.masked_fill(r == -math.inf, 0.0) for r, _ in graded]
        grads = torch.autograd.grad(
            finite, [inputs[i] for i in learned], [c.to(r.dtype) for r, c in graded], allow_unused=True
        )
        for i, g in zip(learned, grads, strict=True):
            named[f"gradient {i}"] = torch.zeros_like(inputs[i]) if g is None else g
    return {name: t.detach().double().masked_fill(t == -math.inf, 0.0) for name, t in named.items()}


class Judge:
    """The definition of a call, and its change when all inputs and logits change by a rounding error."""

    def __init__(self, call: RandomCall) -> None:
        self.call = call
        exact = self._wide(0.0)
        self.closed = None
        results = call.definition(exact)
        self.cotangents = [torch.randn(r.shape).to(call.dtype).double() for r in results]
        if len(results) > 1:
            self.closed = results[1] == -math.inf
            self.cotangents[1] = self.cotangents[1].masked_fill(self.closed, 0.0)
        self.expected = results_and_gradients(results, exact, self.cotangents)
        self.largest = max([float(t.norm()) for n, t in self.expected.items() if "grad" in n] or [0.0])

    @cached_property
    def changes(self) -> dict[str, float]:
        """Return the largest of several random changes, as one may cancel by chance."""
        changes = dict.fromkeys(self.expected, 0.0)
        eps, single = torch.finfo(self.call.dtype).eps, torch.finfo(torch.float32).eps
        for _ in range(5):
            inputs = self._wide(single, eps)
            cotangents = [c * (1 + eps * torch.randn_like(c)) for c in self.cotangents]
            # delta is computed from the rounded output
            products = self.expected["output"] * cotangents[0]
            error = eps * products.norm(dim=-1, keepdim=True) * torch.randn_like(products[..., :1])
            changed = results_and_gradients(self.call.definition(inputs, single, error), inputs, cotangents)
            for name, t in changed.items():
                changes[name] = max(changes[name], float((t - self.expected[name]).norm()))
        return changes

    def _wide(self, single: float, half: float = 0.0) -> list[Tensor]:
        """Return the inputs in float64, changed by random relative errors.

        Args:
            single: errors of most inputs, whose products are computed in float32.
            half: errors of values, and of all inputs of a call with a rotation, which is rounded to its dtype.
        """
        wide, call = [], self.call
        for i, t in enumerate(call.inputs()):
            is_rounded = i < len(call.leaves) and (call.rotation or i == len(call.leaves) - 1)
            noise = 1 + (half if is_rounded else single) * torch.randn(t.shape, dtype=torch.float64)
            wide.append((t.detach().double() * noise).requires_grad_(t.requires_grad))
        return wide

    def errors(self, backend: str) -> tuple[dict[str, float], dict[str, float]]:
        """Return the relative errors of a backend above the limits: due to cancellation, and not due to it."""
        call, limits = self.call, LIMITS[self.call.dtype]
        results = call.run(backend)
        assert results[0].dtype == call.dtype, results[0].dtype
        if self.closed is not None:
            assert torch.equal(results[1] == -math.inf, self.closed), "other rows are closed"
        actual = results_and_gradients(results, call.inputs(), self.cotangents)
        with torch.no_grad():
            # in evaluation, masks and strips are cached in the second call and read in the third
            again = [call.run(backend) for _ in range(3)][-1]
        repeated = results_and_gradients(again, [], self.cotangents)
        cancellation, failures = {}, {}
        comparisons = [(name, name, actual) for name in self.expected]
        comparisons += [(f"{name} in evaluation", name, repeated) for name in repeated]
        for label, name, results_of in comparisons:
            expected = self.expected[name]
            error, norm = float((results_of[name] - expected).norm()), float(expected.norm())
            is_grad = "gradient" in name
            # gradients much smaller than others, and results of few numbers, may cancel
            floor = 3e-2 * self.largest if is_grad else 1e-2 * math.sqrt(expected.numel())
            limit = limits[is_grad] * max(norm, floor)
            if not error <= limit:
                group = cancellation if error <= CONDITION * self.changes[name] else failures
                group[label] = error / max(norm, floor, 1e-12)
        return cancellation, failures
