"""What do the units of the MLPs do: are they dead, do they tell the place, do they answer to the patch alone?

A unit is on where its activation is above 0. It is dead if it never is; positional if whether it is on says more about
the cell of the grid (mutual information) than with places shuffled inside each image; and answers to content alone,
like a unit of a language model that fires for one n-gram, if what the patch and its left neighbour show explains it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vispe.errors import UnsupportedHost
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import GROUPS, Family, Kept, Measure, Outcome, View
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.evaluate.features.latent_dimensions import CELLS, cells

BITS = 0.05  # above what shuffled places give
EXPLAINED = 0.5  # R² from which content alone explains a unit
SAVED = 0.999  # quantile of units with shuffled places


def information(on: Tensor, count: Tensor) -> Tensor:
    """Return the bits that on or off says about the cell, (...).

    Args:
        on: (..., cells), how often a unit was on in each cell.
        count: (cells,), how many tokens there were.

    >>> float(information(torch.tensor([4.0, 0.0]), torch.tensor([4.0, 4.0])))
    1.0
    """
    share, p = on / count, count / count.sum()
    mean = (share * p).sum(-1, keepdim=True)
    bits = torch.xlogy(share, share / mean.clamp(min=1e-30))
    bits = bits + torch.xlogy(1 - share, (1 - share) / (1 - mean).clamp(min=1e-30))
    return ((bits * p).sum(-1) / np.log(2)).clamp(min=0)


def content(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return what a patch and its left neighbour show, (h w, 17): 1, and means and spreads of colours, slopes."""
    h, w = grid
    patch = (
        image.unflatten(2, (w, -1)).unflatten(1, (h, -1)).permute(1, 3, 0, 2, 4).double()
    )  # (h, w, c, y, x)
    grey = patch.mean(2)
    ramps = [torch.linspace(-1, 1, n, dtype=torch.float64) for n in grey.shape[-2:]]
    slopes = [(grey * ramps[0][:, None]).mean((-2, -1)), (grey * ramps[1]).mean((-2, -1))]
    own = torch.cat([patch.mean((-2, -1)), patch.std((-2, -1)), torch.stack(slopes, -1)], -1)
    beside = torch.cat([own[:, :1], own[:, :-1]], 1)
    return torch.cat([torch.ones(h, w, 1, dtype=torch.float64), own, beside], -1).flatten(0, 1)


class Units(Measure):
    """Share of the units of all MLPs that tell the place: one more pass, with hooks that are gone afterwards."""

    name: ClassVar[str] = "units"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "Do units of the MLPs tell the place?"
    number: ClassVar[str] = "share of units whose being on says something about the cell of the grid"
    misleads: ClassVar[str] = (
        "Pictures laid out alike make units of content tell the cell; the encoding taken away shows it."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    controls: ClassVar[tuple[View, ...]] = ("none",)
    default: ClassVar[bool] = False

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Count where the units of every block are on, and what of the patch goes with them."""
        blocks = getattr(reruns.host.model, "blocks", None) or ()
        acts = [getattr(getattr(block, "mlp", None), "act", None) for block in blocks]
        if not acts or not all(isinstance(act, nn.Module) for act in acts):
            kept.note(refused="its blocks have no MLP with an activation that can be watched")
            return
        seen: list[Tensor] = []

        def watch(module: nn.Module, args: Any, output: Tensor) -> None:
            seen.append(output[0].detach().double().cpu())

        with ExitStack() as hooks:
            for act in acts:
                hooks.callback(act.register_forward_hook(watch).remove)
            maps = reruns.host.maps(reruns.image[None])[0]
        grid = tuple(maps.shape[-2:])
        patches = [one[-grid[0] * grid[1] :] for one in seen]
        if len(patches) != len(acts) or any(p.shape[0] != grid[0] * grid[1] for p in patches):
            kept.note(refused="its MLPs do not see one token for each patch")
            return
        order = torch.randperm(len(patches[0]), generator=reruns.generator(3))
        where, x = cells(grid), content(reruns.image, grid)
        hot = torch.nn.functional.one_hot(where, CELLS**2).double()
        kept.note(group=kept.number % GROUPS)
        kept.add("cells", hot.sum(0), groups=True)
        kept.add("x x", x.mT @ x)
        for k, values in enumerate(patches):
            on = (values > 0).double()
            kept.add(f"on {k}", on.mT @ hot, groups=True)
            kept.add(f"shuffled {k}", on[order].mT @ hot)
            kept.add(f"x {k}", x.mT @ values)
            kept.add(f"squares {k}", torch.stack([values.sum(0), values.square().sum(0)]))

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the share of positional units, and those that are dead or explained by content."""
        why = next((r["refused"] for r in kept.records if "refused" in r), None)
        if why is not None:
            raise UnsupportedHost(why)
        depth = sum(name.startswith("on ") for name in kept.sums)
        on = [kept.sums[f"on {k}"] for k in range(depth)]
        count = kept.sums["cells"]
        chance = torch.cat([information(kept.sums[f"shuffled {k}"], count.sum(0)) for k in range(depth)])
        limit = float(chance.quantile(SAVED)) + BITS

        def shares(times: np.ndarray) -> list[float]:
            weight = torch.from_numpy(times.astype(np.float64))
            tokens = torch.einsum("g,gc->c", weight, count)
            found = (information(torch.einsum("g,guc->uc", weight, o), tokens) for o in on)
            return [float((bits > limit).double().mean()) for bits in found]

        groups = np.unique([r["group"] for r in kept.records])
        layers = shares(np.ones(GROUPS))
        dead = [float((o.sum((0, 2)) == 0).double().mean()) for o in on]
        explained = [float((self._r2(kept, k) > EXPLAINED).double().mean()) for k in range(depth)]
        return Outcome(
            float(np.mean(layers)),
            per_layer=layers,
            control={"shuffled places": float((chance > limit).double().mean())},
            statistic=lambda pick: float(np.mean(shares(np.bincount(groups[pick], minlength=GROUPS)))),
            units=len(groups),
            details={"dead": dead, "content_alone": explained, "limit_bits": limit},
        )

    @staticmethod
    def _r2(kept: Kept, layer: int) -> Tensor:
        """Return the share of each unit's variance that a linear fit of the content explains."""
        gram, cross = kept.sums["x x"], kept.sums[f"x {layer}"]
        total, squares = kept.sums[f"squares {layer}"]
        ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        fitted = (cross * torch.linalg.solve(gram + ridge, cross)).sum(0)
        mean = total.square() / gram[0, 0]
        return (fitted - mean) / (squares - mean).clamp(min=1e-12)
