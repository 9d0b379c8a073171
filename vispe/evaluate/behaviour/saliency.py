"""How much of an output is owed to where things are: relevance with positions (PA-LRP)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from vispe.backbones.model_access import image_tower
from vispe.errors import UnsupportedHost
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import Family, Kept, Measure, Outcome, View
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.evaluate.behaviour.rolls import refuse
from vispe.evaluate.behaviour.saliency_backward import Relevance, Rule, relevance

RULES: tuple[Rule, ...] = ("epsilon", "ratio")


class PositionRelevance(Measure):
    """Relevance of positions and of content: two passes there and back for each image."""

    name: ClassVar[str] = "relevance"
    family: ClassVar[Family] = "behaviour"
    asks: ClassVar[str] = "How much of the output is owed to positions, and not to what is seen there?"
    number: ClassVar[str] = "relevance of positions over that of positions and content, by size"
    misleads: ClassVar[str] = (
        "Relevance is a convention: that positions get half of every rotation is one, and the rules for a sum disagree "
        "where its parts do; compare models by one rule, and read no share as a cause."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})
    controls: ClassVar[tuple[View, ...]] = ("random",)
    default: ClassVar[Literal[False]] = False

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Hand the output back by both rules; keep shares, and the maps of the first image."""
        host = reruns.host
        assert host.model is not None
        try:
            one, other = (
                relevance(image_tower(host.model), reruns.image.to(host.device), rule) for rule in RULES
            )
        except UnsupportedHost as error:
            kept.note(refused=str(error))
            return
        kept.note(epsilon=one.shares, ratio=other.shares, gap=max(one.gap, other.gap))
        kept.note(net=[float(found.positions.sum()) / found.output for found in (one, other)])
        kept.note(leaks={kind: leak / one.output for kind, leak in one.leaks.items()})
        if reruns.number == 0:
            kept.note(maps=maps(one))

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean share over images by the epsilon rule."""
        refuse(kept)
        shares = {rule: kept.column(rule) for rule in RULES}
        layers = {rule: share.mean(0).tolist() for rule, share in shares.items()}
        leaks = [record["leaks"] for record in kept.records]
        per_image = shares["epsilon"].sum(1)
        details = {
            "by the ratio rule": float(shares["ratio"].sum(1).mean()),
            "of positions over the output, with signs": dict(
                zip(RULES, kept.column("net").mean(0).tolist(), strict=True)
            ),
            "by table": {rule: share[0] for rule, share in layers.items()},
            "by layer": {rule: share[1:] for rule, share in layers.items()},
            "leaks over the output": {
                kind: sum(one[kind] for one in leaks) / len(leaks) for kind in leaks[0]
            },
            "largest gap": float(kept.column("gap").max()),
        }
        for record in kept.records:
            details |= {f"{name} of the first image": found for name, found in record.get("maps", {}).items()}
        return Outcome(
            float(per_image.mean()),
            per_image.tolist(),
            layers["epsilon"][1:],
            control={"no encoding": 0.0},
            details=details,
        )


def maps(found: Relevance) -> dict[str, list[list[float]]]:
    """Return relevance of content and positions of patches (h, w), and of offsets of biases where there are any.

    All over the output, to four decimals; offsets, (2 h - 1, 2 w - 1), are query less key.
    """
    patches = found.grid[0] * found.grid[1]

    def rounded(x: Tensor) -> list[list[float]]:
        return (x / found.output).round(decimals=4).tolist()

    named = {"content": found.tokens, "position": found.positions.sum(0)}
    own = {name: rounded(x[-patches:].unflatten(0, found.grid)) for name, x in named.items()}
    return own | ({"offsets": rounded(found.offsets)} if found.offsets.any() else {})
