"""Run on image files: all inputs are checked first, then each image is segmented; files are complete or absent."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, VispeError
from vispe.images.labels.label_files import read_label_set
from vispe.images.read import Micrograph
from vispe.images.sidecars import find_label_files
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.features.pixel_features import Features
from vispe.segment.invariance_report.image_report import RUNS, TrustFiles, trust_image
from vispe.segment.materials.image_record import TABLE, measure_image
from vispe.segment.model.model_file import Model
from vispe.segment.model.prediction import Segmenter, total_areas
from vispe.segment.model.uncertainty import mean_uncertainty
from vispe.segment.objects.object_files import file_suffixes, write_image_objects
from vispe.segment.run.image_pipeline import Grey, Reader, predict, write
from vispe.segment.run.inputs import (
    BatchImage,
    as_list,
    check_channels,
    common_channel_count,
    example_files,
    expand_patterns,
    infer_axes,
    is_table,
    match,
    match_masks,
    select_images,
)
from vispe.segment.run.out_of_distribution import MAP, compare_with_training
from vispe.segment.run.pages import TrainingLabels
from vispe.segment.run.reports.image_record import (
    Clock,
    fractions,
    image_record,
    timing,
    vanishing_class_notes,
)
from vispe.segment.run.request import Request
from vispe.segment.run.results_folder.staging import staged_files
from vispe.segment.run.run_state import Run
from vispe.segment.run.scoring import GroundTruth
from vispe.segment.types import Prediction

_OTHER_BYTES = 16  # approximate upper bound of bytes per pixel of labels, uncertainty and overlay
_SUFFIXES = (
    "_seg.png",
    "_seg.tif",
    "_prob.tif",
    "_uncertainty.png",
    "_uncertainty.tif",
    "_overlay.png",
    MAP,
)


class Batch(Run):
    """State of a run on image files: its images and their results so far.

    Args:
        request: the validated arguments.

    Attributes:
        examples: files with examples of object classes.
        truth: ground truth of the images.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        image_files = expand_patterns(as_list(request.images), self.skip)
        label_files = find_label_files(as_list(request.labels), list(image_files))
        truth_files = find_label_files(as_list(request.scoring.truth), list(image_files))
        masks = find_label_files(as_list(request.reading.mask), list(image_files))
        self.examples = example_files(request.object_classes, image_files)
        self._files = [*label_files, *truth_files, *masks, *self.examples]
        self.images = select_images(image_files, self._files, self.out, self.note)
        match(self.images, "labels", label_files, self.note)
        match(self.images, "truth", truth_files, self.note)
        match_masks(self.images, masks, self.note)
        if self.examples and not is_table(self.examples[0]):
            match(self.images, "object_classes", self.examples, self.note)
        infer_axes(self.images, self.reading, self.note)
        self.reader = Reader(request.reading, self.images)
        self.truth = GroundTruth(request.scoring, request.reading, self.note)

    def read(self, path: Path) -> Micrograph:
        """Read an image; the last one is cached."""
        return self.reader.read(path)

    def pages(self, image: BatchImage, features: Features | None) -> Grey:
        """Read and normalise an image, with its volumes if `features` need them; the last one is cached."""
        config = None if features is None else features.config
        return self.reader.grey(image.path, config, self.request.trust)

    def each(self, images: Sequence[BatchImage]) -> Iterator[tuple[BatchImage, Micrograph]]:
        """Yield images one by one; unreadable ones are skipped."""
        for image in list(images):
            try:
                micrograph = self.read(image.path)
            except (VispeError, OSError) as error:
                self.fail(image, error)
            else:
                yield image, micrograph
                self.watch.step(1)

    def training_labels(self) -> TrainingLabels:
        """Read the labels of all images, with a common class numbering.

        Raises:
            InputError: no labelled image could be read, or the channels differ.
        """
        labelled = [image for image in self.images if image.labels is not None]
        self.watch.start("reading labels", len(labelled))
        images, shapes, frames, channels = [], [], [], {}
        for image, micrograph in self.each(labelled):
            images.append(image)
            shapes.append(micrograph.pages.shape[:3])
            frames.append(micrograph.frame)
            channels[image.path] = micrograph.channels
        if not images:
            raise InputError("no labelled image could be read. See the errors above.")
        count = common_channel_count(channels, "labelled images")
        options = {"images": [image.path for image in images], "frames": frames}
        labels = read_label_set(
            [image.labels for image in images], shapes, **asdict(self.request.labelling), **options
        )
        for image, labels_of_image in zip(images, labels, strict=True):
            image.label_data = labels_of_image
            for text in labels_of_image.notes:
                self.note(text)
        indices = [np.flatnonzero(each.values) for each in labels]
        classes = [each.values.ravel()[index] for each, index in zip(labels, indices, strict=True)]
        return TrainingLabels(images, indices, classes, labels[0].names, labels[0].colors, count)

    def _bytes(self, image: BatchImage, model: Model) -> tuple[int, int]:
        values = self.read(image.path).valid.size
        least = 4 * values * model.classifier.n_classes  # float32 probabilities, the largest file
        return least, least + _OTHER_BYTES * values

    def _segment(self, image: BatchImage, by: Segmenter) -> dict[str, Any]:
        """Segment an image; either all of its files are written, or none."""
        with staged_files(self.out, image.path.stem, self.force) as folder:
            return self._segment_into(image, by, folder)

    def _segment_into(self, image: BatchImage, by: Segmenter, folder: Path) -> dict[str, Any]:
        """Segment one image, write its files into `folder`, and return its record."""
        clock, model, path = Clock(), by.model, image.path
        micrograph = self.read(path)
        names = None if isinstance(model.classifier, PixelClusters) else model.names
        truth = self.truth.read(image, micrograph, names)
        check_channels(path, micrograph.channels, model)
        grey = self.pages(image, by.features)
        total = len(grey.pages) + RUNS * self.request.trust

        def step(fraction: float) -> None:
            self.watch.step(fraction / total)

        results = predict(grey, by, step, self.note)
        areas = total_areas(results)
        trust = self._trust(grey, results, by, folder / path.stem, step) if self.request.trust else None
        tables, materials, material_notes = self._materials(micrograph, results, model.names, folder)
        files, file_notes = write(folder, path, grey, results, model, self.force)
        object_files, objects, object_notes = self._objects(grey, results, model, folder)
        domain, domain_files, domain_notes = compare_with_training(
            folder, micrograph, results, model, self.force
        )
        files |= {} if trust is None else trust.files
        files |= tables | object_files | domain_files
        notes = [
            *grey.notes,
            *dict.fromkeys(n for r in results for n in r.notes),
            *vanishing_class_notes(areas, model.names),
            *(() if trust is None else trust.notes),
            *(*material_notes, *file_notes, *object_notes, *domain_notes),
        ]
        for text in notes:
            self.watch.note(text)
        counts = sum(np.bincount(r.labels.ravel(), minlength=len(model.names) + 1) for r in results)
        record = {
            **image_record(
                micrograph,
                image.labels,
                fractions(counts, areas, model.names, model.classifier.kind),
                no_data=float(1 - micrograph.valid.mean()),
                uncertainty=mean_uncertainty(results),
                overlap=sum(r.overlap for r in results),
                disagreeing=sum(r.disagreeing for r in results),
            ),
            "tile": by.features.tile,
            **timing(clock(), micrograph.valid.size),
            "files": {kind: str(self.out / file.name) for kind, file in files.items()},
            "notes": notes,
            "domain": domain,
        }
        optional = {"objects": objects, "materials": materials, "trust": trust and trust.record}
        record |= {name: entry for name, entry in optional.items() if entry is not None}
        if truth is not None:
            labels = np.stack([r.labels for r in results])
            record |= self.truth.score(image, truth, labels, names, record["fractions"])
        return record

    def _trust(
        self,
        grey: Grey,
        results: Sequence[Prediction],
        by: Segmenter,
        target: Path,
        step: Callable[[float], None],
    ) -> TrustFiles:
        """Measure the dependence of the middle page on the pose."""
        middle = len(results) // 2
        page = grey.image, middle, grey.page(middle), results[middle]
        return trust_image(*page, by, target, step=step, note=self.note, force=self.force)

    def _materials(
        self, image: Micrograph, results: Sequence[Prediction], names: Sequence[str], folder: Path
    ) -> tuple[dict[str, Path], dict[str, Any] | None, list[str]]:
        """Return the table file by kind, the record of the measures, None if not requested, and notes."""
        if not self.request.materials:
            return {}, None, []
        table, maps = folder / f"{image.path.stem}{TABLE}", [r.labels for r in results]
        record, notes = measure_image(image.path.name, maps, names, image.pixel_size, table, self.force)
        return {"materials": table}, record, notes

    def _objects(
        self, grey: Grey, results: Sequence[Prediction], model: Model, folder: Path
    ) -> tuple[dict[str, Path], dict[str, Any] | None, list[str]]:
        """Return the files of the objects by kind, their record, None if not requested, and notes."""
        if self.request.objects is None:
            return {}, None, []
        shown = grey.image, grey.pages, results, model.names, model.colors
        return write_image_objects(folder, *shown, self.request.objects, self.force, model.objects)

    def check_truth(self, names: Sequence[str] | None) -> None:
        """Read every ground truth once before any work; see `GroundTruth.check`."""
        self.truth.check(self.images, names, self.fail)
        if not self.images:
            raise InputError("all images failed. See the errors above.")

    def _image_targets(self, image: BatchImage) -> list[Path]:
        suffixes = (*_SUFFIXES, *(("_trust.png", "_disagreement.png") if self.request.trust else ()))
        suffixes += file_suffixes(self.request.objects)
        suffixes += (TABLE,) if self.request.materials else ()
        return [self.out / f"{image.path.stem}{suffix}" for suffix in suffixes]
