"""Probes of position across images: fitted on some images, scored on others, linear and non-linear.

A linear probe is what RASA minimises, so that its R² of 0 is not evidence that position is gone. Nearest neighbours and
a small network find position that is encoded in another way. A probe within one image (`positional_probe`) also uses
what is particular to this image; here, only positional information that images have in common counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vispe.errors import OptionError, ShapeError, counted
from vispe.evaluate.probe.fit import r2_score
from vispe.evaluate.probe.splits import cell
from vispe.evaluate.probe.targets import ramp
from vispe.utils.options import PositiveInt, Seed, checked
from vispe.utils.report.result import Result

Regressor = Literal["ridge", "knn", "mlp"]
TARGETS = ("lr", "ud", "radial")
_NAMES = {"ridge": "ridge regression", "knn": "nearest neighbours", "mlp": "network of one hidden layer"}
_READABLE = 0.1  # as in `positional_probe`
_NEIGHBOURS, _HIDDEN, _STEPS = 5, 64, 300
_RIDGE = 1.0  # penalty per standardised channel, as in `positional_probe`


@dataclass(frozen=True)
class ImageProbe(Result):
    """R² of position on images that were not used for the fit.

    Attributes:
        targets: names of the targets, see `vispe.evaluate.probe.targets.ramp`.
        r2: R² by regressor, (targets, images).
        shuffled: the same for a fit with permuted positions, a control.
        tokens: number of tokens of a fit.
    """

    targets: tuple[str, ...]
    r2: dict[str, np.ndarray]
    shuffled: dict[str, np.ndarray]
    tokens: int

    def median(self, regressor: str, target: str) -> float:
        """Return the median over images."""
        return float(np.median(self.r2[regressor][self.targets.index(target)]))

    @property
    def verdict(self) -> str:
        """Verdict in one sentence: whether a regressor predicts row and column in other images."""
        scores = {name: np.median(values[:2], axis=1).max() for name, values in self.r2.items()}
        best = max(scores, key=scores.__getitem__)
        if scores[best] < _READABLE:
            return f"no regressor predicts row or column in other images: R² at most {scores[best]:.2f}"
        return f"{_NAMES[best]} predicts row or column in other images: R² {scores[best]:.2f}"

    @property
    def notes(self) -> tuple[str, ...]:
        """No caveats."""
        return ()

    def table(self, **options: Any) -> list[list[str]]:
        """Return medians over images as text, header first, a row per regressor."""
        rows = [["fitted on other images", *self.targets, *(f"shuffled {t}" for t in self.targets)]]
        for name, values in self.r2.items():
            medians = (*np.median(values, axis=1), *np.median(self.shuffled[name], axis=1))
            rows.append([_NAMES[name], *map(cell, medians)])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: medians over images by regressor and target."""
        kinds = {"r2": self.r2, "shuffled": self.shuffled}
        return {
            name: {
                regressor: dict(zip(self.targets, np.median(values, axis=1).tolist(), strict=True))
                for regressor, values in kind.items()
            }
            for name, kind in kinds.items()
        } | {"tokens": self.tokens, "images": next(iter(self.r2.values())).shape[1]}


@checked
def position_across_images(
    maps: Sequence[Tensor],
    regressors: Sequence[Regressor] = ("ridge", "knn", "mlp"),
    *,
    targets: Sequence[str] = TARGETS,
    folds: PositiveInt = 2,
    tokens: PositiveInt = 4096,
    seed: Seed = 0,
) -> ImageProbe:
    """Predict positions in images from features, with regressors that are fitted on other images.

    Features are standardised. `ridge` is linear; `knn` is the mean position of the five nearest tokens; `mlp` is a
    network with one hidden layer of 64 units, at the step of AdamW with the smallest error on every fifth token.

    Args:
        maps: features (C, h, w) of every image.
        regressors: names of the regressors.
        targets: names of the targets.
        folds: number of groups of images; each is scored by a fit on the other groups.
        tokens: largest number of tokens of a fit, selected at random.
        seed: seed of all random numbers.

    Raises:
        OptionError: fewer images than folds, or one fold.
        ShapeError: the maps differ in the number of channels, or are not (C, h, w).

    Example:
        >>> ramps = torch.linspace(0, 1, 8).expand(1, 8, 8)
        >>> maps = [torch.cat([ramps, torch.rand(3, 8, 8)]) for _ in range(4)]
        >>> position_across_images(maps, ["ridge"], targets=["lr"]).median("ridge", "lr") > 0.9
        True
    """
    if folds < 2 or len(maps) < folds:
        raise OptionError(
            f"position_across_images: needs at least 2 folds and as many images, got folds={folds} and "
            f"{counted(len(maps), 'image')}. Pass more images."
        )
    if any(m.ndim != 3 or m.shape[0] != maps[0].shape[0] for m in maps):
        raise ShapeError(
            f"position_across_images: maps must be (C, h, w) of one number of channels, got "
            f"{[tuple(m.shape) for m in maps][:4]}."
        )
    features = [m.detach().flatten(1).mT.double() for m in maps]
    positions = [
        torch.from_numpy(np.concatenate([ramp(t, tuple(m.shape[1:])).reshape(-1, 1) for t in targets], 1))
        for m in maps
    ]
    r2 = {name: np.empty((len(targets), len(maps))) for name in regressors}
    shuffled = {name: np.empty((len(targets), len(maps))) for name in regressors}
    used = 0
    for fold in range(folds):
        generator = torch.Generator().manual_seed(1_000 * seed + fold)
        fitted = [k for k in range(len(maps)) if k % folds != fold]
        x, y = torch.cat([features[k] for k in fitted]), torch.cat([positions[k] for k in fitted])
        chosen = torch.randperm(len(x), generator=generator)[:tokens]
        x, y, used = x[chosen], y[chosen], len(chosen)
        mean, std = x.mean(0), x.std(0, correction=0)
        std[std == 0] = 1
        permuted = y[torch.randperm(len(y), generator=generator)]
        for name in regressors:
            for result, values in ((r2, y), (shuffled, permuted)):
                predict = _FITS[name]((x - mean) / std, values, generator)
                for k in range(fold, len(maps), folds):
                    predicted, expected = predict((features[k] - mean) / std), positions[k]
                    for t in range(len(targets)):
                        result[name][t, k] = r2_score(
                            expected[:, t : t + 1].numpy(), predicted[:, t : t + 1].numpy()
                        )
    return ImageProbe(tuple(targets), r2, shuffled, used)


def _ridge(x: Tensor, y: Tensor, generator: torch.Generator) -> Any:
    del generator
    centre = y.mean(0)
    gram = x.mT @ x + _RIDGE * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.mT @ (y - centre))
    return lambda z: z @ weights + centre


def _knn(x: Tensor, y: Tensor, generator: torch.Generator) -> Any:
    del generator

    def predict(z: Tensor) -> Tensor:
        nearest = torch.cdist(z, x).topk(min(_NEIGHBOURS, len(x)), largest=False).indices
        return y[nearest].mean(1)

    return predict


def _mlp(x: Tensor, y: Tensor, generator: torch.Generator) -> Any:
    x, y = x.float(), y.float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        net = nn.Sequential(nn.Linear(x.shape[1], _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, y.shape[1]))
    centre = y.mean(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    # every fifth token selects the step, as the network has more parameters than there are tokens
    held_out = torch.arange(len(x)) % 5 == 0
    best, weights = float("inf"), net.state_dict()
    with torch.enable_grad():
        for _ in range(_STEPS):
            errors = (net(x) - (y - centre)).square().mean(1)
            if (score := errors[held_out].mean().item()) < best:
                best, weights = score, {name: value.clone() for name, value in net.state_dict().items()}
            optimizer.zero_grad()
            errors[~held_out].mean().backward()
            optimizer.step()
    net.load_state_dict(weights)

    @torch.no_grad()
    def predict(z: Tensor) -> Tensor:
        return (net(z.float()) + centre).double()

    return predict


_FITS = {"ridge": _ridge, "knn": _knn, "mlp": _mlp}
