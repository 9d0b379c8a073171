"""Stored outputs of the model for the images of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vispe.errors import InputError, OptionError
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.stored_features import StoredFeatures, versions
from vispe.segment.run.inputs import BatchImage
from vispe.segment.run.results_folder.resume import digest
from vispe.segment.types import ReadOptions

_MODEL_FACTS = ("model", "fingerprint", "pos_embed", "tile", "token_stride", "token_shifts", "layers")
_READING_FACTS = ("channel", "z", "scene", "orientation", "crop", "normalize", "clip")


def use_stored_features(
    extractor: Features, folder: str | Path | None, images: Sequence[BatchImage], reading: ReadOptions
) -> Features:
    """Let features read the stored model outputs of images; a no-op without a folder.

    Args:
        extractor: the features, which are returned.
        folder: folder of `vispe.segment.pipeline.store_features`.
        images: the images.
        reading: options of image reading and normalisation.

    Raises:
        OptionError: features without a model.
        InputError: features are missing, or of another image, model, version or reading.
    """
    if folder is None:
        return extractor
    if not isinstance(extractor, Features) or extractor.config.kind == "filters":
        raise OptionError(
            "stored_features has no effect without a model of patch tokens. Omit it, or use features=both or tokens."
        )
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is not a folder. Pass the folder that vispe features wrote.")
    extractor.stored = StoredFeatures()
    for image in images:
        extractor.stored.add(Path(folder), image.path, expected_facts(image, reading, extractor))
    return extractor


def expected_facts(image: BatchImage, reading: ReadOptions, extractor: Features) -> Mapping[str, Any]:
    """Return the facts on which the stored outputs of an image depend, JSON-able."""
    model = {name: getattr(extractor.config, name) for name in _MODEL_FACTS}
    options = {name: getattr(reading, name) for name in _READING_FACTS} | {"axes": image.axes or reading.axes}
    options["mask"] = None if image.mask is None else digest(image.mask)
    facts = {"image_sha256": digest(image.path), "versions": versions(), "model": model, "reading": options}
    for group in ("model", "reading"):
        facts[group] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in facts[group].items()
        }
    return facts
