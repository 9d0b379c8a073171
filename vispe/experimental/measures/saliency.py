"""Relevance of positions: layer-wise relevance propagation with positional terms (PA-LRP, arXiv 2506.02138)."""

from __future__ import annotations

from torch import Tensor

from vispe.backbones.model_access import image_tower
from vispe.errors import UnsupportedHost
from vispe.evaluate.behaviour.rolls import raise_if_refused
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.experimental.measures.relevance import Relevance
from vispe.experimental.measures.saliency_backward import Rule, relevance

RULES: tuple[Rule, ...] = ("epsilon", "ratio")


class PositionRelevance(Measure):
    """Relevance of positions relative to content: a forward and a backward pass per image and rule.

    Follows PA-LRP (positional-aware LRP, arXiv 2506.02138).
    """

    name = "relevance"
    family = "behaviour"
    question = "How much of the output is attributed to positions rather than to content?"
    number = "absolute relevance of positions, relative to that of positions and content"
    misleads = (
        "Relevance is a convention: positions get half of every rotation, and the rules for sums disagree where terms "
        "cancel; compare models by one rule, and do not interpret the fraction causally."
    )
    papers = ("PA-LRP (positional-aware layer-wise relevance propagation), https://arxiv.org/abs/2506.02138",)
    needs = frozenset({"attention"})
    controls = ("random",)
    default = False

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Propagate the output by both rules; store the fractions, and the maps of the first image."""
        audited = runs.audited
        assert audited.model is not None
        try:
            one, other = (
                relevance(image_tower(audited.model), runs.image.to(audited.device), rule) for rule in RULES
            )
        except UnsupportedHost as error:
            acc.note(refused=str(error))
            return
        acc.note(epsilon=one.shares, ratio=other.shares, gap=max(one.gap, other.gap))
        acc.note(net=[float(result.positions.sum()) / result.output for result in (one, other)])
        acc.note(leaks={kind: leak / one.output for kind, leak in one.leaks.items()})
        if runs.number == 0:
            acc.note(maps=maps(one))

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the mean fraction over images by the epsilon rule."""
        raise_if_refused(acc)
        shares = {rule: acc.column(rule) for rule in RULES}
        layers = {rule: share.mean(0).tolist() for rule, share in shares.items()}
        leaks = [record["leaks"] for record in acc.records]
        per_image = shares["epsilon"].sum(1)
        details = {
            "by the ratio rule": float(shares["ratio"].sum(1).mean()),
            "of positions over the output, with signs": dict(
                zip(RULES, acc.column("net").mean(0).tolist(), strict=True)
            ),
            "by table": {rule: share[0] for rule, share in layers.items()},
            "by layer": {rule: share[1:] for rule, share in layers.items()},
            "leaks over the output": {
                kind: sum(one[kind] for one in leaks) / len(leaks) for kind in leaks[0]
            },
            "largest gap": float(acc.column("gap").max()),
        }
        for record in acc.records:
            details |= {
                f"{name} of the first image": values for name, values in record.get("maps", {}).items()
            }
        return Outcome(
            float(per_image.mean()),
            per_image.tolist(),
            layers["epsilon"][1:],
            control={"no encoding": 0.0},
            details=details,
        )


def maps(result: Relevance) -> dict[str, list[list[float]]]:
    """Return maps of relevance of content and positions (h, w), and of offsets of biases if there are any.

    Relative to the output, rounded to four decimals; offsets (2 h - 1, 2 w - 1) are query minus key.
    """
    patches = result.grid[0] * result.grid[1]

    def rounded(x: Tensor) -> list[list[float]]:
        return (x / result.output).round(decimals=4).tolist()

    named = {"content": result.tokens, "position": result.positions.sum(0)}
    by_name = {name: rounded(x[-patches:].unflatten(0, result.grid)) for name, x in named.items()}
    return by_name | ({"offsets": rounded(result.offsets)} if result.offsets.any() else {})
