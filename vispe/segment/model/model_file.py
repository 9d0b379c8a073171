"""Model file with everything needed for later segmentation: features, classifier, class names.

A `.vispe` file is a zip of `card.json` (human-readable metadata) and, as needed, `tensors.safetensors` (parameters of
a linear classifier, basis of token features) and `estimator.skops` (a fitted scikit-learn estimator; no pickle). Equal
models give equal bytes: time stamps are fixed and object identifiers are renumbered.
"""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.backbones.hub import named_by_file
from vispe.errors import InputError, VispeError, short
from vispe.segment.classify.clustering import METHODS, PixelClusters
from vispe.segment.classify.out_of_distribution import FeatureDistribution
from vispe.segment.classify.pixel_classifier import KINDS, PixelClassifier
from vispe.segment.features.feature_config import TOKEN_OPTIONS, FeatureConfig
from vispe.segment.features.micro_features import NAME
from vispe.segment.features.pixel_features import Features, TokenBasis
from vispe.segment.model.archive import (
    CARD,
    ESTIMATOR,
    FORMAT,
    TENSORS,
    VERSION,
    pack,
    read_archive,
    read_tensors,
)
from vispe.segment.model.card_checks import check_card
from vispe.segment.model.estimator_file import estimator_bytes, read_estimator
from vispe.segment.model.parameter_checks import check_tensors
from vispe.segment.objects.object_classes import PREFIX, ObjectClassifier
from vispe.segment.text.config import TextClassifier, TextConfig
from vispe.utils.files import atomic_path
from vispe.utils.version import versions

if TYPE_CHECKING:
    from vispe.segment.text.features import TextFeatures
    from vispe.segment.types import ReadOptions


class _ObjectsError(Exception):
    """A classifier of objects with invalid entries or arrays."""


@dataclass(frozen=True, eq=False)
class Model:
    """A trained segmentation model.

    Attributes:
        features: configuration of the features.
        classifier: predicts class probabilities from features.
        names: K class names.
        colors: K colours (r, g, b), or None for the default palette.
        normalize: mode of `vispe.images.normalize.normalize`.
        clip: its percentiles.
        channels: number of image channels that the features were fitted with; None for any number.
        seed: seed of all random numbers.
        basis: principal components of the tokens; None without tokens.
        notes: metadata of the training, such as the names of the images; JSON-able.
        domain: summary of the features of the training pages; None for text models, for files of earlier vispe, and
            for pages too small to be compared.
        objects: classifier of objects; None without examples of object classes.
    """

    features: FeatureConfig | TextConfig
    classifier: PixelClassifier | PixelClusters | TextClassifier
    names: tuple[str, ...]
    colors: tuple[tuple[int, int, int], ...] | None
    normalize: str
    clip: tuple[float, float]
    channels: int | None
    seed: int
    basis: TokenBasis | None
    notes: Mapping[str, Any]
    domain: FeatureDistribution | None = None
    objects: ObjectClassifier | None = None

    @classmethod
    def of(cls, features: "Features | TextFeatures", reading: "ReadOptions", **entries: Any) -> "Model":
        """Return a model from features and reading options; `entries` are the other attributes."""
        known = {"features": features.config, "basis": features.basis}
        return cls(**known, normalize=reading.normalize, clip=reading.clip, **entries)


def save_model(path: str | Path, model: Model, force: bool = False) -> Path:
    """Write a model file atomically.

    Raises:
        InputError: `path` exists and not `force`, or is not writable.
    """
    from safetensors.numpy import save

    classifier = model.classifier
    tensors = classifier.tensors()
    if model.basis is not None:
        tensors |= {f"basis.{key}": value for key, value in model.basis.tensors().items()}
    if model.domain is not None:
        tensors |= {f"domain.{key}": value for key, value in model.domain.tensors().items()}
    if model.objects is not None:
        tensors |= model.objects.tensors()
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    parts = {TENSORS: save(arrays)} if arrays else {}
    if classifier.estimator is not None:
        parts[ESTIMATOR] = estimator_bytes(classifier.estimator)
    card = {
        "format": FORMAT,
        "format_version": VERSION,
        "classifier": classifier.kind,
        "n_classes": classifier.n_classes,
        "classes": list(model.names),
        "colors": model.colors,
        "features": _features(model.features),
        "channels": model.channels,
        "normalize": model.normalize,
        "clip": list(model.clip),
        "seed": model.seed,
        "temperature": getattr(classifier, "temperature", 1.0),
        "training": dict(model.notes),
        **({} if model.objects is None else {"object_classes": model.objects.card()}),
        "versions": versions(),
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()},
    }
    path = Path(path)
    check_card(path, json.loads(json.dumps(card)))
    text = json.dumps(card, indent=2, ensure_ascii=False, sort_keys=True)
    parts[CARD] = text.encode(errors="backslashreplace")
    with atomic_path(path, force) as temporary:
        temporary.write_bytes(pack(dict(sorted(parts.items())), zipfile.ZIP_STORED))
    return path


def load_model(path: str | Path) -> Model:
    """Read a model file without executing any of its content.

    Raises:
        InputError: the file is missing, damaged, not a vispe model, of another layout version, or has unknown types.
    """
    path = Path(path)
    card, parts = read_archive(path)
    kind = card["classifier"]
    known = (*KINDS, *METHODS, TextClassifier.kind)
    if kind not in known:
        raise InputError(
            f"{path} contains a classifier of kind {kind!r}. Supported kinds: {', '.join(known)}."
        )
    if (kind not in ("ensemble", "logistic", TextClassifier.kind)) != (ESTIMATOR in parts):
        raise InputError(
            f"{path} is damaged: a classifier of kind {kind!r} with {', '.join(parts)}. Train the model again."
        )
    n_classes = card["n_classes"]
    estimator = read_estimator(path, parts[ESTIMATOR], kind, n_classes) if ESTIMATOR in parts else None
    tensors = read_tensors(path, parts[TENSORS]) if TENSORS in parts else {}
    check_tensors(path, tensors, n_classes)
    try:
        return _rebuild(card, estimator, tensors)
    except (TypeError, KeyError, AttributeError, IndexError, _ObjectsError) as error:
        raise InputError(
            f"{path} is damaged: its card does not match its arrays ({short(error)}). Train the model again."
        ) from error


def _rebuild(card: Mapping[str, Any], estimator: Any, tensors: dict[str, np.ndarray]) -> Model:
    kind = card["classifier"]
    if kind == TextClassifier.kind:
        features, classifier = TextConfig(**card["features"]), TextClassifier.from_tensors(tensors)
    else:
        options = {**card["features"], "sigmas": tuple(card["features"]["sigmas"])}
        if options.get("model") not in (None, NAME):
            options = {"token_shifts": 1, **options}  # default of files written before this option existed
        features = FeatureConfig(**options)
    state = {"seed": card["seed"], "estimator": estimator, "state": tensors}
    if kind in METHODS:
        classifier = PixelClusters(card["n_classes"], kind, **state)
    elif kind in KINDS:
        temperature = card.get("temperature", 1.0)  # absent in earlier files
        classifier = PixelClassifier(kind, card["n_classes"], **state, temperature=temperature)
    basis_arrays, domain_arrays = (
        {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
        for start in ("basis.", "domain.")
    )
    colors, objects = card["colors"], card.get("object_classes")
    return Model(
        features=features,
        classifier=classifier,
        names=tuple(card["classes"]),
        colors=None if colors is None else tuple(tuple(c) for c in colors),
        normalize=card["normalize"],
        clip=tuple(card["clip"]),
        channels=card["channels"],
        seed=card["seed"],
        basis=TokenBasis(**basis_arrays) if basis_arrays else None,
        notes=card["training"],
        domain=FeatureDistribution.from_tensors(domain_arrays) if domain_arrays else None,
        objects=None if objects is None else _objects(objects, tensors, card["seed"]),
    )


def _objects(card: Mapping[str, Any], tensors: Mapping[str, np.ndarray], seed: int) -> ObjectClassifier:
    tensors = {key: value for key, value in tensors.items() if key.startswith(PREFIX)}
    try:
        return ObjectClassifier.stored(card, tensors, seed)
    except VispeError as error:
        # invalid options and arrays, reported with the file
        raise _ObjectsError(f"object classes: {error}") from error


def _features(config: FeatureConfig | TextConfig) -> dict[str, Any]:
    """Return the features of a card; token options only if set, for files equal to those of earlier versions."""
    if isinstance(config, TextConfig):
        return asdict(config)
    return {k: v for k, v in asdict(config).items() if k not in TOKEN_OPTIONS} | config.token_options()


def open_features(
    model: Model,
    device: str = "auto",
    config: FeatureConfig | TextConfig | None = None,
    *,
    allow_download: bool = False,
) -> "Features | TextFeatures":
    """Create the feature extractor of a model.

    Args:
        model: result of `load_model`.
        device: torch device.
        config: configuration of the model's features, with other weights or tiles; default: `model.features`.
        allow_download: download weights that the model file names, if they are not on this disk.

    Raises:
        InputError: weights that are not on this disk, without `allow_download`.
    """
    config = config or model.features
    # filters and vispe_micro need no weights of a hub, whose library takes long to import
    if isinstance(config, FeatureConfig) and config.model in (None, NAME):
        return Features(config, seed=model.seed, device=device, basis=model.basis)
    with named_by_file(allow_download):
        if isinstance(config, FeatureConfig):
            return Features(config, seed=model.seed, device=device, basis=model.basis)
        from vispe.segment.text.features import TextFeatures  # imports open_clip

        return TextFeatures(config, model.classifier, seed=model.seed, device=device)
