"""Positional channels: monotone along a sequence, or a smooth surface over a grid.

In causal language models some hidden channels increase or decrease smoothly with the position in most layers ("Mitigate
Position Bias in Large Language Models via Scaling a Single Dimension", arXiv 2406.02536): `search`. For grids (ours),
the mean map of a channel over images is fitted by a quadratic surface with the distances to the centre and the border.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, counted
from vispe.evaluate.behaviour.rolls import raise_if_refused
from vispe.evaluate.features.position_probe import TARGET, step_for
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import GROUPS, Accumulator, Measure, Outcome
from vispe.evaluate.probe.splits import Trials

KINDS = ("row", "column", "radial", "border")
READ = 0.25  # min held-out R² of a positional channel
MASSIVE = 5.0  # min norm of a massive channel, relative to the mean norm
FOLDS, BLOCK = 4, 3  # number of folds; side in patches of the blocks that are held out together


def scaled(values: np.ndarray) -> np.ndarray:
    """Scale a curve to [0, 1]; a constant curve becomes 0."""
    spread = values.max() - values.min()
    return (values - values.min()) / spread if spread > 0 else np.zeros_like(values)


def monotone(values: np.ndarray, degree: int = 3) -> int:
    """Return 1 if the least-squares polynomial of a curve increases everywhere, 2 if it decreases, otherwise 0.

    >>> monotone(np.arange(20.0)), monotone(-np.arange(20.0)), monotone(np.zeros(20))
    (1, 2, 0)
    """
    if values.max() == values.min():
        return 0
    index = np.arange(len(values))
    # fitted on [-1, 1]: the same curve, but well conditioned
    polynomial = np.polynomial.Polynomial.fit(index, scaled(values), degree)
    steps = np.diff(polynomial(index))
    return 1 if (steps > 0).all() else 2 if (steps < 0).all() else 0


def roughness(values: np.ndarray, window: int = 10, polyorder: int = 3) -> float:
    """Return the sum of squared second differences after Savitzky-Golay smoothing; infinity for a constant curve."""
    if values.max() == values.min():
        return float("inf")  # a constant carries no position, so it must rank last
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
    """Find the channels of mean hidden states (L, T, d) that are monotone in the position.

    Args:
        hidden: mean over many inputs, after every layer.
        degree: degree of the polynomial that is tested for monotonicity.
        skip: number of initial tokens to ignore.
        layers_from: first layer, included.
        layers_to: last layer, excluded; negative counts from the end.
        window: length of the Savitzky-Golay filter.
        polyorder: order of the Savitzky-Golay filter.

    Returns:
        Codes of `monotone` (L, d); `roughness` (L, d); for each channel the number of selected layers in which it
        increases or decreases, the larger of both (d,); and the channels that agree in more than a quarter of all
        layers, smoothest first.

    Raises:
        OptionError: too few tokens remain after `skip`.
    """
    hidden = np.asarray(hidden, dtype=np.float64)[:, skip:]
    layers, tokens, width = hidden.shape
    if tokens < max(window, degree + 2):
        raise OptionError(
            f"search: needs at least {counted(max(window, degree + 2), 'token')}, got {tokens} after "
            f"skip={skip}. Use longer sequences or a smaller skip."
        )
    each = [[hidden[i, :, c] for c in range(width)] for i in range(layers)]
    codes = np.array([[monotone(curve, degree) for curve in row] for row in each])
    rough = np.array([[roughness(curve, window, polyorder) for curve in row] for row in each])
    span = slice(layers_from, layers_to if layers_to < 0 else min(layers_to, layers))
    agreeing = np.maximum((codes[span] == 1).sum(0), (codes[span] == 2).sum(0))
    chosen = np.flatnonzero(agreeing > layers // 4)
    return codes, rough, agreeing, chosen[np.argsort(rough[span].min(0)[chosen], kind="stable")]


def surface(shape: tuple[int, int]) -> Tensor:
    """Return the basis functions at each patch of a grid (h, w): 1, y, x, y², x², xy, r, border, (h w, 8)."""
    y, x = torch.meshgrid(
        *(torch.linspace(-1, 1, n, dtype=torch.float64) if n > 1 else torch.zeros(1).double() for n in shape),
        indexing="ij",
    )
    border = torch.minimum(1 - y.abs(), 1 - x.abs())
    terms = (torch.ones_like(y), y, x, y * y, x * x, x * y, (y * y + x * x).sqrt(), border)
    return torch.stack([t.flatten() for t in terms], 1)


def held_out_residual(maps: Tensor, basis: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return held-out residuals of maps (..., h w): each block minus the prediction of a fit on the other blocks.

    Args:
        maps: flattened maps over the grid.
        basis: (h w, terms), with a constant.
        shape: shape of the grid.
    """
    h, w = shape
    fold = (torch.arange(h)[:, None] // BLOCK + 2 * (torch.arange(w)[None] // BLOCK)).flatten() % FOLDS
    residual = torch.empty_like(maps)
    for k in fold.unique():
        test, train = fold == k, fold != k
        weights = maps[..., train] @ torch.linalg.pinv(basis[train]).mT
        residual[..., test] = maps[..., test] - weights @ basis[test].mT
    return residual


class PositionalChannels(Measure):
    """Fraction of channels whose mean map over images is a smooth surface of the position.

    Follows "Mitigate Position Bias in Large Language Models via Scaling a Single Dimension" (arXiv 2406.02536), which
    finds monotone channels in causal language models; the surfaces on grids are ours.
    """

    name = "channels"
    family = "features"
    order = 4
    limit = 0.02
    question = "Do single channels encode the position?"
    number = "fraction of channels whose mean map is a smooth surface over the grid"
    misleads = "Images with a common layout have such mean maps too; use textures, noise or many images."
    papers = (
        (
            "Mitigate Position Bias in Large Language Models via Scaling a Single Dimension, "
            "https://arxiv.org/abs/2406.02536"
        ),
    )
    needs = frozenset({"maps"})
    controls = ("none",)
    reported_controls = ("random",)

    def on_features(self, acc: Accumulator, maps: Tensor) -> None:
        """Add the maps to the sum of their group, and the R² of single channels in the linear probe."""
        h, w = maps.shape[-2:]
        if min(h, w) < 2 * BLOCK:
            acc.note(refused=f"channels need at least {counted(2 * BLOCK, 'patch')} per side, got {h}x{w}")
            return
        acc.note(group=acc.number % GROUPS, grid=(h, w))
        acc.add("maps", (maps - maps.mean((1, 2), keepdim=True)).float(), groups=True)
        acc.add("energy", maps.double().square().sum((1, 2)))
        if (step := step_for((h, w))) is not None:
            trials, feats = Trials((TARGET,), step, 1), maps.permute(1, 2, 0)
            masks = trials.draw((h, w), np.random.default_rng(acc.number))
            acc.add("probe", torch.from_numpy(trials.channels(feats, masks)[0]))

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the fraction of positional channels, and the best of them."""
        raise_if_refused(acc)
        shape = tuple(acc.records[0]["grid"])
        count = np.bincount([r["group"] for r in acc.records], minlength=GROUPS)
        used = np.flatnonzero(count)
        sums = acc.sums["maps"][torch.from_numpy(used)].double().flatten(2)
        basis, mean_map = surface(shape), sums.sum(0)
        # sums and residuals are linear in the maps, so their squares for any draw of groups follow from inner products
        residual = held_out_residual(sums, basis, shape).transpose(0, 1)
        by_channel = sums.transpose(0, 1)
        unexplained, total = residual @ residual.mT, by_channel @ by_channel.mT

        def r2(times: np.ndarray) -> np.ndarray:
            weight = torch.from_numpy(times.astype(np.float64))
            squares = [torch.einsum("cgk,g,k->c", t, weight, weight) for t in (unexplained, total)]
            return (1 - squares[0] / squares[1].clamp(min=1e-30)).numpy()

        # the same maps with shuffled patches give the chance level of the surface fit
        order = torch.randperm(mean_map.shape[1], generator=torch.Generator().manual_seed(0))
        shuffled = mean_map[:, order]
        chance = 1 - held_out_residual(shuffled, basis, shape).square().sum(1) / shuffled.square().sum(
            1
        ).clamp(min=1e-30)
        limit = max(READ, float(chance.quantile(0.95)))
        scores = r2(np.ones(len(used)))
        best = np.argsort(-scores, kind="stable")[:10]
        energy = acc.sums["energy"].sqrt()
        massive = (energy > MASSIVE * energy.mean()).nonzero().flatten().tolist()
        details = {
            "limit": limit,
            "by_surface": [
                {"channel": int(c), "r2": float(scores[c]), "kind": _kind(mean_map[c], basis)} for c in best
            ],
            "massive": massive,
        }
        if "probe" in acc.sums:
            probe_r2 = (acc.sums["probe"] / len(acc.records)).numpy()
            details["by_probe"] = [
                {"channel": int(c), "r2": float(probe_r2[c])}
                for c in np.argsort(-probe_r2, kind="stable")[:10]
            ]

        def masks(pick: np.ndarray) -> float:
            return float((r2(np.bincount(pick, minlength=len(used))) > limit).mean())

        value = float((scores > limit).mean())
        return Outcome(value, control={"no position": 0.0}, statistic=masks, units=len(used), details=details)


def _kind(mean: Tensor, basis: Tensor) -> str:
    """Return the term with the highest correlation with a map: row, column, distance to the centre or to the border."""
    terms = basis[:, [1, 2, 6, 7]] - basis[:, [1, 2, 6, 7]].mean(0)
    match = (mean @ terms).abs() / terms.norm(dim=0).clamp(min=1e-30)
    return KINDS[int(match.argmax())]
