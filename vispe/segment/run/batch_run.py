"""A run on image files: checks first, then image by image, each file complete or not there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, VispeError
from vispe.files import check_writable
from vispe.images.formats.headers import stored_shape, stored_tag
from vispe.images.orientation import Frame
from vispe.images.read import Micrograph
from vispe.images.sidecars import labels_among
from vispe.images.write import write_png
from vispe.segment.classify import cluster_count_figure
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.features.pixel_features import Features
from vispe.segment.invariance_report.image_report import RUNS, trust_image
from vispe.segment.materials.image_record import TABLE, measure_image
from vispe.segment.model.model_file import Model, load_model, save_model, versions
from vispe.segment.objects.object_files import TOGETHER, endings, objects_of, write_together
from vispe.segment.run.disk_space import DiskFull, room
from vispe.segment.run.image_pipeline import Grey, Reader, predict, write
from vispe.segment.run.inputs import BatchImage, chosen, find_each, listed, match, match_masks, settle_axes
from vispe.segment.run.lock import claimed
from vispe.segment.run.out_of_distribution import MAP, judged, warned, write_map
from vispe.segment.run.prediction import Prediction, Segmenter, total_areas
from vispe.segment.run.request import Request
from vispe.segment.run.resume import State, digest, plain, state_of
from vispe.segment.run.run_report import Clock, Report, faded, fractions, record_of, timed
from vispe.segment.run.run_state import MODEL_NAME, Run, check_channels
from vispe.segment.run.scoring import of_classes, of_clusters
from vispe.segment.run.staging import staged

__all__ = ["MODEL_NAME", "Batch"]

_OTHERS = 16  # bytes per pixel of the other files at most, roughly: labels, uncertainty, overlay
_ENDINGS = (
    "_seg.png",
    "_seg.tif",
    "_prob.tif",
    "_uncertainty.png",
    "_uncertainty.tif",
    "_overlay.png",
    MAP,
)


class Batch(Run):
    """The state of a run on image files: which images there are, and what of them is done.

    Args:
        asked: what it is asked to do.
    """

    state: State

    def __init__(self, asked: Request) -> None:
        super().__init__(asked)
        self._chart = None
        found = find_each(listed(asked.images), self.left_out)
        label_files = labels_among(listed(asked.labels), list(found))
        truth_files = labels_among(listed(asked.scoring.truth), list(found))
        masks = labels_among(listed(asked.reading.mask), list(found))
        self._files = [*label_files, *truth_files, *masks]
        self.images = chosen(found, self._files, self.out, self.note)
        match(self.images, "labels", label_files, self.note)
        match(self.images, "truth", truth_files, self.note)
        match_masks(self.images, masks, self.note)
        settle_axes(self.images, self.reading, self.note)
        self.reader = Reader(asked.reading, self.images)
        self._inputs = [*(i.path for i in self.images), *self._files]
        self._inputs += [Path(asked.model)] if asked.model is not None else []

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Claim the folder of the results, and go on with an unfinished run that was asked for the same.

        Raises:
            InputError: results that exist, an unfinished run of another kind, or another process at work there.
        """
        asked = plain(
            {
                **self.asked.decisive(),
                "images": {str(image.path): state_of(image.path) for image in self.images},
                "files": {str(path): state_of(path) for path in self._files},
                "versions": versions(),
            }
        )
        targets = self._targets()
        self._check(targets, State(self.out, asked, self.force).goes_on)
        with claimed(self.out):
            self.state = State(self.out, asked, self.force)
            self._check(targets, self.state.goes_on)
            if remaining := self.state.remaining(targets):
                shown = ", ".join(remaining[:5]) + (f" and {len(remaining) - 5} more" * (len(remaining) > 5))
                self.note(
                    f"{self.out} holds results of an earlier unfinished run: {shown}; they are not replaced."
                )
            if self.state.goes_on:
                self.force = True
                self.report.notes = list(self.state.notes)
                self.watch.note(f"going on with the unfinished run in {self.out}.")
            try:
                yield
            except VispeError as error:
                if self.state.empty and not isinstance(error, DiskFull):
                    self.state.discard(self.out / MODEL_NAME)
                    if self._chart is not None:
                        self._chart.unlink(missing_ok=True)
                raise

    def _check(self, targets: Sequence[Path], goes_on: bool) -> None:
        check_writable(targets, self.force or goes_on, protect=self._inputs)

    def kept_model(self) -> Model | None:
        """Return the model of the unfinished run that goes on; None if it has none."""
        path = self.out / MODEL_NAME
        if self.state.model is None or not path.is_file() or digest(path) != self.state.model:
            return None
        return load_model(path)

    def keep_model(self, model: Model) -> None:
        """Write the model file."""
        self.state.start(self._targets())
        path = self.out / MODEL_NAME
        with room(self.out, MODEL_NAME):
            save_model(path, model, self.force)
            choice = model.classifier.choice if isinstance(model.classifier, PixelClusters) else None
            if choice is not None:
                self._chart = write_png(
                    self.out / cluster_count_figure.NAME, cluster_count_figure.draw_choice(choice), self.force
                )
            self.state.trained(digest(path), self.report.notes)

    def read(self, path: Path) -> Micrograph:
        """Read an image; the last one is kept."""
        return self.reader.read(path)

    def grey(self, path: Path, features: Features | None = None) -> Grey:
        """Read and normalise an image, with its volumes where `features` look at them; the last one is kept."""
        config = None if features is None else features.config
        return self.reader.grey(path, config, self.asked.trust)

    def fail(self, image: BatchImage, error: VispeError | OSError) -> None:
        """Leave an image out, unless it is the only one."""
        if len(self.images) + len(self.report.failures) == 1:
            raise error
        self.images.remove(image)
        self.left_out(image.path, error)

    def each(self, images: Sequence[BatchImage]) -> Iterator[tuple[BatchImage, Micrograph]]:
        """Read images one after the other; those that cannot be read are left out."""
        for image in list(images):
            try:
                micrograph = self.read(image.path)
            except (VispeError, OSError) as error:
                self.fail(image, error)
            else:
                yield image, micrograph
                self.watch.step(1)

    def predict(self, by: Segmenter) -> Report:
        """Segment every image, write its files, renew the report."""
        if self.asked.objects is not None:
            self.asked.objects.numbers(by.model.names)
        self.describe(by.features, by.model)
        self.watch.start("segmenting", len(self.images))
        self.state.start(self._targets())
        for image in list(self.images):
            record = self.state.record(image.path)
            try:
                if record is None:
                    record = self._whole(image, by)
            except DiskFull:
                raise
            except (VispeError, OSError) as error:
                self.fail(image, error)
            else:
                self.report.images.append(record)
                self.watch.done(record)
            self.report.run["device"] = by.features.device
            with room(self.out, "report.json"):
                self.report.write(self.out)
                if self.asked.objects is not None:
                    write_together(self.out, [r["files"]["objects_table"] for r in self.report.images])
        with room(self.out, "report.html"):
            self.report.finish(self.out)
        if not self.report.failures:
            self.state.end()
        return self.report

    def _whole(self, image: BatchImage, by: Segmenter) -> dict[str, Any]:
        """Segment an image; all its files are put in place, or none of them."""
        values = self.read(image.path).valid.size
        least = 4 * values * by.model.classifier.n_classes  # probabilities; the others are smaller
        with room(self.out, f"the result of {image.path.name}", least, least + _OTHERS * values):
            with staged(self.out, image.path.stem, self.force) as folder:
                record = self._one(image, by, folder)
            self.state.finished(image.path, record, self.report.notes)
        return record

    def _one(self, image: BatchImage, by: Segmenter, folder: Path) -> dict[str, Any]:
        """Take an image from its file to the files of its result, and return its record."""
        clock, model, path = Clock(), by.model, image.path
        micrograph = self.read(path)
        truth = self._truth(image, micrograph, model)
        check_channels(path, micrograph.channels, model)
        grey = self.grey(path, by.features)
        total = len(grey.pages) + RUNS * self.asked.trust

        def step(share: float) -> None:
            self.watch.step(share / total)

        results = predict(grey, by, step, self.note)
        areas = total_areas(results)
        notes = [*grey.notes, *dict.fromkeys(n for r in results for n in r.notes), *faded(areas, model.names)]
        trust = None
        if self.asked.trust:
            trust = trust_image(path, grey, results, by, folder, step=step, note=self.note, force=self.force)
            notes += trust.notes
        numbers, tables = None, {}
        if self.asked.materials:
            maps, size = [r.labels for r in results], micrograph.pixel_size
            numbers, tables["materials"], more = measure_image(
                path, maps, model.names, size, folder, self.force
            )
            notes += more
        files, more = write(folder, path, grey, results, model, self.force)
        files |= trust.files if trust is not None else {}
        files |= tables
        notes += more
        objects = None
        if self.asked.objects is not None:
            asked, shown = self.asked.objects, (model.names, model.colors)
            found = objects_of(folder, micrograph, grey.pages, results, *shown, asked, self.force)
            objects = found[1]
            files, notes = files | found[0], notes + found[2]
        domain = judged(model, [None if r.seen is None else r.seen.sums() for r in results])
        if domain is not None and domain["differs"]:
            files["domain"] = write_map(
                folder, path, micrograph, [r.seen for r in results], domain, self.force
            )
            notes += warned(path.name, domain, files["domain"].name)
        counts = sum(np.bincount(r.labels.ravel(), minlength=len(model.names) + 1) for r in results)
        record = {
            **record_of(
                micrograph,
                image.labels,
                fractions(counts, areas, model.names, model.classifier.kind),
                no_data=float(1 - micrograph.valid.mean()),
                uncertainty=float(np.nanmean([r.uncertainty for r in results])),
                overlap=sum(r.overlap for r in results),
                disagreeing=sum(r.disagreeing for r in results),
            ),
            "tile": by.features.tile,
            **timed(clock(), micrograph.valid.size),
            "files": {kind: str(self.out / file.name) for kind, file in files.items()},
            "notes": notes,
            "domain": domain,
        }
        for text in notes:
            self.watch.note(text)
        if objects is not None:
            record["objects"] = objects
        if numbers is not None:
            record["materials"] = numbers
        if trust is not None:
            record["trust"] = trust.record
        if truth is not None:
            record |= self._scored(image, truth, results, model, record["fractions"])
        return record

    def _scored(
        self,
        image: BatchImage,
        truth: np.ndarray,
        results: Sequence[Prediction],
        model: Model,
        shares: dict[str, float | None],
    ) -> dict[str, Any]:
        labels = np.stack([r.labels for r in results])
        if isinstance(model.classifier, PixelClusters):
            return {"truth": str(image.truth), "scores": of_clusters(labels, truth)}
        drawn = None
        if image.drawn is not None and not self.asked.scoring.include_labelled:
            drawn = image.drawn.values > 0
        return {"truth": str(image.truth), "scores": of_classes(labels, truth, model.names, drawn, shares)}

    def check_truth(self, names: Sequence[str] | None) -> None:
        """Read every ground truth once, before any work; an image whose truth cannot be used is left out.

        Args:
            names: of the classes; None where clusters are matched to the classes of the truth.

        Raises:
            InputError: the truth of the only image, or of all images, cannot be used.
        """
        for image in list(self.images):
            if image.truth is None:
                continue
            how = self.reading
            shape = stored_shape(image.path, how.z, image.axes or how.axes, how.orientation)
            if shape is None:
                continue
            try:
                frame = Frame(stored_tag(image.path), how.orientation == "tag")
                self.asked.scoring.read(image.truth, shape, names, image.path, self.note, frame)
            except (VispeError, OSError) as error:
                self.fail(image, error)
        if not self.images:
            raise InputError("no image is left; see the reasons above.")

    def _truth(self, image: BatchImage, micrograph: Micrograph, model: Model) -> np.ndarray | None:
        if image.truth is None:
            return None
        names = None if isinstance(model.classifier, PixelClusters) else model.names
        found = self.asked.scoring.read(
            image.truth, micrograph.pages.shape[:3], names, image.path, frame=micrograph.frame
        )
        return np.where(micrograph.valid, found, 0)

    def _targets(self) -> list[Path]:
        """List every file that this run may write."""
        ends = (*_ENDINGS, *(("_trust.png", "_disagreement.png") if self.asked.trust else ()))
        ends += endings(self.asked.objects)
        ends += (TABLE,) if self.asked.materials else ()
        names = [f"{image.path.stem}{end}" for image in self.images for end in ends]
        names += [TOGETHER] if self.asked.objects is not None else []
        names += ["report.json", "report.csv", "report.html", *([MODEL_NAME] if self.writes_model else [])]
        names += [cluster_count_figure.NAME] if self.writes_model and self.asked.cluster == "auto" else []
        return [self.out / name for name in names]
