"""Units of the MLPs: dead, positional, or explained by the content of the patch.

Follows "Neurons in Large Language Models: Dead, N-gram, Positional" (Voita et al.). A unit is active at a patch if its
activation is above 0. It is dead if it is never active; positional if the mutual information of its activity and the
cell of the grid exceeds that for positions shuffled within each image; and driven by content, the analogue of an n-gram
neuron, if a linear fit on the patch and its left neighbour explains it. The thresholds are ours.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.errors import UnsupportedHost
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import GROUPS, Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.experimental.measures.latent_dimensions import CELLS, cells

BITS = 0.05  # min bits above the level for shuffled positions
EXPLAINED = 0.5  # min R² of a unit explained by content
SAVED = 0.999  # quantile over units of the level for shuffled positions


def information(on: Tensor, count: Tensor) -> Tensor:
    """Return the mutual information in bits of the activity of a unit and the cell, (...).

    Args:
        on: (..., cells), how often a unit was active in each cell.
        count: (cells,), number of tokens in each cell.

    >>> float(information(torch.tensor([4.0, 0.0]), torch.tensor([4.0, 4.0])))
    1.0
    """
    rate, p = on / count, count / count.sum()
    mean = (rate * p).sum(-1, keepdim=True)
    bits = torch.xlogy(rate, rate / mean.clamp(min=1e-30))
    bits = bits + torch.xlogy(1 - rate, (1 - rate) / (1 - mean).clamp(min=1e-30))
    return ((bits * p).sum(-1) / np.log(2)).clamp(min=0)


def content(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return content features (h w, 17): 1, and means, deviations and slopes of each patch and its left neighbour."""
    h, w = grid
    # rows and columns of patches, then channels and pixels
    patch = image.unflatten(2, (w, -1)).unflatten(1, (h, -1)).permute(1, 3, 0, 2, 4).double()
    grey = patch.mean(2)
    ramps = [torch.linspace(-1, 1, n, dtype=torch.float64) for n in grey.shape[-2:]]
    slopes = [(grey * ramps[0][:, None]).mean((-2, -1)), (grey * ramps[1]).mean((-2, -1))]
    stats = torch.cat([patch.mean((-2, -1)), patch.std((-2, -1)), torch.stack(slopes, -1)], -1)
    left = torch.cat([stats[:, :1], stats[:, :-1]], 1)
    return torch.cat([torch.ones(h, w, 1, dtype=torch.float64), stats, left], -1).flatten(0, 1)


class MlpUnits(Measure):
    """Fraction of positional units over all MLPs: one more forward pass with temporary hooks.

    Follows "Neurons in Large Language Models: Dead, N-gram, Positional" (Voita et al.).
    """

    name = "units"
    family = "features"
    question = "Do units of the MLPs encode the position?"
    number = "fraction of units whose activity has information about the cell of the grid"
    misleads = (
        "With a common layout of images, content units predict the cell too; compare with the model without its "
        "encoding."
    )
    papers = ("Neurons in Large Language Models: Dead, N-gram, Positional",)
    needs = frozenset({"maps"})
    controls = ("none",)
    default = False

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Count the activity of the units of every block by cell, and its products with the content features."""
        blocks = getattr(runs.audited.model, "blocks", None) or ()
        acts = [getattr(getattr(block, "mlp", None), "act", None) for block in blocks]
        if not acts or not all(isinstance(act, nn.Module) for act in acts):
            acc.note(refused="its blocks have no MLP with an activation module")
            return
        activations: list[Tensor] = []

        def record(module: nn.Module, args: Any, output: Tensor) -> None:
            activations.append(output[0].detach().double().cpu())

        with ExitStack() as hooks:
            for act in acts:
                hooks.callback(act.register_forward_hook(record).remove)
            maps = runs.audited.maps(runs.image[None])[0]
        grid = tuple(maps.shape[-2:])
        patches = [tokens[-grid[0] * grid[1] :] for tokens in activations]
        if len(patches) != len(acts) or any(p.shape[0] != grid[0] * grid[1] for p in patches):
            acc.note(refused="its MLPs do not process one token per patch")
            return
        order = torch.randperm(len(patches[0]), generator=runs.generator(3))
        where, x = cells(grid), content(runs.image, grid)
        one_hot = torch.nn.functional.one_hot(where, CELLS**2).double()
        acc.note(group=acc.number % GROUPS)
        acc.add("cells", one_hot.sum(0), groups=True)
        acc.add("x x", x.mT @ x)
        for k, values in enumerate(patches):
            on = (values > 0).double()
            acc.add(f"on {k}", on.mT @ one_hot, groups=True)
            acc.add(f"shuffled {k}", on[order].mT @ one_hot)
            acc.add(f"x {k}", x.mT @ values)
            acc.add(f"squares {k}", torch.stack([values.sum(0), values.square().sum(0)]))

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the fraction of positional units; the details have dead units and those explained by content."""
        reason = next((r["refused"] for r in acc.records if "refused" in r), None)
        if reason is not None:
            raise UnsupportedHost(reason)
        depth = sum(name.startswith("on ") for name in acc.sums)
        on = [acc.sums[f"on {k}"] for k in range(depth)]
        count = acc.sums["cells"]
        chance = torch.cat([information(acc.sums[f"shuffled {k}"], count.sum(0)) for k in range(depth)])
        limit = float(chance.quantile(SAVED)) + BITS

        def shares(times: np.ndarray) -> list[float]:
            weight = torch.from_numpy(times.astype(np.float64))
            tokens = torch.einsum("g,gc->c", weight, count)
            by_layer = (information(torch.einsum("g,guc->uc", weight, o), tokens) for o in on)
            return [float((bits > limit).double().mean()) for bits in by_layer]

        groups = np.unique([r["group"] for r in acc.records])
        layers = shares(np.ones(GROUPS))
        dead = [float((o.sum((0, 2)) == 0).double().mean()) for o in on]
        explained = [float((self._r2(acc, k) > EXPLAINED).double().mean()) for k in range(depth)]
        return Outcome(
            float(np.mean(layers)),
            per_layer=layers,
            control={"shuffled places": float((chance > limit).double().mean())},
            statistic=lambda pick: float(np.mean(shares(np.bincount(groups[pick], minlength=GROUPS)))),
            units=len(groups),
            details={"dead": dead, "content_alone": explained, "limit_bits": limit},
        )

    @staticmethod
    def _r2(acc: Accumulator, layer: int) -> Tensor:
        """Return R² of each unit for a linear fit on the content features."""
        gram, cross = acc.sums["x x"], acc.sums[f"x {layer}"]
        total, squares = acc.sums[f"squares {layer}"]
        ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        fitted = (cross * torch.linalg.solve(gram + ridge, cross)).sum(0)
        mean = total.square() / gram[0, 0]
        return (fitted - mean) / (squares - mean).clamp(min=1e-12)
