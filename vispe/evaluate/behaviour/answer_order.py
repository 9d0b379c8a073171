"""Order sensitivity: spread of answers over permutations of the images of a prompt.

Follows "Position of Uncertainty: A Cross-Linguistic Study of Positional Bias in Large Language Models" (spread and
entropy by slot), "LLMs are Bayesian, in Expectation, not in Realization" (averaging over orders), and "Eliminating
Position Bias of Language Models: A Mechanistic Approach" (PINE, arXiv 2407.01100: invariance to the order of segments).
"""

from __future__ import annotations

from itertools import permutations
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.utils.interval import Interval
from vispe.utils.options import checked

COLOURS = ("red", "green", "blue")


@checked
def orders(count: Annotated[int, Interval(least=2)]) -> list[tuple[int, ...]]:
    """Return balanced permutations: all for up to 4 items, otherwise cyclic shifts and their reversals.

    Raises:
        OptionError: there are fewer than two items.

    >>> orders(2), len(orders(4)), len(orders(6))
    ([(0, 1), (1, 0)], 24, 12)
    """
    if count <= 4:
        return list(permutations(range(count)))
    shifts = [tuple((k + s) % count for k in range(count)) for s in range(count)]
    return shifts + [shift[::-1] for shift in shifts]


def order_share(scores: Tensor) -> float:
    """Return the standard deviation over orders relative to that over orders and prompts, in [0, 1].

    Args:
        scores: (prompts, orders), log-probabilities of the correct answer.

    >>> order_share(torch.tensor([[0.0, 0.0], [1.0, 1.0]])), order_share(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    (0.0, 1.0)
    """
    scores = scores.double()
    within = scores.var(1, correction=0).mean()
    between = scores.mean(1).var(correction=0)
    return float((within / (within + between).clamp_min(1e-30)).sqrt())


class OrderSensitivity(Measure):
    """Dependence of answers about three images on their order; 0 for order-invariant models.

    Follows "Position of Uncertainty", "LLMs are Bayesian, in Expectation, not in Realization" and PINE (arXiv
    2407.01100); prompts and images are ours.
    """

    name = "order"
    family = "behaviour"
    order = 3
    limit = 0.1
    question = "Does an answer depend on the order of the images?"
    number = "standard deviation over orders, relative to the total"
    misleads = "If answers to all prompts are nearly equal, the ratio can be large although the spread is negligible."
    papers = (
        "Position of Uncertainty: A Cross-Linguistic Study of Positional Bias in Large Language Models",
        "LLMs are Bayesian, in Expectation, not in Realization",
        (
            "Eliminating Position Bias of Language Models: A Mechanistic Approach, "
            "https://arxiv.org/abs/2407.01100"
        ),
    )
    needs = frozenset({"answers", "several"})
    items = 16
    count = 3

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Ask in every order whether one of the images shows a disc of a colour; true for every second prompt."""
        generator, present = runs.generator(), runs.number % 2 == 0
        target = int(torch.randint(3, (), generator=generator))
        colours = [(target + 1 + k % 2) % 3 for k in range(self.count)]
        if present:
            colours[int(torch.randint(self.count, (), generator=generator))] = target
        images = [_disc(c, generator) for c in colours]
        question = f"Is there a {COLOURS[target]} disc in one of the pictures?"
        assert runs.audited.answers is not None
        scores = [
            runs.audited.answers([images[k] for k in o], question, ("yes", "no")) for o in orders(self.count)
        ]
        log_probs = torch.stack(scores).double().cpu().log_softmax(-1)
        acc.note(scores=log_probs[:, 0 if present else 1])

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the relative spread over orders; the details have the expected gain of averaging over orders."""
        scores = torch.tensor(acc.column("scores"))  # (prompts, orders)
        correct = scores > np.log(0.5)
        # log of the probability averaged over orders; by Jensen's inequality the gain is about half of the variance
        mean = scores.logsumexp(1) - np.log(scores.shape[1])
        gain = (mean - scores.mean(1)).mean().item()
        accuracy = correct.double().mean(0)
        details = {
            "sd_over_orders": scores.std(1, correction=0).mean().item(),
            "sd_over_prompts": scores.mean(1).std(correction=0).item(),
            "answers_that_change": (correct.any(1) & ~correct.all(1)).double().mean().item(),
            "worst_best_gap": (accuracy.max() - accuracy.min()).item(),
            "gain_of_averaging": gain,
            "gain_expected": scores.var(1, correction=0).mean().item() / 2,
        }
        return Outcome(
            order_share(scores),
            control={"no order": 0.0},
            statistic=lambda picks: order_share(scores[picks]),
            units=len(scores),
            note=f"{details['answers_that_change']:.0%} of the answers change with the order.",
            details=details,
        )


def _disc(colour: int, generator: torch.Generator, side: int = 112) -> Tensor:
    y, x = (0.3 + 0.4 * torch.rand(2, generator=generator)).tolist()
    line = (torch.arange(side) + 0.5) / side
    inside = (line[:, None] - y) ** 2 + (line[None] - x) ** 2 < 0.2**2
    return torch.where(inside, torch.eye(3)[colour][:, None, None] * 0.9, torch.ones(3, side, side))
