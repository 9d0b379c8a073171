"""Model outputs of images, computed once and stored for later segmentations."""

from pathlib import Path
from typing import Any

from vispe.errors import InputError, OptionError, VispeError, is_out_of_memory
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.stored_features import page_digest, page_file, save_page
from vispe.segment.out_of_core import out_of_core_images
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.inputs import BatchImage
from vispe.segment.run.reports.run_report import ProgressCallbacks, Report
from vispe.segment.run.request import DEFAULT, Request
from vispe.segment.run.results_folder.disk_space import disk_space_guard
from vispe.segment.run.stored_inputs import expected_facts
from vispe.segment.types import Paths, ReadOptions
from vispe.utils.files import check_writable


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
) -> Report:
    """Run the model of the features on images, and write its outputs for `stored_features` of `segment`.

    Args:
        images: files, folders or globs.
        out: folder for `<stem>_features_0000.safetensors` of each page: 32 to 40 bytes per pixel of a grey image for
            vispe_micro, and 4 bytes per value of each token of a timm model.
        features: features of a pixel; None: `DEFAULT`.
        reading: options of image reading and normalisation, which must be those of the segmentation.
        seed: seed of random weights.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing files.
        watch: callbacks for progress.

    Returns:
        The report: 'image', 'pages', 'files' and 'bytes' of each image, and the failures.

    Raises:
        OptionError: features without a model, or with filters of volumes.
        InputError: there is no input, files exist, two images have the same name, no image can be used, or memory
            runs out.
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
    # the pages of two images of one name would be stored in the same files
    check_writable([page_file(folder, image.path.stem, 0) for image in run.images], True)
    run.watch.start("computing features", len(run.images))
    for image in list(run.images):
        try:
            run.report.images.append(_store(run, image, extractor, folder))
        except (VispeError, OSError) as error:
            run.fail(image, error)
    return run.report


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
        try:
            maps, model_input = extractor.model_maps(page, valid)
            page_facts = {**facts, "page": number, "page_sha256": page_digest(model_input)}
            with disk_space_guard(folder, path.name):
                size += save_page(path, maps, page_facts, run.force)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # smaller tiles, as in `segment`, would be other features than those that a segmentation expects
            raise InputError(
                f"out of memory while the model ran on page {number} of {image.path}. Use a smaller tile, such as "
                "tile=256, here and in the segmentation."
            ) from error
        run.watch.step(1 / len(files))
    record = {
        "image": str(image.path),
        "pages": len(files),
        "files": [str(path) for path in files],
        "bytes": size,
    }
    run.watch.done(record)
    return record
