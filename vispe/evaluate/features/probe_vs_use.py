"""Does a model know where things are and not say so? A probe of its descriptor against its answers.

Pictures show a red and a blue square on white; which of them is on the left can be read from the descriptor by a
linear softmax probe, or asked in words. Pictures come in pairs that differ by the two colours being exchanged: a pair
is never split between what the probe is fitted on and what it is scored on.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vispe.errors import OptionError, ShapeError
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import Family, Kept, Measure, Outcome
from vispe.evaluate.behaviour.perturbed_runs import Reruns

QUESTION = "Is the red square to the left or to the right of the blue square?"
ANSWERS = ("left", "right")
SHUFFLES = 5


def probe_hits(x: Tensor, labels: Tensor, groups: Tensor, *, folds: int = 5, seed: int = 0) -> np.ndarray:
    """Return where a linear softmax probe, fitted on other groups, names the label: (n,) of 0 and 1.

    Args:
        x: features (n, d).
        labels: classes (n,) int64 from 0.
        groups: (n,) int64; a group is in one fold.
        folds: parts, each scored by a probe of the others.
        seed: of the order in which groups are dealt into folds.

    Raises:
        ShapeError: lengths that differ.
        OptionError: fewer groups than folds, or fewer than 2 folds.

    >>> labels = torch.arange(20) % 2
    >>> probe_hits(labels[:, None].double(), labels, torch.arange(20) // 2).mean()
    np.float64(1.0)
    """
    if x.ndim != 2 or not len(x) == len(labels) == len(groups):
        raise ShapeError(
            f"The probe needs features (n, d), labels (n,) and groups (n,), got {tuple(x.shape)}, "
            f"{tuple(labels.shape)} and {tuple(groups.shape)}."
        )
    names = groups.unique()
    if not 2 <= folds <= len(names):
        raise OptionError(
            f"The probe needs 2 folds or more and a group for each, got {folds=}, {len(names)} groups."
        )
    order = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))]
    hits = np.zeros(len(x))
    for fold in range(folds):
        out = torch.isin(groups, order[fold::folds])
        # statistics of the fitted part alone, so that nothing of the scored part is known
        mean, std = x[~out].double().mean(0), x[~out].double().std(0, correction=0)
        z = (x.double() - mean) / torch.where(std > 0, std, 1.0)
        weight = torch.zeros(x.shape[1], int(labels.max()) + 1, dtype=torch.float64, requires_grad=True)
        bias = torch.zeros(weight.shape[1], dtype=torch.float64, requires_grad=True)
        steps = torch.optim.Adam([weight, bias], lr=5e-3, weight_decay=1e-3)
        with torch.enable_grad():
            for _ in range(150):
                steps.zero_grad()
                cross_entropy(z[~out] @ weight + bias, labels[~out]).backward()
                steps.step()
        hits[out.numpy()] = ((z[out] @ weight + bias).argmax(1) == labels[out]).double().numpy()
    return hits


def picture(number: int, size: tuple[int, int]) -> tuple[Tensor, int]:
    """Return a picture (3, H, W) in [0, 1] and whether red is right of blue; 2k and 2k + 1 exchange the colours."""
    rng = np.random.default_rng(number // 2)
    h, w = size
    side = max(1, min(h, w) // 6)
    rows = rng.integers(0, h - side + 1, 2)
    cols = rng.integers(0, w // 2 - side + 1, 2) + np.array([0, w - w // 2])
    image = torch.ones(3, h, w)
    right = number % 2
    for place, colour in enumerate((0, 2) if not right else (2, 0)):
        y, x = rows[place], cols[place]
        image[:, y : y + side, x : x + side] = torch.eye(3)[colour][:, None, None]
    return image, right


class ReadOrUsed(Measure):
    """Accuracy of a probe of the descriptor minus that of answers, chance counted as 0 and all right as 1."""

    name: ClassVar[str] = "read_or_used"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "Does the model know where things are without saying so?"
    number: ClassVar[str] = "accuracy of a probe minus that of answers, above chance"
    misleads: ClassVar[str] = (
        "A model that answers the opposite of what it sees has a large gap too, and random weights often keep place."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"answers", "pooled"})
    items: ClassVar[int] = 32

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Keep the descriptor of one picture, and whether the answer is right."""
        host = reruns.host
        assert host.answers is not None
        image, right = picture(reruns.number, (host.side, host.side))
        pooled = reruns.pooled(picture=host.normalised(image))
        # one row of a table of fixed size for every picture
        table = torch.zeros(self.items, len(pooled))
        table[reruns.number] = pooled
        kept.add("descriptors", table)
        said = int(host.answers([image], QUESTION, ANSWERS).argmax())
        kept.note(item=reruns.number, label=right, answered=float(said == right))

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean gap over pictures."""
        items = torch.from_numpy(kept.column("item")).long()
        labels = torch.from_numpy(kept.column("label")).long()
        x, answered = kept.sums["descriptors"][items], kept.column("answered")
        hits = probe_hits(x, labels, items // 2)
        # labels in random order say what the probe finds where there is nothing
        mixed = [
            labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(k))]
            for k in range(SHUFFLES)
        ]
        empty = float(np.mean([probe_hits(x, m, items // 2, seed=k).mean() for k, m in enumerate(mixed)]))
        gaps = 2 * (hits - answered)
        details = {"probe": hits.mean(), "answers": answered.mean(), "probe of shuffled labels": empty}
        # less than chance in labels that mean nothing is chance
        control = {"shuffled labels": max(0.0, 2 * empty - 1)}
        return Outcome(gaps.mean(), gaps, control=control, details=details)
