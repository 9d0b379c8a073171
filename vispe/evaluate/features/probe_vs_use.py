"""Probe versus use: accuracy of a linear probe of relative position against the model's own answers.

Follows "Insights into LLM Long-Context Failures: When Transformers Know but Don't Tell" (probe against answers) and
"Probing the Role of Positional Information in Vision-Language Models" (position is encoded but not used); the images
are ours. They show a red and a blue square on white. A linear softmax probe decodes from the descriptor which
square is on the left, and the model answers the same question as text. Images form pairs with exchanged
colours; a pair is never split between training and test set of the probe.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vispe.errors import OptionError, ShapeError, counted
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns

QUESTION = "Is the red square to the left or to the right of the blue square?"
ANSWERS = ("left", "right")
SHUFFLES = 5  # permutations of the labels, for the chance level of the probe


def probe_hits(x: Tensor, labels: Tensor, groups: Tensor, *, folds: int = 5, seed: int = 0) -> np.ndarray:
    """Return the cross-validated hits (n,) of a linear softmax probe, 1 where the predicted label is correct.

    Args:
        x: features (n, d).
        labels: classes (n,) int64 from 0.
        groups: (n,) int64; a group is never split between folds.
        folds: number of folds.
        seed: random seed of the assignment of groups to folds.

    Raises:
        ShapeError: the lengths differ.
        OptionError: there are fewer groups than folds, or fewer than 2 folds.

    >>> labels = torch.arange(20) % 2
    >>> probe_hits(labels[:, None].double(), labels, torch.arange(20) // 2).mean()
    np.float64(1.0)
    """
    if x.ndim != 2 or not len(x) == len(labels) == len(groups):
        raise ShapeError(
            f"probe_hits: expected features (n, d), labels (n,) and groups (n,), got {tuple(x.shape)}, "
            f"{tuple(labels.shape)} and {tuple(groups.shape)}. Pass one label and one group per row."
        )
    names = groups.unique()
    if not 2 <= folds <= len(names):
        raise OptionError(
            f"probe_hits: folds must be in 2 to the number of groups, got {folds} for "
            f"{counted(len(names), 'group')}. Use fewer folds or more groups."
        )
    order = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))]
    test = torch.stack([torch.isin(groups, order[fold::folds]) for fold in range(folds)])  # (folds, n)
    # standardise by statistics of the training folds only, to avoid leakage
    x = x.double()
    stats = [(x[~t].mean(0), x[~t].std(0, correction=0)) for t in test]
    z = torch.stack([(x - mean) / torch.where(std > 0, std, 1.0) for mean, std in stats])
    weight = torch.zeros(folds, x.shape[1], int(labels.max()) + 1, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(folds, 1, weight.shape[2], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=5e-3, weight_decay=1e-3)
    # the folds are fitted together: their parameters are separate, and so are their terms of the loss
    share = (~test).double() / (~test).sum(1, keepdim=True)
    targets = labels.expand(folds, -1)
    with torch.enable_grad():
        for _ in range(150):
            optimizer.zero_grad()
            losses = cross_entropy((z @ weight + bias).mT, targets, reduction="none")
            (losses * share).sum().backward()
            optimizer.step()
    right = ((z @ weight + bias).argmax(2) == labels).double()
    return (right * test).sum(0).numpy()  # each row is in the test set of one fold


def render_squares(number: int, size: tuple[int, int]) -> tuple[Tensor, int]:
    """Return an image (3, H, W) in [0, 1] and whether red is right of blue; 2k and 2k + 1 exchange the colours."""
    rng = np.random.default_rng(number // 2)
    h, w = size
    side = max(1, min(h, w) // 6)
    rows = rng.integers(0, h - side + 1, 2)
    cols = rng.integers(0, w // 2 - side + 1, 2) + np.array([0, w - w // 2])
    image = torch.ones(3, h, w)
    right = number % 2
    for k, colour in enumerate((0, 2) if not right else (2, 0)):
        y, x = rows[k], cols[k]
        image[:, y : y + side, x : x + side] = torch.eye(3)[colour][:, None, None]
    return image, right


class ProbeVersusUse(Measure):
    """Accuracy of a probe of the descriptor minus that of answers, scaled so that chance is 0 and perfect is 1.

    Follows "Insights into LLM Long-Context Failures: When Transformers Know but Don't Tell" and "Probing the Role of
    Positional Information in Vision-Language Models".
    """

    name = "read_or_used"
    family = "features"
    order = 5
    limit = 0.2
    question = "Are relative positions encoded but not used in answers?"
    number = "accuracy of a probe minus that of answers, above chance"
    misleads = (
        "A model with inverted answers has a large gap too, and random weights often preserve the position."
    )
    papers = (
        "Insights into LLM Long-Context Failures: When Transformers Know but Don't Tell",
        "Probing the Role of Positional Information in Vision-Language Models",
    )
    needs = frozenset({"answers", "pooled"})
    items = 32

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Add the descriptor of one image, and whether the answer is correct."""
        audited = runs.audited
        assert audited.answers is not None
        image, right = render_squares(runs.number, (audited.side, audited.side))
        pooled = runs.pooled(perturbed=audited.normalised(image))
        # one row per image in a table of fixed size, so that sums over processes join it
        table = torch.zeros(self.items, len(pooled))
        table[runs.number] = pooled
        acc.add("descriptors", table)
        answer = int(audited.answers([image], QUESTION, ANSWERS).argmax())
        acc.note(item=runs.number, label=right, answered=float(answer == right))

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean gap over images."""
        items = torch.from_numpy(acc.column("item")).long()
        labels = torch.from_numpy(acc.column("label")).long()
        x, answered = acc.sums["descriptors"][items], acc.column("answered")
        hits = probe_hits(x, labels, items // 2)
        # shuffled labels give the chance level of the probe
        shuffled = [
            labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(k))]
            for k in range(SHUFFLES)
        ]
        chance = float(np.mean([probe_hits(x, m, items // 2, seed=k).mean() for k, m in enumerate(shuffled)]))
        gaps = 2 * (hits - answered)
        details = {"probe": hits.mean(), "answers": answered.mean(), "probe of shuffled labels": chance}
        # accuracies below chance on shuffled labels are noise
        control = {"shuffled labels": max(0.0, 2 * chance - 1)}
        return Outcome(gaps.mean(), gaps, control=control, details=details)
