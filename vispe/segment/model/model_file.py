"""Model file with everything needed for later segmentation: features, classifier, class names.

A `.vispe` file is a zip of `card.json` (human-readable metadata) and, as needed,
`tensors.safetensors` (parameters of a linear classifier, basis of token features) and `estimator.skops` (a
fitted scikit-learn estimator; no pickle). Equal models give equal bytes: time stamps are fixed and object
identifiers are renumbered.
"""

import functools
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.backbones.hub import named_by_file
from vispe.backbones.load_model import check_kind, kind_of
from vispe.errors import InputError, VispeError, require
from vispe.images.formats.decoded_image import BROKEN
from vispe.images.paths import check_file
from vispe.segment.classify.clustering import METHODS, PixelClusters
from vispe.segment.classify.out_of_distribution import FeatureDistribution
from vispe.segment.classify.pixel_classifier import KINDS, PixelClassifier
from vispe.segment.features.micro_features import NAME
from vispe.segment.features.pixel_features import TOKEN_OPTIONS, FeatureConfig, Features, TokenBasis
from vispe.segment.model.file_checks import (
    TRUSTED,
    check_archive,
    check_card,
    check_estimator,
    check_tensors,
    read_card,
)
from vispe.segment.objects.object_classes import PREFIX, ObjectClassifier
from vispe.segment.text.config import TextClassifier, TextConfig
from vispe.utils.files import atomic_path

if TYPE_CHECKING:
    from vispe.segment.text.features import TextFeatures
    from vispe.segment.types import ReadOptions

FORMAT = "vispe.segment"
VERSION = 2
"""Version of the layout; incremented when an older vispe cannot read new files."""

CARD, ESTIMATOR, TENSORS = "card.json", "estimator.skops", "tensors.safetensors"


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
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    parts = {TENSORS: save(tensors)} if tensors else {}
    if classifier.estimator is not None:
        require("skops", "cli", "a model file")
        import skops.io

        parts[ESTIMATOR] = _canonical(skops.io.dumps(classifier.estimator))
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
    check_card(Path(path), json.loads(json.dumps(card)))
    text = json.dumps(card, indent=2, ensure_ascii=False, sort_keys=True)
    parts[CARD] = text.encode(errors="backslashreplace")
    path = Path(path)
    with atomic_path(path, force) as temporary:
        temporary.write_bytes(_zip(dict(sorted(parts.items())), zipfile.ZIP_STORED))
    return path


def load_model(path: str | Path) -> Model:
    """Read a model file without executing any of its content.

    Raises:
        InputError: the file is missing, damaged, not a vispe model, or of another layout version; or its
            estimator has types other than scikit-learn's own classifiers.
    """
    path = Path(path)
    card, parts = _read(path)
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
    estimator = _estimator(path, parts[ESTIMATOR], kind) if ESTIMATOR in parts else None
    tensors = _tensors(path, parts[TENSORS]) if TENSORS in parts else {}
    if estimator is not None:
        check_estimator(path, estimator, kind, card["n_classes"])
    check_tensors(path, tensors, card["n_classes"])
    try:
        return _rebuild(card, estimator, tensors)
    except (TypeError, KeyError, AttributeError, IndexError, _ObjectsError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} is damaged: its card does not match its arrays ({reason}). Train the model again."
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
    tensors_of_objects = {key: value for key, value in tensors.items() if key.startswith(PREFIX)}
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
        objects=None if objects is None else _objects(objects, tensors_of_objects, card["seed"]),
    )


def _objects(card: Mapping[str, Any], tensors: Mapping[str, np.ndarray], seed: int) -> ObjectClassifier:
    try:
        return ObjectClassifier.stored(card, tensors, seed)
    except VispeError as error:
        # invalid options and arrays, reported with the file
        raise _ObjectsError(f"object classes: {error}") from error


def _features(config: FeatureConfig | TextConfig) -> dict[str, Any]:
    """Return the features of a card; token options only if set, for files equal to those of earlier versions."""
    entries = asdict(config)
    if isinstance(config, FeatureConfig):
        entries = {k: v for k, v in entries.items() if k not in TOKEN_OPTIONS} | config.token_options()
    return entries


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
        config: configuration of the model's features, with other weights or tiles; `model.features` by
            default.
        allow_download: download weights that the model file names, if they are not on this disk.

    Raises:
        InputError: weights that are not on this disk, without `allow_download`.
    """
    config = config or model.features
    if isinstance(config, FeatureConfig) and config.model in (None, NAME):
        return Features(config, seed=model.seed, device=device, basis=model.basis)
    with named_by_file(allow_download):
        if isinstance(config, FeatureConfig):
            return Features(config, seed=model.seed, device=device, basis=model.basis)
        from vispe.segment.text.features import TextFeatures  # imports open_clip

        return TextFeatures(config, model.classifier, seed=model.seed, device=device)


def versions() -> dict[str, str]:
    """Return the versions of vispe and of the libraries that affect results."""
    return dict(_versions())


@functools.cache
def _versions() -> Mapping[str, str]:
    """Return `versions()`, read once per process: each takes a search of the installed packages."""
    from importlib.metadata import version

    from vispe.utils.version import __version__

    libraries = ("numpy", "scipy", "scikit-learn", "scikit-image", "torch", "timm")
    libraries += ("open_clip_torch", "skops")
    return {"vispe": __version__, **{name: version(name) for name in libraries}}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read the members and verify their checksums."""
    if kind_of(path) == "retrofit" or (kind_of(path) != "timm" and not path.is_file()):
        check_kind(path, ("segmenter",))
    check_file(path, "pass the model.vispe file written by vispe segment")
    try:
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            parts = {n: archive.read(n) for n in (CARD, ESTIMATOR, TENSORS) if n in archive.namelist()}
        card = read_card(parts.pop(CARD))
    except InputError:
        raise
    except (*BROKEN, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{path} is not a complete vispe model file ({reason}). Train the model again."
        ) from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        file_format = card.get("format") if isinstance(card, dict) else type(card).__name__
        raise InputError(f"{path} is not a segmentation model: format={file_format!r}, expected {FORMAT!r}.")
    if card.get("format_version") != VERSION:
        writer = card["versions"].get("vispe") if isinstance(card.get("versions"), dict) else "unknown"
        raise InputError(
            f"{path} has format_version={card.get('format_version')} (written by vispe {writer}), but this vispe reads "
            f"format_version={VERSION}. Use that version of vispe or train the model again."
        )
    if not isinstance(card.get("sha256"), dict):
        raise InputError(f"{path} is damaged: its card has no checksums. Copy the file again.")
    if set(card["sha256"]) != set(parts):
        listed, contents = (", ".join(sorted(names)) or "none" for names in (card["sha256"], parts))
        raise InputError(
            f"{path} is damaged: its card lists {listed}, but it contains {contents}. Copy the file again."
        )
    for name, digest in card["sha256"].items():
        if hashlib.sha256(parts[name]).hexdigest() != digest:
            raise InputError(f"{path} is damaged: {name} does not match its checksum. Copy the file again.")
    check_card(path, card)
    return card, parts


def _estimator(path: Path, data: bytes, kind: str) -> Any:
    """Load the scikit-learn estimator, restricted to known types."""
    import skops.io
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.pipeline import Pipeline

    classes = {"forest": RandomForestClassifier, "boosting": HistGradientBoostingClassifier}
    try:
        check_archive(path, data)
        untrusted = sorted(set(skops.io.get_untrusted_types(data=data)) - TRUSTED)
    except InputError:
        raise
    except (*BROKEN, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{path} is damaged: its estimator cannot be read ({reason}). Train the model again."
        ) from error
    if untrusted:
        raise InputError(
            f"{path} was rejected: its estimator contains untrusted types ({', '.join(untrusted)}). "
            "Use only model files from a trusted source."
        )
    try:
        estimator = skops.io.loads(data, trusted=sorted(TRUSTED))
    except (*BROKEN, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{path}: scikit-learn cannot load the estimator ({reason}); its version may differ from the one in "
            "card.json. Train the model again."
        ) from error
    if type(estimator) is not classes.get(kind, Pipeline):
        raise InputError(
            f"{path} declares {kind!r} but contains a {type(estimator).__name__}. Train the model again."
        )
    return estimator


def _tensors(path: Path, data: bytes) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(data)
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}. Copy the file again.") from error


def _canonical(data: bytes) -> bytes:
    """Renumber the object identifiers of a skops archive (memory addresses) in order of appearance."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    schema = parts.pop("schema.json").decode()
    numbers: dict[str, str] = {}
    for match in re.findall(r'"__id__": (\d+)|"file": "(\d+)\.', schema):
        number = match[0] or match[1]
        numbers.setdefault(number, str(len(numbers)))
    schema = re.sub(r'("__id__": )(\d+)', lambda m: m[1] + numbers[m[2]], schema)
    schema = re.sub(r'("file": ")(\d+)(\.)', lambda m: m[1] + numbers[m[2]] + m[3], schema)
    renamed = {re.sub(r"^\d+", lambda m: numbers[m[0]], name): part for name, part in parts.items()}
    return _zip({"schema.json": schema.encode(), **dict(sorted(renamed.items()))}, zipfile.ZIP_DEFLATED)


def _zip(parts: Mapping[str, bytes], compression: int) -> bytes:
    """Pack members with fixed time stamps, for reproducible bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in parts.items():
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = compression
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()
