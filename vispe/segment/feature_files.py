"""Model outputs of images computed ahead of segmentation, as in the command `vispe features`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vispe.errors import InputError, OptionError, VispeError
from vispe.segment.features.pixel_features import FeatureConfig, Features
from vispe.segment.features.stored_features import (
    StoredFeatures,
    page_digest,
    page_file,
    save_page,
    versions,
)
from vispe.segment.model.prediction import within_memory
from vispe.segment.out_of_core import out_of_core_images
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.disk_space import disk_space_guard
from vispe.segment.run.inputs import BatchImage
from vispe.segment.run.request import DEFAULT, Request
from vispe.segment.run.resume import digest
from vispe.segment.run.run_report import ProgressCallbacks
from vispe.segment.types import Paths, ReadOptions
from vispe.utils.files import check_writable

_MODEL = ("model", "fingerprint", "pos_embed", "tile", "token_stride", "token_shifts", "layers")
_READING = ("channel", "z", "scene", "orientation", "crop", "normalize", "clip")


@dataclass(frozen=True)
class StoredRun:
    """Result of `store_features`.

    Attributes:
        records: 'image', 'pages', 'files' and 'bytes' of each image.
        failures: 'image' and 'reason' of each image of a batch that failed.
    """

    records: list[dict[str, Any]]
    failures: list[dict[str, str]]


def store_features(
    images: Paths,
    out: str | Path,
    *,
    features: FeatureConfig | None = None,
    reading: ReadOptions | None = None,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    watch: ProgressCallbacks | None = None,
) -> StoredRun:
    """Run the model of the features on images, and write its outputs for `stored_features` of `segment`.

    Args:
        images: files, folders or globs.
        out: folder for `<stem>_features_0000.safetensors` of each page: 32 to 40 bytes per pixel of a grey image for
            vispe_micro, and 4 bytes per value of each token of a timm model.
        features: features of a pixel; None: `vispe.segment.pipeline.DEFAULT`.
        reading: options of image reading and normalisation, which must be those of the segmentation.
        seed: seed of random weights.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing files.
        watch: callbacks for progress.

    Returns:
        The records and the failures.

    Raises:
        OptionError: features without a model, or with filters of volumes.
        InputError: there is no input, files exist, or no image can be used.
    """
    request = Request.of("features", locals())
    if out_of_core_images(request.images, None, None):
        raise OptionError(
            "features are stored for images in memory, but the images include a store or a file that is processed in "
            "blocks. Crop a part and save it as a TIFF file."
        )
    run, folder = Batch(request), Path(out)
    extractor = Features(request.features or DEFAULT, seed=seed, device=device)
    if extractor.config.kind == "filters":
        raise OptionError(
            "features=filters has no model whose outputs could be stored. Use features=both or tokens."
        )
    run.watch.start("computing features", len(run.images))
    records = []
    for image in list(run.images):
        try:
            records.append(_store(run, image, extractor, folder))
        except (VispeError, OSError) as error:
            run.fail(image, error)
    return StoredRun(records, run.report.failures)


def _store(run: Batch, image: BatchImage, extractor: Features, folder: Path) -> dict[str, Any]:
    """Write the files of one image, and return its record."""
    grey = run.pages(image, None)
    files = [page_file(folder, image.path.stem, number) for number in range(len(grey.pages))]
    check_writable(files, run.force, protect=[image.path])
    folder.mkdir(parents=True, exist_ok=True)
    facts, size = {**expected_facts(image, run.reading, extractor), "pages": len(files)}, 0
    for note in grey.notes:
        run.note(note)
    for number, path in enumerate(files):
        page, valid = grey.page(number)
        maps, model_input = extractor.model_maps(page, valid)
        page_facts = {**facts, "page": number, "page_sha256": page_digest(model_input)}
        with disk_space_guard(folder, path.name):
            size += within_memory(
                extractor, lambda m=maps, p=path, f=page_facts: save_page(p, m, f, run.force), run.note
            )
        run.watch.step(1 / len(files))
    record = {
        "image": str(image.path),
        "pages": len(files),
        "files": [str(path) for path in files],
        "bytes": size,
    }
    run.watch.done(record)
    return record


def use_stored_features(
    extractor: Features, folder: str | Path | None, images: Sequence[BatchImage], reading: ReadOptions
) -> Features:
    """Let features read the stored model outputs of images; a no-op without a folder.

    Args:
        extractor: the features, which are returned.
        folder: folder of `store_features`.
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
    model = {name: getattr(extractor.config, name) for name in _MODEL}
    options = {name: getattr(reading, name) for name in _READING} | {"axes": image.axes or reading.axes}
    options["mask"] = None if image.mask is None else digest(image.mask)
    facts = {"image_sha256": digest(image.path), "versions": versions(), "model": model, "reading": options}
    for group in ("model", "reading"):
        facts[group] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in facts[group].items()
        }
    return facts
