"""Does an answer depend on the order in which pictures stand, where the question does not?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Kept, Measure, Outcome
from vispe.evaluate.behaviour.perturbed_runs import Reruns

COLOURS = ("red", "green", "blue")


def orders(count: int) -> list[tuple[int, ...]]:
    """Return orders in which every item visits every slot equally: all up to 4 items, then shifts and reversals.

    Raises:
        OptionError: there are fewer than two items.

    >>> orders(2), len(orders(4)), len(orders(6))
    ([(0, 1), (1, 0)], 24, 12)
    """
    if count < 2:
        raise OptionError(f"An order needs two items or more, got count={count}; give more pictures.")
    if count <= 4:
        return list(permutations(range(count)))
    shifts = [tuple((k + s) % count for k in range(count)) for s in range(count)]
    return shifts + [shift[::-1] for shift in shifts]


def order_share(scores: Tensor) -> float:
    """Return the standard deviation over orders as a share of that over orders and prompts, in [0, 1].

    Args:
        scores: (prompts, orders), logarithms of probabilities of the right answer.

    >>> order_share(torch.tensor([[0.0, 0.0], [1.0, 1.0]])), order_share(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    (0.0, 1.0)
    """
    scores = scores.double()
    within = scores.var(1, correction=0).mean()
    between = scores.mean(1).var(correction=0)
    return float((within / (within + between).clamp_min(1e-30)).sqrt())


@dataclass(frozen=True)
class Order(Measure):
    """How much answers about three pictures depend on their order; 0 where order cannot be seen."""

    name = "order"
    family = "behaviour"
    asks = "Does an answer depend on the order of the pictures?"
    number = "spread over orders, as a share of all spread"
    misleads = "A model that gives nearly the same answer to every prompt has a large share of little."
    needs = frozenset({"answers", "several"})
    items = 16
    count: ClassVar[int] = 3

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Ask whether a picture with a disc of a colour is there, in every order; it is in every second prompt."""
        generator, there = reruns.generator(), reruns.number % 2 == 0
        asked = int(torch.randint(3, (), generator=generator))
        shown = [(asked + 1 + k % 2) % 3 for k in range(self.count)]
        if there:
            shown[int(torch.randint(self.count, (), generator=generator))] = asked
        pictures = [_disc(c, generator) for c in shown]
        question = f"Is there a {COLOURS[asked]} disc in one of the pictures?"
        assert reruns.host.answers is not None
        said = [
            reruns.host.answers([pictures[k] for k in o], question, ("yes", "no")) for o in orders(self.count)
        ]
        logs = torch.stack(said).double().cpu().log_softmax(-1)
        kept.note(scores=logs[:, 0 if there else 1])

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the share of the spread that order makes, with what averaging over orders would give."""
        scores = torch.tensor(kept.column("scores"))  # (prompts, orders)
        right = scores > np.log(0.5)
        # probabilities averaged over orders; by Jensen the gain is about half of the variance
        mean = scores.logsumexp(1) - np.log(scores.shape[1])
        gain = (mean - scores.mean(1)).mean().item()
        accuracy = right.double().mean(0)
        details = {
            "sd_over_orders": scores.std(1, correction=0).mean().item(),
            "sd_over_prompts": scores.mean(1).std(correction=0).item(),
            "answers_that_change": (right.any(1) & ~right.all(1)).double().mean().item(),
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
