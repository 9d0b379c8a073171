"""Inputs of an out-of-core run: images, grey limits and labels."""

import json
from collections.abc import Sequence
from pathlib import Path

from vispe.errors import InputError, OptionError, VispeError, require
from vispe.segment.features.pixel_features import Features
from vispe.segment.out_of_core import find_stores, output_stem, progress
from vispe.segment.out_of_core.block_engine import check_supported
from vispe.segment.out_of_core.intensity_limits import Limits, find_limits
from vispe.segment.out_of_core.lazy_page import StorePages
from vispe.segment.out_of_core.memory_plan import DEFAULT, parse_memory
from vispe.segment.out_of_core.result_stores import ResultStores
from vispe.segment.out_of_core.scribbles import match_store_labels, read_scribbles
from vispe.segment.out_of_core.source.image import OutOfCoreImage
from vispe.segment.out_of_core.source.open_image import open_image
from vispe.segment.run import request as requests
from vispe.segment.run.inputs import BatchImage, as_list, common_channel_count, find_files
from vispe.segment.run.pages import TrainingLabels
from vispe.segment.run.request import Request
from vispe.segment.run.run_state import MODEL_NAME

_ROWS = 1024  # side of the pieces that are read for the grey limits


class StoreInputs(ResultStores):
    """Run that opens its images as stores, and reads their grey limits and labels.

    Args:
        request: the validated arguments.
        images: Zarr stores, or TIFF files.

    Attributes:
        sources: the opened images.
        model_file: model used for the segmentation, once it exists.

    Raises:
        OptionError: options that need a complete page.
        InputError: unreadable or duplicate images.
    """

    def __init__(self, request: Request, images: Sequence[Path]) -> None:
        super().__init__(request)
        check_request(request)
        self.memory = parse_memory(request.memory or DEFAULT)
        self.model_file = self.out / MODEL_NAME if self.writes_model else Path(request.model)
        if request.scheduler is not None:
            require("distributed", "big", "a dask scheduler")
        if self.writes_model:
            check_supported(request.features or requests.DEFAULT)
            stores, rest = find_stores(as_list(request.labels))
            self._files = stores + find_files(rest)
        self.sources = {}
        self.images = [BatchImage(path) for path in images]
        for image in list(self.images):
            try:
                reading = self.reading
                self.sources[image.path] = open_image(
                    image.path, channel=reading.channel, z=reading.z, axes=reading.axes
                )
            except (VispeError, OSError) as error:
                self.fail(image, error)
        stems = [output_stem(image.path) for image in self.images]
        if len(set(stems)) < len(stems):
            duplicate = next(s for s in stems if stems.count(s) > 1)
            raise InputError(f"two images are named {duplicate}. Rename one or use separate folders.")
        if self._files:
            labels_of = match_store_labels(self._files, [image.path for image in self.images], self.note)
            for image in self.images:
                image.labels = labels_of.get(image.path)

    check_features = staticmethod(check_supported)

    def pages(self, image: BatchImage, features: Features | None) -> StorePages:
        """Return views of the normalised pages of an image."""
        return StorePages(self.sources[image.path], self.limits(image.path)[0])

    def training_labels(self) -> TrainingLabels:
        """Read the labels of all images, with a common class numbering."""
        images = [image for image in self.images if image.labels is not None]
        sources = [self.sources[image.path] for image in images]
        scribbles, names, colors, notes = read_scribbles(
            [image.labels for image in images], sources, self.request.labelling
        )
        channels = common_channel_count({s.path: s.channels for s in sources}, "labelled images")
        for text in notes:
            self.note(text)
        indices, classes = [each.indices for each in scribbles], [each.classes for each in scribbles]
        return TrainingLabels(images, indices, classes, names, colors, channels)

    def limits(self, path: Path) -> tuple[list[Limits], int, list[str]]:
        """Compute the grey limits of an image, or load them."""
        image, work = self.sources[path], progress.partial(self.out, output_stem(path))
        cache_file = work / "limits.json"
        if cache_file.is_file():
            cached = json.loads(cache_file.read_text())
            limits = [None if pair is None else tuple(pair) for pair in cached["limits"]]
            return limits, cached["data"], cached["notes"]
        self.watch.start("finding grey levels", 1)
        options = self.reading.normalize, self.reading.clip, self._rows(image), self.watch.step
        result = find_limits(image, *options)
        work.mkdir(parents=True, exist_ok=True)
        progress.write_small(cache_file, {"limits": result[0], "data": result[1], "notes": result[2]})
        return result

    def _rows(self, image: OutOfCoreImage) -> int:
        """Return the side of the pieces that are read for the grey limits, at most a sixteenth of the memory."""
        fitting = (self.memory / 16 / (image.channels * image.dtype.itemsize)) ** 0.5
        return max(min(_ROWS, int(fitting)), 1)


def check_request(request: Request) -> None:
    """Raise OptionError for options that need a complete image in memory."""
    options = {
        "truth": bool(request.scoring.truth),
        "objects_as": request.objects is not None and bool(request.objects.kinds),
        "scene": request.reading.scene is not None,
        "crop": request.reading.crop is not None,
        "mask": bool(request.reading.mask),
        "orientation": request.reading.orientation != "stored",
        "text": request.text is not None,
        "object_classes": bool(request.object_classes),
        "stored_features": request.stored_features is not None,
        "cluster": request.cluster is not None,
    }
    for name in (name for name, present in options.items() if present):
        trained = name in ("cluster", "object_classes")
        continuation = " and use vispe apply with the model" if trained else ""
        raise OptionError(
            f"{name} is not supported for images processed in blocks. Crop a part, save it as a TIFF file, run "
            f"vispe segment on it{continuation}."
        )
