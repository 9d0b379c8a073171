"""A batch of images on its way to results: checks first, then image by image, each file complete or not there."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, OptionError, VispeError
from vispe.files import check_writable
from vispe.images.companions import labels_among
from vispe.images.formats.headers import stored_shape
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph, read_image
from vispe.images.write import label_suffix, write_labels, write_png, write_probabilities
from vispe.segment.classify.cluster import PixelClusters
from vispe.segment.draw import overlay, uncertainty_image
from vispe.segment.features.features import FeatureConfig, Features
from vispe.segment.features.filters3d import Stack
from vispe.segment.model.file import Model, load_model, save_model, versions
from vispe.segment.run.claim import claimed
from vispe.segment.run.disk import DiskFull, room
from vispe.segment.run.inputs import BatchImage, Paths, Reading, chosen, find_each, listed, match
from vispe.segment.run.predict import Post, Prediction, predict_page, total_areas, within_memory
from vispe.segment.run.report import Clock, Report, Watcher, described, faded, fractions
from vispe.segment.run.resume import State, digest, plain, state_of
from vispe.segment.run.scoring import Scoring, of_classes, of_clusters
from vispe.segment.run.staging import staged

MODEL_NAME = "model.vispe"
_OTHERS = 16  # bytes per pixel of the other files at most, roughly: labels, uncertainty, overlay


class Batch:
    """The state of one run: checked inputs, then model, then results."""

    features: Features
    model: Model
    state: State
    place: Path

    def __init__(
        self,
        images: Paths,
        out: str | Path,
        reading: Reading | None,
        scoring: Scoring | None,
        post: Post | None,
        force: bool,
        watch: Watcher | None,
        *,
        labels: Paths = (),
        model: bool = False,
        protect: Paths = (),
        trust: bool = False,
    ) -> None:
        self.reading, self.scoring = reading or Reading(), scoring or Scoring()
        self.post, self.force, self.watch = post or Post(), force, watch or Watcher()
        self.trust = trust
        self.out = Path(out)
        self.report = Report({})
        self._last: tuple[Path, Micrograph] | None = None
        self._pages: tuple[Micrograph, tuple[np.ndarray, list[str]]] | None = None
        found = find_each(listed(images), self._failure)
        label_files = labels_among(listed(labels), list(found))
        truth_files = labels_among(listed(self.scoring.truth), list(found))
        self.images = chosen(found, [*label_files, *truth_files], self.out, self.note)
        match(self.images, "labels", label_files, self.note)
        match(self.images, "truth", truth_files, self.note)
        self._files = [*label_files, *truth_files]
        self._inputs = [*(i.path for i in self.images), *self._files, *(Path(p) for p in protect)]
        self._writes_model = model

    def note(self, text: str) -> None:
        """Keep and announce something about the whole run, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)
            self.watch.note(text)

    @contextmanager
    def begun(self, asked: Mapping[str, Any]) -> Iterator[None]:
        """Claim the folder of the results, and go on with an unfinished run that was asked for the same.

        Args:
            asked: everything that decides the results, besides the files that the run has found.

        Raises:
            InputError: results that exist, an unfinished run of another kind, or another process at work there.
        """
        found = plain(
            {
                **asked,
                "images": {str(image.path): state_of(image.path) for image in self.images},
                "files": {str(path): state_of(path) for path in self._files},
                "versions": versions(),
            }
        )
        targets = self._targets(self._writes_model)
        self._check(targets, State(self.out, found, self.force).goes_on)
        with claimed(self.out):
            self.state = State(self.out, found, self.force)
            self._check(targets, self.state.goes_on)
            if self.state.goes_on:
                self.force = True
                self.report.notes = list(self.state.notes)
                self.watch.note(f"going on with the unfinished run in {self.out}.")
            try:
                yield
            except VispeError as error:
                if self.state.empty and not isinstance(error, DiskFull):
                    self.state.discard(self.out / MODEL_NAME)
                raise

    def _check(self, targets: Sequence[Path], goes_on: bool) -> None:
        check_writable(targets, self.force or goes_on, protect=self._inputs)

    def kept_model(self) -> Model | None:
        """Return the model of the unfinished run that goes on; None if it has none."""
        path = self.out / MODEL_NAME
        if self.state.model is None or not path.is_file() or digest(path) != self.state.model:
            return None
        return load_model(path)

    def keep_model(self) -> None:
        """Write the model file."""
        self.state.start(self._targets(True), self._inputs)
        path = self.out / MODEL_NAME
        with room(self.out, MODEL_NAME):
            save_model(path, self.model, self.force)
            self.state.trained(digest(path), self.report.notes)

    def read(self, path: Path) -> Micrograph:
        """Read an image; the last one is kept."""
        if self._last is None or self._last[0] != path:
            how, self._pages = self.reading, None
            self._last = path, read_image(path, channel=how.channel, z=how.z, axes=how.axes)
        return self._last[1]

    def fail(self, image: BatchImage, error: VispeError | OSError) -> None:
        """Leave an image out, unless it is the only one."""
        if len(self.images) + len(self.report.failures) == 1:
            raise error
        self.images.remove(image)
        self._failure(str(image.path), error)

    def predict(self, command: str, device: str, **extra: str) -> Report:
        """Segment every image, write its files, renew the report."""
        features, model = self.features, self.model
        self.report.run = {"command": command, **extra, **described(features, model, self.post)}
        self.watch.start("segmenting", len(self.images))
        self.state.start(self._targets(self._writes_model), self._inputs)
        for image in list(self.images):
            record = self.state.record(image.path)
            try:
                if record is None:
                    record = self._whole(image)
            except DiskFull:
                raise
            except (VispeError, OSError) as error:
                self.fail(image, error)
            else:
                self.report.images.append(record)
                self.watch.done(record)
            self.report.run["device"] = features.device
            with room(self.out, "report.json"):
                self.report.write(self.out)
        if not self.report.failures:
            self.state.end()
        return self.report

    def pages(self, image: Micrograph) -> tuple[np.ndarray, list[str]]:
        """Normalise an image -> (z, h, w, c) float32 in [0, 1], and notes; those of the last one are kept."""
        if self._pages is None or self._pages[0] is not image:
            self._pages = image, normalize(image, self.reading.normalize, self.reading.clip)
        return self._pages[1]

    def stack(self, image: Micrograph, pages: np.ndarray) -> Stack | None:
        """Find the volumes that the normalised pages make up, for 3D filters; None where there are none.

        Raises:
            InputError: the image is no Z stack.
        """
        config = self.features.config
        if not isinstance(config, FeatureConfig) or not config.filters_3d:
            return None
        if self.trust:
            raise OptionError(
                "trust turns one page at a time, but 3D filters look at several; leave out --trust, or train without "
                "--filters-3d."
            )
        return Stack(image, pages)

    def _whole(self, image: BatchImage) -> dict[str, Any]:
        """Segment an image; all its files are put in place, or none of them."""
        values = self.read(image.path).valid.size
        least = 4 * values * self.model.classifier.n_classes  # probabilities; the others are smaller
        with room(self.out, f"the result of {image.path.name}", least, least + _OTHERS * values):
            with staged(self.out, image.path.stem, self.force) as self.place:
                record = self._one(image)
            self.state.finished(image.path, record, self.report.notes)
        return record

    def _one(self, image: BatchImage) -> dict[str, Any]:
        clock = Clock()
        micrograph = self.read(image.path)
        truth = self._truth(image, micrograph)
        if self.model.channels not in (None, micrograph.channels):
            raise InputError(
                f"{image.path} has {micrograph.channels} channel(s), but the model was trained with "
                f"{self.model.channels}; choose channels with --channel."
            )
        pages, notes = self.pages(micrograph)
        stack = self.stack(micrograph, pages)
        notes = [*micrograph.notes, *notes, *(stack.notes if stack is not None else ())]
        results, total = [], len(pages)
        if self.trust:
            from vispe.segment.trust.run import RUNS, trust_image  # brings the evaluators along

            total += RUNS
        for number, (page, valid) in enumerate(zip(pages, micrograph.valid, strict=True)):
            results.append(
                within_memory(
                    self.features,
                    lambda p=page, v=valid, n=number: self.page(p, v, total, stack, n),
                    self.note,
                )
            )
        notes += list(dict.fromkeys(n for r in results for n in r.notes))
        labels, areas = np.stack([r.labels for r in results]), total_areas(results)
        notes += faded(areas, self.model.names)
        trust, extra = None, {}
        if self.trust:
            trust, extra = trust_image(self, image.path, micrograph, pages, results, notes, total)
        files = self._write(image, micrograph, pages, results, labels, notes) | extra
        files = {kind: str(self.out / Path(name).name) for kind, name in files.items()}
        overlap = sum(r.overlap for r in results)
        unsure = np.stack([r.uncertainty for r in results])
        seconds = clock()
        record: dict[str, Any] = {
            "image": str(image.path),
            "labels": None if image.labels is None else str(image.labels),
            "pages": micrograph.n_pages,
            "height": micrograph.shape[0],
            "width": micrograph.shape[1],
            "channels": micrograph.channels,
            "pixel_size_um": micrograph.pixel_size,
            "page_axes": dict(micrograph.page_axes),
            "z_step_um": micrograph.z_step,
            "no_data_share": float(1 - micrograph.valid.mean()),
            **fractions(
                np.bincount(labels.ravel(), minlength=len(self.model.names) + 1),
                areas,
                self.model.names,
                self.model.classifier.kind,
            ),
            "mean_uncertainty": float(np.nanmean(unsure)),
            "overlap_pixels": overlap,
            "tile_disagreement": sum(r.disagreeing for r in results) / overlap if overlap else None,
            "tile": self.features.tile,
            "seconds": round(seconds, 3),
            "seconds_per_megapixel": round(seconds / (labels.size / 1e6), 3),
            "files": files,
            "notes": notes,
        }
        for text in notes:
            self.watch.note(text)
        if trust is not None:
            record["trust"] = trust
        if truth is not None:
            record["truth"] = str(image.truth)
            if isinstance(self.model.classifier, PixelClusters):
                record["scores"] = of_clusters(labels, truth)
            else:
                drawn = (
                    None if image.drawn is None or self.scoring.include_labelled else image.drawn.values > 0
                )
                record["scores"] = of_classes(labels, truth, self.model.names, drawn, record["fractions"])
        return record

    def page(
        self, page: np.ndarray, valid: np.ndarray, count: int, stack: Stack | None = None, number: int = 0
    ) -> Prediction:
        """Segment one page (h, w, c) with pixels `valid` (h, w); it is one of `count` predictions of an image.

        3D filters want to know that it is page `number` of a stack.
        """
        features = self.features if stack is None else self.features.within(stack, number)
        return predict_page(
            page, valid, features, self.model.classifier, self.post, lambda s: self.watch.step(s / count)
        )

    def _write(
        self,
        image: BatchImage,
        micrograph: Micrograph,
        pages: np.ndarray,
        results: list[Prediction],
        labels: np.ndarray,
        notes: list[str],
    ) -> dict[str, str]:
        """Write the files of one image; the label map comes last, so it stands for a complete image."""
        stem, count = image.path.stem, len(pages)
        ending = label_suffix(count)
        files = {
            "probabilities": self.place / f"{stem}_prob.tif",
            "uncertainty": self.place / f"{stem}_uncertainty{ending}",
            "overlay": self.place / f"{stem}_overlay.png",
            "labels": self.place / f"{stem}_seg{ending}",
        }
        names, force = self.model.names, self.force
        middle = count // 2
        title = stem if count == 1 else f"{stem}, page {middle}"
        if count > 1:
            notes.append(f"the overlay of {image.path.name} shows page {middle} of {count} (counted from 0).")

        shown = results[middle].areas

        def draw() -> None:
            picture = overlay(
                pages[middle],
                labels[middle],
                names,
                self.model.colors,
                pixel_size=micrograph.pixel_size,
                title=title,
                counts=None if shown is None else np.append((labels[middle] == 0).sum(), shown.pixels),
            )
            write_png(files["overlay"], picture, force)

        with ThreadPoolExecutor(1) as beside:  # compressing takes as long as drawing
            drawing = beside.submit(draw)
            prob = results[0].prob[None] if count == 1 else np.stack([r.prob for r in results])
            write_probabilities(files["probabilities"], prob, micrograph, names, force)
            unsure = np.stack([uncertainty_image(r.uncertainty) for r in results])
            write_labels(files["uncertainty"], unsure, micrograph, force)
            drawing.result()
        write_labels(files["labels"], labels, micrograph, force)
        return {key: str(path) for key, path in files.items()}

    def check_truth(self, n_classes: int | None) -> None:
        """Read every ground truth once, before any work; an image whose truth cannot be used is left out.

        Args:
            n_classes: K; None where clusters are matched to the classes of the truth.

        Raises:
            InputError: the truth of the only image, or of all images, cannot be used.
        """
        for image in list(self.images):
            if image.truth is None:
                continue
            shape = stored_shape(image.path, self.reading.z, self.reading.axes)
            if shape is None:
                continue
            try:
                self.scoring.read(image.truth, shape, n_classes)
            except (VispeError, OSError) as error:
                self.fail(image, error)
        if not self.images:
            raise InputError("no image is left; see the reasons above.")

    def _truth(self, image: BatchImage, micrograph: Micrograph) -> np.ndarray | None:
        if image.truth is None:
            return None
        count = None if isinstance(self.model.classifier, PixelClusters) else len(self.model.names)
        return self.scoring.read(image.truth, micrograph.pages.shape[:3], count)

    def _failure(self, path: str, error: BaseException) -> None:
        reason = " ".join(str(error).split())
        self.report.failures.append({"image": path, "reason": reason})
        self.watch.failed(path, reason)

    def _targets(self, model: bool) -> list[Path]:
        """List every file that this run may write."""
        endings = (
            "_seg.png",
            "_seg.tif",
            "_prob.tif",
            "_uncertainty.png",
            "_uncertainty.tif",
            "_overlay.png",
            *(("_trust.png", "_disagreement.png") if self.trust else ()),
        )
        names = [f"{image.path.stem}{ending}" for image in self.images for ending in endings]
        names += ["report.json", "report.csv", *([MODEL_NAME] if model else [])]
        return [self.out / name for name in names]
