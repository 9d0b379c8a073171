"""Remedies of positional bias without training: averages over views, and linear maps of the channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.backbones.local.debiased import DebiasedFeatures, DebiasedModel, Debiasing
from vispe.backbones.local.registers import Neuron, find_register_neurons
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError, UnknownName, UnsupportedHost, did_you_mean
from vispe.evaluate.probe.feature_sources import black_image, feature_function
from vispe.evaluate.probe.linear_debiasing import svd_basis
from vispe.evaluate.probe.rasa.fit import Rasa
from vispe.evaluate.probe.rasa.table_rows import ALPHA, default_rounds
from vispe.evaluate.probe.regression_data import Fit
from vispe.evaluate.probe.splits import POSITIONS, Trials
from vispe.images.symmetry.view_averages import ViewAverage
from vispe.utils.options import PositiveInt, Seed, checked

METHODS = ("registers", "poses", "positions", "rasa", "blank", "svd")
"""Names of methods, in the order in which they are applied."""
FITTED = ("rasa", "blank", "svd")
"""Linear maps of the channels, of which a method has at most one."""

N_POSITIONS = 8  # forward passes of `positions`, as many as those of `poses`


@checked
def debias(
    model: nn.Module | FeatureFunction,
    method: str,
    images: Iterable[Tensor] | None = None,
    *,
    rounds: PositiveInt | None = None,
    positions: PositiveInt | None = None,
    channels: PositiveInt | Sequence[int] | None = None,
    directions: PositiveInt | None = None,
    neurons: PositiveInt | None = None,
    seed: Seed = 0,
) -> DebiasedFeatures | VisionModel:
    """Return the features of a model after a remedy of positional bias that needs no training.

    | method | what it does | forward passes per image |
    |---|---|---|
    | `poses` | mean over the eight poses, each transformed back | 8 |
    | `positions` | mean over random positions on a larger canvas | 8 |
    | `poses+positions` | mean over the eight poses, each at a random position | 8 |
    | `registers` | moves the activations of register neurons to an additional token (arXiv 2506.08010) | 1 |
    | `rasa` | removes the directions of linear regressions of position (RASA, arXiv 2507.14137) | 1 |
    | `blank` | sets the most informative channels to 0 | 1 |
    | `svd` | removes the directions in which a black image varies (arXiv 2603.16840) | 1 |

    Join names by `+`; one of `rasa`, `blank` and `svd` can follow an average, and is then fitted on averages.

    Args:
        model: a `VisionModel`, a model of timm or open_clip, or a function from images (b, c, H, W) to maps
            (b, d, h, w), with an attribute `patch_size` for averages.
        method: names of methods.
        images: normalised images (c, H, W) on which `rasa` and `blank` are fitted, of the kind that the model will be
            used on, but not those of an evaluation. Labels are not needed. If the content is not aligned to the image
            frame, as in random crops, the images have nothing in common except position.
        rounds: number of rounds of `rasa`; each round removes two directions; `default_rounds` by default.
        positions: positions for each pose; default 1 with `poses`, else 8.
        channels: for `blank`, the number of channels (4 by default), or their indices, which need no images.
        directions: for `svd`, the number of directions; 16 by default.
        neurons: for `registers`, the number of neurons; 10 by default.
        seed: seed of positions and of the fit.

    Returns:
        A function of images (b, c, H, W) that returns maps (b, d, h, w): a `VisionModel` for models, else a module.

    Raises:
        UnknownName: an unknown method.
        OptionError: methods that exclude each other, an option or images without effect, missing images, or too many
            rounds.
        UnsupportedHost: the model or function does not support the method.
        ShapeError: an image is not (c, H, W), or a function does not return one map per image.
        InputError: a map has values that are not finite.

    Example:
        >>> pool = torch.nn.AvgPool2d(4)
        >>> debias(pool, "rasa", torch.rand(3, 3, 32, 32), rounds=1)(torch.rand(1, 3, 32, 32)).shape
        torch.Size([1, 3, 8, 8])
    """
    names = parse_method(method)
    linear = names[-1] if names[-1] in FITTED else None
    for option, value, name in (
        ("rounds", rounds, "rasa"),
        ("channels", channels, "blank"),
        ("directions", directions, "svd"),
        ("neurons", neurons, "registers"),
    ):
        _refuse(method, option, value, name in names)
    channels = 4 if channels is None else channels
    needs_images = (
        "registers" in names or linear == "rasa" or (linear == "blank" and isinstance(channels, int))
    )
    if (images is None) == needs_images:
        raise OptionError(
            f"debias: images must be passed for registers, rasa, and blank without indices of channels only, got "
            f"method={method!r} and images={'None' if images is None else type(images).__name__}."
        )
    _refuse(method, "positions", positions, "positions" in names)
    count = 0 if "positions" not in names else positions or (1 if "poses" in names else N_POSITIONS)
    average = ViewAverage(poses=8 if "poses" in names else 1, positions=count)
    f, images = feature_function(model), None if images is None else list(images)
    start = Debiasing(method, average, seed)
    if "registers" in names:
        start = replace(start, registers=_register_neurons(f, images or [], neurons or 10))
    plain = _features(f, start)
    details: dict[str, Any] = {"images": len(images or [])}
    result = replace(start, details=details | ({"neurons": len(start.registers)} if start.registers else {}))
    if linear is not None:
        maps = [features_of(plain, image[None])[0] for image in images or []]
        if linear == "rasa":
            rounds = rounds or default_rounds(len(maps[0]) if maps else 0)
            rasa = Rasa(rounds, standardize=True, alpha=ALPHA).fit([one.movedim(0, -1) for one in maps])
            fit = {"matrix": rasa.projection_.matrix, "bias": rasa.projection_.bias}
            details |= {"rounds": rounds}
        elif linear == "blank":
            chosen = _informative(maps, channels, seed) if isinstance(channels, int) else list(channels)
            fit, details = {"matrix": _blank_matrix(f, chosen)}, details | {"channels": chosen}
        else:
            basis = svd_basis(_black_map(f, plain), directions or 16)
            matrix = torch.eye(len(basis), dtype=basis.dtype) - basis @ basis.mT
            fit, details = {"matrix": matrix, "unit_norm": True}, details | {"directions": basis.shape[1]}
        result = replace(result, details=result.details | details, **fit)
    return _features(f, result)


def _features(f: FeatureFunction, debiasing: Debiasing) -> DebiasedFeatures | VisionModel:
    """Return the debiased features of a model or function."""
    if isinstance(f, VisionModel) and f.last:
        settings = {"mean": f.mean, "std": f.std, "exact": f.exact}
        return VisionModel(DebiasedModel(f.model, debiasing).eval(), **settings)
    return DebiasedFeatures(f, debiasing)


def _register_neurons(f: FeatureFunction, images: Sequence[Tensor], count: int) -> tuple[Neuron, ...]:
    if not isinstance(f, VisionModel) or not f.last:
        raise UnsupportedHost(
            f"debias: registers needs the final features of a vision model, got {type(f).__name__}. Use another method."
        )
    device = next(f.model.parameters()).device
    return tuple(find_register_neurons(f.model, (image.to(device) for image in images), count))


def parse_method(method: str) -> list[str]:
    """Return the names of a method: averages first, then one linear map.

    >>> parse_method("rasa+poses")
    ['poses', 'rasa']

    Raises:
        UnknownName: an unknown name.
        OptionError: a name is repeated, or there are two linear maps.
    """
    names = method.split("+")
    for name in names:
        if name not in METHODS:
            raise UnknownName(
                f"debias: method must be names joined by +, got {name!r}.{did_you_mean(name, METHODS)}"
            )
    if len(set(names)) < len(names) or len(set(names) & set(FITTED)) > 1:
        raise OptionError(
            f"debias: method may have each name once, and one of {', '.join(FITTED)}, got {method!r}."
        )
    return [name for name in METHODS if name in names]


def _refuse(method: str, option: str, value: object, used: bool) -> None:
    if value is not None and not used:
        raise OptionError(f"debias: {option}={value} has no effect on method={method!r}. Omit it.")


def _informative(maps: Sequence[Tensor], count: int, seed: int) -> list[int]:
    """Return the channels from which position is decoded best, in maps (C, h, w)."""
    if not maps:
        raise ShapeError("debias: blank has no images, got an empty sequence. Pass at least one image.")
    rng, curves = np.random.default_rng(seed), []
    for one in maps:
        feats = one.movedim(0, -1)
        # small grids need denser training patches
        side = min(one.shape[1:])
        step = 6 if side >= 12 else 3 if side >= 6 else 2
        trials = Trials(POSITIONS, step, 6, Fit("ridge", 1.0))
        # skip the first target, row and column together, which consists of two other targets
        curves.append(trials.channels(feats, trials.draw(tuple(feats.shape[:2]), rng))[1:])
    best = np.nan_to_num(np.mean(curves, axis=0), nan=-np.inf).max(0)
    return [int(c) for c in np.argsort(-best, kind="stable")[:count]]


def _blank_matrix(f: FeatureFunction, channels: Sequence[int]) -> Tensor:
    """Return the diagonal matrix that sets channels of the features of `f` to 0."""
    if not isinstance(f, VisionModel):
        raise UnsupportedHost(
            f"debias: blank needs a vision model, whose channels are known, got {type(f).__name__}. Use blank_channels."
        )
    if wrong := [c for c in channels if not 0 <= c < f.channels]:
        raise OptionError(f"debias: channels must be in 0 to {f.channels - 1}, got {wrong}.")
    diagonal = torch.ones(f.channels, dtype=torch.float64)
    diagonal[list(channels)] = 0
    return torch.diag(diagonal)


def _black_map(f: FeatureFunction, features: FeatureFunction) -> Tensor:
    """Return the features (1, C, h, w) of a black image of the size of a model."""
    black = black_image(f)
    if black is None or not isinstance(f, VisionModel):
        raise UnsupportedHost(
            f"debias: svd needs the normalisation of a model, got {type(f).__name__}. Use svd_debias."
        )
    side = f.size // f.patch_size * f.patch_size
    return features_of(features, black.expand(-1, side, side)[None]).cpu()
