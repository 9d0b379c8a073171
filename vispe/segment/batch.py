"""A batch of images on its way to results: checks first, then image by image, each file complete or not there."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vispe.errors import InputError, OptionError, VispeError
from vispe.segment.claim import claimed
from vispe.segment.cluster import PixelClusters
from vispe.segment.companions import images_among, is_named, labels_among
from vispe.segment.disk import DiskFull, room
from vispe.segment.draw import overlay, uncertainty_image
from vispe.segment.features import FeatureConfig, Features
from vispe.segment.filters3d import Stack
from vispe.segment.headers import stored_shape
from vispe.segment.images import Micrograph, find_images, normalize, read_image
from vispe.segment.labels import Labels, read_truth
from vispe.segment.metrics import adjusted_rand, apply_mapping, match_clusters, scores
from vispe.segment.modelfile import Model, load_model, save_model, versions
from vispe.segment.outputs import check_writable, label_suffix, write_labels, write_png, write_probabilities
from vispe.segment.predict import Areas, Post, Prediction, predict_page, within_memory
from vispe.segment.report import Clock, Report, Watcher, fractions
from vispe.segment.resume import State, digest, plain, state_of
from vispe.segment.staging import staged

Paths = Sequence[str | Path]
MODEL_NAME = "model.vispe"
_OTHERS = 16  # bytes per pixel of the other files at most, roughly: labels, uncertainty, overlay


@dataclass(frozen=True)
class Reading:
    """How image files are read; see `read_image` and `normalize` in `vispe.segment.images`."""

    channel: str | None = None
    z: str | None = None
    axes: str | None = None
    normalize: str = "stack"
    clip: tuple[float, float] = (0.5, 99.5)


@dataclass(frozen=True)
class Scoring:
    """How results are compared with ground truth.

    Attributes:
        truth: files with the true classes, matched to the images by name.
        zero_is: `'class'`: pixel value 0 is the first class; `'ignore'`: 0 is left out and classes start at
            1.
        page: page that truth of one page belongs to, where the image has several.
        include_labelled: count the labelled pixels too; without it they are left out.
    """

    truth: Paths = ()
    zero_is: Literal["class", "ignore"] = "class"
    page: int | None = None
    include_labelled: bool = False


@dataclass(eq=False)
class BatchImage:
    """One input file and what belongs to it."""

    path: Path
    labels: Path | None = None
    truth: Path | None = None
    drawn: Labels | None = None


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
        found = self._find(_listed(images))
        label_files = labels_among(_listed(labels), list(found))
        truth_files = labels_among(_listed(self.scoring.truth), list(found))
        self.images = self._chosen(found, [*label_files, *truth_files])
        self._match("labels", label_files)
        self._match("truth", truth_files)
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
        labels, areas = np.stack([r.labels for r in results]), _total(results)
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
                np.bincount(labels.ravel(), minlength=len(self.model.names) + 1), areas, self.model.names
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
            record["scores"] = self._score(image, labels, truth) | self._errors(record["fractions"], truth)
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
                self._read_truth(image.truth, shape, n_classes)
            except (VispeError, OSError) as error:
                self.fail(image, error)
        if not self.images:
            raise InputError("no image is left; see the reasons above.")

    def _truth(self, image: BatchImage, micrograph: Micrograph) -> np.ndarray | None:
        if image.truth is None:
            return None
        count = None if isinstance(self.model.classifier, PixelClusters) else len(self.model.names)
        return self._read_truth(image.truth, micrograph.pages.shape[:3], count)

    def _read_truth(self, path: Path, shape: tuple[int, int, int], n_classes: int | None) -> np.ndarray:
        how = self.scoring
        return read_truth(path, shape, zero_is=how.zero_is, n_classes=n_classes, page=how.page)

    def _score(self, image: BatchImage, labels: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
        ignore = None
        if image.drawn is not None and not self.scoring.include_labelled:
            ignore = image.drawn.values > 0
        if not isinstance(self.model.classifier, PixelClusters):
            return scores(labels, truth, len(self.model.names), ignore=ignore, names=self.model.names)
        count = int(truth.max())
        mapping = match_clusters(labels, truth, count)
        found = scores(apply_mapping(labels, mapping), truth, max(count, *mapping.values()))
        found["cluster_to_class"] = {str(k): v for k, v in mapping.items()}
        found["adjusted_rand"] = adjusted_rand(labels, truth)
        return found

    def _errors(self, found: dict[str, float | None], truth: np.ndarray) -> dict[str, Any]:
        """Return the errors of the reported fractions in percentage points, over all pixels with a truth."""
        if isinstance(self.model.classifier, PixelClusters) or not (truth > 0).any():
            return {}
        true = np.bincount(truth[truth > 0], minlength=len(found) + 1)[1:] / (truth > 0).sum()
        error = {
            name: 100 * ((f or 0.0) - float(t)) for (name, f), t in zip(found.items(), true, strict=True)
        }
        mean = float(np.mean([abs(e) for e in error.values()]))
        return {"fraction_error_pp": error, "fraction_mean_abs_error_pp": mean}

    def _find(self, patterns: Sequence[str | Path]) -> dict[Path, bool]:
        """Expand the image patterns, and tell which files were named by themselves.

        In a batch, a pattern that matches nothing is a failure and not the end.
        """
        found: dict[Path, tuple[Path, bool]] = {}
        for pattern in patterns or find_images(patterns):
            try:
                for path in find_images([pattern]):
                    found.setdefault(path.resolve(), (path, is_named(pattern)))
            except InputError as error:
                if len(patterns) == 1:
                    raise
                self._failure(str(pattern), error)
        if not found:
            raise InputError("; ".join(f["reason"] for f in self.report.failures))
        return dict(found.values())

    def _chosen(self, found: dict[Path, bool], labels: Sequence[Path]) -> list[BatchImage]:
        """Set aside what is no image by its name, and say so; results in the folder of this run need no word."""
        here = self.out.resolve()
        images, aside = images_among(found, labels, lambda path: path.resolve().parent == here)
        if aside:
            listed = ", ".join(path.name for path in aside[:5]) + (" ..." if len(aside) > 5 else "")
            self.note(
                f"{len(aside)} file(s) beside the images are labels, masks or results by their names and are not "
                f"segmented: {listed}; name such a file itself to segment it."
            )
        return [BatchImage(path) for path in images]

    def _failure(self, path: str, error: BaseException) -> None:
        reason = " ".join(str(error).split())
        self.report.failures.append({"image": path, "reason": reason})
        self.watch.failed(path, reason)

    def _match(self, what: Literal["labels", "truth"], files: Sequence[Path]) -> None:
        """Give each file of labels or truth to its image, by name."""
        if len(files) == 1 and len(self.images) == 1:
            setattr(self.images[0], what, files[0])
            return
        strays = []
        for file in files:
            fitting = [i for i in self.images if belongs_to(file.stem, i.path.stem)]
            if not fitting:
                strays.append(file)
                continue
            image = max(fitting, key=lambda i: len(i.path.stem))
            if getattr(image, what) is not None:
                raise InputError(
                    f"{getattr(image, what)} and {file} are both {what} of {image.path}; give one for each image."
                )
            setattr(image, what, file)
        if strays and len(strays) == len(files):
            names = ", ".join(i.path.stem for i in self.images[:3])
            raise InputError(
                f"no {what} file belongs to an image by name: found {strays[0].name} for images such as {names}; "
                "name them alike, for example a.png and a_labels.png."
            )
        if strays:
            listed = ", ".join(s.name for s in strays[:5]) + (" ..." if len(strays) > 5 else "")
            self.note(f"{len(strays)} {what} file(s) belong to no image and are not used: {listed}.")

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


def described(features: Features, model: Model, post: Post) -> dict[str, Any]:
    """Say for the report what a run works with; JSON-able."""
    config = vars(features.config)
    return {
        "model": features.config.model or "filters",
        "features": {key: list(v) if isinstance(v, tuple) else v for key, v in config.items()},
        "classifier": model.classifier.kind,
        "classes": list(model.names),
        "normalize": model.normalize,
        "clip": list(model.clip),
        "post": {**vars(post), "prior": post.weighing(model.classifier)},
        "training": dict(model.notes),
        "seed": model.seed,
        "device": features.device,
        "versions": versions(),
    }


def _listed(patterns: Paths) -> list[str | Path]:
    return [patterns] if isinstance(patterns, str | Path) else list(patterns)


def _total(results: Sequence[Prediction]) -> Areas | None:
    """Add up the areas of all pages; None where nothing was weighed."""
    found = [r.areas for r in results if r.areas is not None]
    return sum(found[1:], found[0]) if found else None


def find_files(patterns: Paths) -> list[Path]:
    """Expand files, folders and globs of labels or truth; none given gives none."""
    patterns = [patterns] if isinstance(patterns, str | Path) else patterns
    return find_images(patterns) if patterns else []


def belongs_to(stem: str, image: str) -> bool:
    """Tell whether a file called `stem` goes with the image: the same, or followed by `_`, `-` or `.`."""
    return stem == image or (stem.startswith(image) and stem[len(image)] in "_-.")
