"""Life cycle of a run, on images in memory and on stores: lock, journal, model, records and report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vispe.errors import VispeError
from vispe.images.write import write_png
from vispe.segment.classify import cluster_count_figure
from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.features.pixel_features import Features
from vispe.segment.model.model_file import Model, load_model, save_model
from vispe.segment.model.prediction import Segmenter
from vispe.segment.objects.object_files import COMBINED, write_combined
from vispe.segment.run.inputs import BatchImage, as_list
from vispe.segment.run.pages import Pages, TrainingLabels
from vispe.segment.run.reports.run_report import Report, run_settings
from vispe.segment.run.request import Request
from vispe.segment.run.results_folder.disk_space import DiskFull, disk_space_guard
from vispe.segment.run.results_folder.lock import lock_folder
from vispe.segment.run.results_folder.resume import Journal, digest, fingerprint_files, to_json
from vispe.utils.files import check_writable
from vispe.utils.version import versions

MODEL_NAME = "model.vispe"


class Run:
    """One run, from checked inputs to results; subclasses read the images and write their results.

    Args:
        request: the validated arguments.

    Attributes:
        images: the images that can be used so far.
    """

    state: Journal

    def __init__(self, request: Request) -> None:
        self.request, self.out = request, Path(request.out)
        self.reading, self.post = request.reading, request.post
        self.force, self.watch = request.force, request.watch
        self.report = Report({})
        self.writes_model = request.command == "segment"
        self.images: list[BatchImage] = []
        self._files: list[Path] = []  # labels, ground truth and masks
        self._figure: Path | None = None

    def pages(self, image: BatchImage, features: Features | None) -> Pages:
        """Return the normalised pages of an image; `features` determine whether volumes are needed."""
        raise NotImplementedError

    def training_labels(self) -> TrainingLabels:
        """Read the labels of all images."""
        raise NotImplementedError

    def _segment(self, image: BatchImage, by: Segmenter) -> dict[str, Any]:
        """Segment an image, write its files, and return its record."""
        raise NotImplementedError

    def _image_targets(self, image: BatchImage) -> list[Path]:
        """List every file or store that the run may write for an image."""
        raise NotImplementedError

    def _bytes(self, image: BatchImage, model: Model) -> tuple[int, int]:
        """Return bounds of the size of an image's files, (0, 0) if unknown."""
        raise NotImplementedError

    def check_features(self, config: object) -> None:
        """Raise InputError for features that cannot be computed for the images."""

    def check_truth(self, names: Sequence[str] | None) -> None:
        """Read every ground truth once before any work."""

    @contextmanager
    def locked_results(self) -> Iterator[None]:
        """Lock the results folder, and resume an unfinished run with the same arguments.

        Raises:
            InputError: existing results, an unfinished run with other arguments, or a folder locked by another process.
        """
        arguments = to_json(
            {
                **self.request.decisive(),
                "images": {str(image.path): fingerprint_files(image.path) for image in self.images},
                "files": {str(path): fingerprint_files(path) for path in self._files},
                "versions": versions(),
            }
        )
        targets = self._targets()
        self._check(targets, Journal(self.out, arguments, self.force, self._partial_results()).resumes)
        with lock_folder(self.out):
            self.state = Journal(self.out, arguments, self.force, self._partial_results())
            self._check(targets, self.state.resumes)
            self._prepare_folder(targets)
            if remaining := self.state.remaining(targets):
                shown = ", ".join(remaining[:5]) + (f" and {len(remaining) - 5} more" * (len(remaining) > 5))
                self.note(
                    f"{self.out} contains results of an earlier unfinished run: {shown}. They are not replaced."
                )
            if self.state.resumes:
                self.force = True
                self.report.notes = list(self.state.notes)
                self.watch.note(f"resuming the unfinished run in {self.out}.")
            try:
                yield
            except VispeError as error:
                if self.state.empty and not isinstance(error, DiskFull):
                    self._discard()
                raise

    def _check(self, targets: Sequence[Path], resumes: bool) -> None:
        inputs = [*(image.path for image in self.images), *self._files]
        inputs += [Path(self.request.model)] if self.request.model is not None else []
        check_writable(targets, self.force or resumes, protect=inputs)

    def _partial_results(self) -> bool:
        """Return whether the folder contains parts of a result that can be resumed."""
        return False

    def _prepare_folder(self, targets: Sequence[Path]) -> None:
        """Remove partial results that are not resumed."""

    def _remove_partial(self, image: BatchImage) -> None:
        """Remove the partial result of a finished image."""

    def _discard(self) -> None:
        """Remove the files of a run without results."""
        self.state.discard(self.out / MODEL_NAME)
        if self._figure is not None:
            self._figure.unlink(missing_ok=True)

    def _targets(self) -> list[Path]:
        """List every file or store that this run may write."""
        targets = [target for image in self.images for target in self._image_targets(image)]
        names = [COMBINED] if self.request.objects is not None else []
        names += ["report.json", "report.csv", "report.html", *([MODEL_NAME] if self.writes_model else [])]
        names += [cluster_count_figure.NAME] if self.writes_model and self.request.cluster == "auto" else []
        return targets + [self.out / name for name in names]

    def resumed_model(self) -> Model | None:
        """Return the model of the resumed run; None without one."""
        path = self.out / MODEL_NAME
        if self.state.model is None or not path.is_file() or digest(path) != self.state.model:
            return None
        return load_model(path)

    def write_model(self, model: Model) -> None:
        """Write the model file, and the figure of the chosen number of clusters."""
        self.state.start(self._targets())
        path = self.out / MODEL_NAME
        with disk_space_guard(self.out, MODEL_NAME):
            save_model(path, model, self.force)
            choice = model.classifier.choice if isinstance(model.classifier, PixelClusters) else None
            if choice is not None:
                self._figure = write_png(
                    self.out / cluster_count_figure.NAME, cluster_count_figure.plot_choice(choice), self.force
                )
            self.state.trained(digest(path), self.report.notes)

    def fail(self, image: BatchImage, error: VispeError | OSError) -> None:
        """Skip an image after an error; re-raise if it is the only one."""
        if len(self.images) + len(self.report.failures) == 1:
            raise error
        self.images.remove(image)
        self.skip(image.path, error)

    def predict(self, by: Segmenter) -> Report:
        """Segment every image, write its files, and update the report."""
        if self.request.objects is not None:
            self.request.objects.numbers(by.model.names)
        self.describe(by.features, by.model)
        self.watch.start("segmenting", len(self.images))
        self.state.start(self._targets())
        for image in list(self.images):
            record = self.state.record(image.path)
            try:
                if record is None:
                    with disk_space_guard(
                        self.out, f"the result of {image.path.name}", *self._bytes(image, by.model)
                    ):
                        record = self._segment(image, by)
                        self.state.finished(image.path, record, self.report.notes)
                    self._remove_partial(image)
            except DiskFull:
                raise
            except (VispeError, OSError) as error:
                self.fail(image, error)
            else:
                self.report.images.append(record)
                self.watch.done(record)
            self.report.run["device"] = by.features.device
            with disk_space_guard(self.out, "report.json"):
                self.report.write(self.out)
                if self.request.objects is not None:
                    write_combined(self.out, [r["files"]["objects_table"] for r in self.report.images])
        with disk_space_guard(self.out, "report.html"):
            self.report.finish(self.out)
        if not self.report.failures:
            self.state.end()
        return self.report

    def note(self, text: str) -> None:
        """Record and announce a note about the run, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)
            self.watch.note(text)

    def skip(self, path: str | Path, error: BaseException) -> None:
        """Record and announce an image that cannot be used."""
        reason = " ".join(str(error).split())
        self.report.failures.append({"image": str(path), "reason": reason})
        self.watch.failed(str(path), reason)

    def describe(self, features: Features, model: Model, **more: Any) -> None:
        """Write the settings of the run into the report."""
        file = {"model_file": str(self.request.model)} if self.request.model is not None else {}
        described_run = run_settings(features, model, self.post)
        if self.request.command == "apply" and model.domain is None and model.classifier.kind != "text":
            self.note(
                f"{self.request.model} contains no summary of its training images (older vispe version, or images too "
                "small), so out-of-distribution images are not detected. Train it again to enable the check."
            )
        reading = self.request.reading
        reading_record = {
            "orientation": reading.orientation,
            "crop": reading.crop,
            "mask": [str(path) for path in as_list(reading.mask)],
        }
        self.report.run = {
            "command": self.request.command,
            **file,
            **described_run,
            "reading": reading_record,
            **more,
        }
