"""Do few channels carry the place? Channels that run monotonically along a sequence, or as a surface over a grid.

In language models a causal mask makes hidden channels that rise or fall with the position, smoothly, through most
layers (Mitigate Position Bias in Large Language Models via Scaling a Single Dimension, arXiv 2406.02536). On a grid
(ours) the mean map of a channel over pictures is read by a quadratic surface with the distances to centre and border.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import GROUPS, Family, Kept, Measure, Outcome, View
from vispe.evaluate.behaviour.rolls import refuse
from vispe.evaluate.features.position_probe import TARGET, step_for
from vispe.evaluate.probe.splits import Trials

KINDS = ("row", "column", "radial", "border")
READ = 0.25  # held-out R² above which a channel counts
MASSIVE = 5.0  # times the mean norm of the channels
FOLDS, BLOCK = 4, 3  # patches a side of the blocks that are held out together


def scaled(values: np.ndarray) -> np.ndarray:
    """Return a curve between 0 and 1; one that is constant stays constant, at 0."""
    spread = values.max() - values.min()
    return (values - values.min()) / spread if spread > 0 else np.zeros_like(values)


def monotone(values: np.ndarray, degree: int = 3) -> int:
    """Return 1 if the polynomial through a curve rises everywhere, 2 if it falls, else 0.

    >>> monotone(np.arange(20.0)), monotone(-np.arange(20.0)), monotone(np.zeros(20))
    (1, 2, 0)
    """
    if values.max() == values.min():
        return 0
    place = np.arange(len(values))
    # a polynomial on [-1, 1] is the same curve, without powers of large numbers
    unit = np.polynomial.Polynomial.fit(place, scaled(values), degree)
    steps = np.diff(unit(place))
    return 1 if (steps > 0).all() else 2 if (steps < 0).all() else 0


def roughness(values: np.ndarray, window: int = 10, polyorder: int = 3) -> float:
    """Return the sum of squared second differences of a curve after Savitzky-Golay; infinity for a constant."""
    if values.max() == values.min():
        return float("inf")  # it says nothing, so it never ranks
    from scipy.signal import savgol_filter

    return float((np.diff(savgol_filter(scaled(values), window, polyorder), n=2) ** 2).sum())


def search(
    hidden: np.ndarray,
    *,
    degree: int = 3,
    skip: int = 10,
    layers_from: int = 2,
    layers_to: int = -1,
    window: int = 10,
    polyorder: int = 3,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the channels of mean hidden states (L, T, d) that run with the position.

    Args:
        hidden: mean over many inputs, after every layer.
        degree: of the polynomial whose direction counts.
        skip: tokens at the beginning that are left out.
        layers_from: first layer that counts.
        layers_to: layer before which they end; negative counts from the end.
        window: of the Savitzky-Golay filter.
        polyorder: of the same.

    Returns:
        Codes of `monotone` (L, d); `roughness` (L, d); of how many of the layers that count each channel rises, or
        falls, whichever are more (d,); and the channels with more than a quarter of all layers, smoothest first.

    Raises:
        OptionError: too few tokens are left.
    """
    hidden = np.asarray(hidden, dtype=np.float64)[:, skip:]
    layers, tokens, width = hidden.shape
    if tokens < max(window, degree + 2):
        raise OptionError(
            f"Channels are searched over {max(window, degree + 2)} tokens or more, got {tokens} after skip={skip}."
        )
    each = [[hidden[i, :, c] for c in range(width)] for i in range(layers)]
    codes = np.array([[monotone(curve, degree) for curve in row] for row in each])
    rough = np.array([[roughness(curve, window, polyorder) for curve in row] for row in each])
    counted = slice(layers_from, layers_to if layers_to < 0 else min(layers_to, layers))
    agreeing = np.maximum((codes[counted] == 1).sum(0), (codes[counted] == 2).sum(0))
    chosen = np.flatnonzero(agreeing > layers // 4)
    return codes, rough, agreeing, chosen[np.argsort(rough[counted].min(0)[chosen], kind="stable")]


def surface(shape: tuple[int, int]) -> Tensor:
    """Return what a channel is read by, at each patch of a grid (h, w): 1, y, x, y², x², xy, r, border, (h w, 8)."""
    y, x = torch.meshgrid(
        *(torch.linspace(-1, 1, n, dtype=torch.float64) if n > 1 else torch.zeros(1).double() for n in shape),
        indexing="ij",
    )
    border = torch.minimum(1 - y.abs(), 1 - x.abs())
    terms = (torch.ones_like(y), y, x, y * y, x * x, x * y, (y * y + x * x).sqrt(), border)
    return torch.stack([t.flatten() for t in terms], 1)


def left_over(maps: Tensor, basis: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return maps (..., h w) minus what a fit on other blocks of the grid says there: held out, and linear in the maps.

    Args:
        maps: flat maps over the grid.
        basis: (h w, terms), with a constant.
        shape: of the grid.
    """
    h, w = shape
    fold = (torch.arange(h)[:, None] // BLOCK + 2 * (torch.arange(w)[None] // BLOCK)).flatten() % FOLDS
    rest = torch.empty_like(maps)
    for k in fold.unique():
        held, fitted = fold == k, fold != k
        weights = maps[..., fitted] @ torch.linalg.pinv(basis[fitted]).mT
        rest[..., held] = maps[..., held] - weights @ basis[held].mT
    return rest


class Channels(Measure):
    """Share of channels whose mean map over pictures is a smooth surface of the place."""

    name: ClassVar[str] = "channels"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "Do single channels carry the place?"
    number: ClassVar[str] = "share of channels whose mean map is a surface over the grid"
    misleads: ClassVar[str] = (
        "Pictures laid out alike have such mean maps too; give textures, noise or many pictures."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    controls: ClassVar[tuple[View, ...]] = ("none",)
    beside: ClassVar[tuple[View, ...]] = ("random",)

    def end(self, kept: Kept, maps: Tensor) -> None:
        """Add the maps to the sum of their group, and what single channels tell the probe."""
        h, w = maps.shape[-2:]
        if min(h, w) < 2 * BLOCK:
            kept.note(refused=f"channels need {2 * BLOCK} patches a side or more, and this has {h}x{w}")
            return
        kept.note(group=kept.number % GROUPS, grid=(h, w))
        kept.add("maps", (maps - maps.mean((1, 2), keepdim=True)).float(), groups=True)
        kept.add("energy", maps.double().square().sum((1, 2)))
        if (step := step_for((h, w))) is not None:
            trials, feats = Trials((TARGET,), step, 1), maps.permute(1, 2, 0)
            drawn = trials.draw((h, w), np.random.default_rng(kept.number))
            kept.add("probe", torch.from_numpy(trials.channels(feats, drawn)[0]))

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the share of channels, and which they are."""
        refuse(kept)
        shape = tuple(kept.records[0]["grid"])
        count = np.bincount([r["group"] for r in kept.records], minlength=GROUPS)
        some = np.flatnonzero(count)
        sums = kept.sums["maps"][torch.from_numpy(some)].double().flatten(2)
        basis, all_ = surface(shape), sums.sum(0)
        # both are linear in the maps, so any draw of groups has its squares from products of those
        rest = left_over(sums, basis, shape).transpose(0, 1)
        own = sums.transpose(0, 1)
        wrong, total = rest @ rest.mT, own @ own.mT

        def r2(times: np.ndarray) -> np.ndarray:
            weight = torch.from_numpy(times.astype(np.float64))
            parts = [torch.einsum("cgk,g,k->c", t, weight, weight) for t in (wrong, total)]
            return (1 - parts[0] / parts[1].clamp(min=1e-30)).numpy()

        # the same maps with their patches in another order: what a surface reads by chance
        order = torch.randperm(all_.shape[1], generator=torch.Generator().manual_seed(0))
        mixed = all_[:, order]
        chance = 1 - left_over(mixed, basis, shape).square().sum(1) / mixed.square().sum(1).clamp(min=1e-30)
        limit = max(READ, float(chance.quantile(0.95)))
        found = r2(np.ones(len(some)))
        best = np.argsort(-found, kind="stable")[:10]
        energy = kept.sums["energy"].sqrt()
        massive = (energy > MASSIVE * energy.mean()).nonzero().flatten().tolist()
        details = {
            "limit": limit,
            "by_surface": [
                {"channel": int(c), "r2": float(found[c]), "kind": _kind(all_[c], basis)} for c in best
            ],
            "massive": massive,
        }
        if "probe" in kept.sums:
            read = (kept.sums["probe"] / len(kept.records)).numpy()
            details["by_probe"] = [
                {"channel": int(c), "r2": float(read[c])} for c in np.argsort(-read, kind="stable")[:10]
            ]

        def drawn(pick: np.ndarray) -> float:
            return float((r2(np.bincount(pick, minlength=len(some))) > limit).mean())

        value = float((found > limit).mean())
        return Outcome(value, control={"no place": 0.0}, statistic=drawn, units=len(some), details=details)


def _kind(mean: Tensor, basis: Tensor) -> str:
    """Return which of row, column, distance to the centre and to the border says most of a map."""
    terms = basis[:, [1, 2, 6, 7]] - basis[:, [1, 2, 6, 7]].mean(0)
    match = (mean @ terms).abs() / terms.norm(dim=0).clamp(min=1e-30)
    return KINDS[int(match.argmax())]
