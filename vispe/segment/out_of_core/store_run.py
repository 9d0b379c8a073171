"""Out-of-core run: checks of the inputs, model, results, and resuming."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vispe.errors import InputError, OptionError, VispeError, require
from vispe.files import check_writable, remove
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.model.model_file import Model, save_model, versions
from vispe.segment.objects.object_files import COMBINED, ENDINGS, write_combined
from vispe.segment.out_of_core import output_stem, progress, zarr_store
from vispe.segment.out_of_core.block_engine import engine, file_digest, open_features, prepare_page, run_block
from vispe.segment.out_of_core.finalize import area_of_page, finalize_block
from vispe.segment.out_of_core.image_source import OutOfCoreImage, open_image
from vispe.segment.out_of_core.intensity_limits import Limits, find_limits
from vispe.segment.out_of_core.job import Job
from vispe.segment.out_of_core.lazy_page import PageWindow
from vispe.segment.out_of_core.memory_plan import DEFAULT, MemoryPlan, make_plan, parse_memory
from vispe.segment.out_of_core.scribbles import match_store_labels
from vispe.segment.out_of_core.summary import draw, objects_of_store, summary
from vispe.segment.run.disk_space import DiskFull, disk_space_guard
from vispe.segment.run.inputs import ReadOptions
from vispe.segment.run.lock import lock_folder
from vispe.segment.run.out_of_distribution import ood_record, ood_warning
from vispe.segment.run.prediction import Areas
from vispe.segment.run.request import Request
from vispe.segment.run.resume import fingerprint_files
from vispe.segment.run.run_report import Clock, Report, timing, vanishing_class_notes
from vispe.segment.run.run_state import MODEL_NAME, Run, check_channels

Bounds = tuple[int, int, int, int]
_ROWS = 1024  # side of the pieces that are read for the grey limits


class OutOfCoreRun(Run):
    """State of an out-of-core run: the opened images and their results so far.

    Args:
        request: the validated arguments.
        images: Zarr stores, or TIFF files.
        labels: files and stores of labels.

    Attributes:
        labels_of: the label file of each labelled image.
        model_file: model used for the segmentation, once it exists.

    Raises:
        OptionError: options that need a complete page.
        InputError: unreadable or duplicate images.
    """

    def __init__(self, request: Request, images: Sequence[Path], labels: Sequence[Path] = ()) -> None:
        super().__init__(request)
        self.memory = parse_memory(request.memory or DEFAULT)
        self.model_file = self.out / MODEL_NAME if self.writes_model else Path(request.model)
        self._records: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._fresh = self._wrote_model = False
        if self.post.min_area > 1:
            raise OptionError(
                f"min_area={self.post.min_area} is not supported for out-of-core images, whose connected components "
                "may exceed the memory. Omit it, or use smooth."
            )
        if self.post.clean:
            raise OptionError(
                "clean is not supported for out-of-core images: the guided filter needs a complete page. Omit it, or "
                "use smooth."
            )
        if request.scheduler is not None:
            require("distributed", "big", "a dask scheduler")
        self.images: dict[Path, OutOfCoreImage] = {}
        for path in images:
            try:
                reading = self.reading
                self.images[path] = open_image(path, channel=reading.channel, z=reading.z, axes=reading.axes)
            except (VispeError, OSError) as error:
                self.fail(path, error, len(images))
        stems = [output_stem(path) for path in self.images]
        if len(set(stems)) < len(stems):
            duplicate = next(s for s in stems if stems.count(s) > 1)
            raise InputError(f"two images are named {duplicate}. Rename one or use separate folders.")
        self.labels_of = match_store_labels(labels, list(self.images), self.note) if labels else {}

    @contextmanager
    def locked_results(self) -> Iterator[None]:
        """Lock the results folder; a new run that fails before its first result is removed."""
        with lock_folder(self.out):
            try:
                yield
            except VispeError as error:
                if self._fresh and not isinstance(error, DiskFull) and not self.report.images:
                    self._discard()
                raise

    def _discard(self) -> None:
        """Remove the files of a run without a finished block."""
        works = [progress.partial(self.out, output_stem(path)) for path in self.images]
        if any(next((work / "done").glob("*.json"), None) for work in works):
            return
        for work in works:
            remove(work, self.out)
        progress.delete_journal(self.out)
        if self._wrote_model:
            self.model_file.unlink(missing_ok=True)

    def write_model(self, model: Model, force: bool) -> None:
        """Write the model file and its checksum."""
        with disk_space_guard(self.out, MODEL_NAME):
            save_model(self.model_file, model, force)
            progress.write_journal(self.out, self._facts, self._records, file_digest(self.model_file))
        self._wrote_model = True

    def fail(self, path: Path, error: VispeError | OSError, count: int) -> None:
        """Skip an image after an error; re-raise if it is the only one."""
        if count == 1:
            raise error
        work = progress.partial(self.out, output_stem(path))
        if self._fresh and not next((work / "done").glob("*.json"), None):
            remove(work, self.out)
        self.images.pop(path, None)
        self.skip(path, error)

    def begin(self, arguments: dict[str, Any]) -> bool:
        """Check the outputs and store the arguments; return whether an unfinished run is resumed."""
        facts = {
            **arguments,
            "images": {str(path.resolve()): fingerprint_files(path) for path in self.images},
            "reading": asdict(self.reading),
            "post": asdict(self.post),
            "objects": None if self.request.objects is None else asdict(self.request.objects),
            "versions": versions(),
        }
        self._facts, finished = facts, progress.resumable_records(self.out, facts, self.force)
        names = ("report.json", "report.csv", "report.html", *([MODEL_NAME] if self.writes_model else []))
        targets = [self.out / name for name in names]
        targets += [self.out / COMBINED] if self.request.objects is not None else []
        for path in self.images:
            targets += self._files(path).values()
        if finished is None:
            inputs = [path for path in self.images if path.is_file()]
            folders = [path for path in targets if path.suffix == ".zarr" and path.is_dir()]
            if folders and not self.force:
                raise InputError(f"{folders[0]} exists; add --force to overwrite it.")
            check_writable([path for path in targets if path not in folders], self.force, protect=inputs)
            target_paths = {target.resolve() for target in targets}
            if overwritten := [path for path in self.images if path.resolve() in target_paths]:
                raise InputError(
                    f"{overwritten[0]} is an input and would be overwritten. Choose another folder."
                )
            for target in folders:
                progress.check_result(target)
            stems = [output_stem(path) for path in self.images]
            for stem in stems:
                progress.check_partial(progress.partial(self.out, stem))
            for stem in stems:
                remove(progress.partial(self.out, stem), self.out)
            if others := progress.other_partial_results(self.out, stems):
                self.note(f"{self.out} contains unfinished results of other images: {', '.join(others)}.")
            progress.write_journal(self.out, facts, (), None)
            self._fresh = True
            return False
        for path in self.images:
            progress.check_partial(progress.partial(self.out, output_stem(path)))
        self._records = finished
        self.note(f"resuming the unfinished run in {self.out}.")
        return True

    def limits(self, path: Path, reading: ReadOptions) -> tuple[list[Limits], int, list[str]]:
        """Compute the grey limits of an image, or load them."""
        image, work = self.images[path], progress.partial(self.out, output_stem(path))
        cache_file = work / "limits.json"
        if cache_file.is_file():
            cached = json.loads(cache_file.read_text())
            limits = [None if pair is None else tuple(pair) for pair in cached["limits"]]
            return limits, cached["data"], cached["notes"]
        self.watch.start("finding grey levels", 1)
        result = find_limits(image, reading.normalize, reading.clip, self._rows(image), self.watch.step)
        work.mkdir(parents=True, exist_ok=True)
        progress.write_small(cache_file, {"limits": result[0], "data": result[1], "notes": result[2]})
        return result

    def predict(self, model: Model) -> Report:
        """Segment every image, write its files, and update the report."""
        if self.request.objects is not None:
            self.request.objects.numbers(model.names)
        features = open_features(model, self.request.weights, self.request.tile, self.request.device)
        self.describe(features, model, memory_bytes=self.memory, scheduler=self.request.scheduler)
        count, complete = len(self.images) + len(self.report.failures), True
        for path in list(self.images):
            try:
                with disk_space_guard(self.out, f"the result of {path.name}"):
                    record = self._one(path, model, features)
            except DiskFull:
                raise
            except (VispeError, OSError) as error:
                self.fail(path, error, count)
                complete = False
            else:
                self.report.images.append(record)
                self.watch.done(record)
                progress.write_journal(
                    self.out, self._facts, self.report.images, progress.trained_model(self.out)
                )
                remove(progress.partial(self.out, output_stem(path)), self.out)
            self.report.write(self.out)
            if self.request.objects is not None:
                write_combined(self.out, [r["files"]["objects_table"] for r in self.report.images])
        self.report.finish(self.out)
        if complete:
            progress.delete_journal(self.out)
        elif self._fresh and not self.report.images:
            self._discard()
        return self.report

    def _one(self, path: Path, model: Model, features: Features) -> dict[str, Any]:
        """Segment one image from its store into the result store, and return its record."""
        image, files, clock = self.images[path], self._files(path), Clock()
        work = progress.partial(self.out, output_stem(path))
        if (earlier := self._earlier(path, work, files)) is not None:
            return earlier
        check_channels(path, image.channels, model)
        reading = replace(self.reading, normalize=model.normalize, clip=model.clip)
        limits, data, notes = self.limits(path, reading)
        prepared = prepare_page(features, PageWindow(image, 0, None))
        notes = [*image.notes, *notes, *prepared.notes]
        job, plan = self._job(path, model, features, limits, prepared.pieces)
        regions = blocks(*image.shape, plan.side)
        total = [(page, region) for page in range(image.n_pages) for region in regions]
        self._classify(path, job, total)
        job, areas = self._settle(image, job, total)
        if areas is not None:
            notes += vanishing_class_notes(sum(areas[1:], areas[0]), model.names)
        added = progress.sum_records(work, image, job.chunk, len(model.names))
        objects = None
        if self.request.objects is not None:
            table, object_options = files["objects_table"], self.request.objects
            objects, more = objects_of_store(image, job, model, object_options, self.memory, data, table)
            notes += more
        facts = {"model_sha256": job.sha256, "vispe": versions()["vispe"]}
        zarr_store.finish(work / "store", image, model.names, model.colors, job.chunk, plan.side, facts)
        if image.n_pages > 1:
            notes.append(f"the overlay of {path.name} shows page {job.picture} of {image.n_pages} (from 0).")
        if job.reduction > 1:
            notes.append(f"the overlay of {path.name} shows every {job.reduction}th label along each axis.")
        domain = ood_record(model, added["seen"])
        notes += ood_warning(path.name, domain, None)
        draw(files["overlay"], image, model, job, added["pages"][job.picture])
        for text in notes:
            self.watch.note(text)
        record = {
            **summary(image, model, added, areas, data, self.labels_of.get(path)),
            **timing(clock(), image.n_pages * image.shape[0] * image.shape[1]),
            "tile": features.tile,
            "block": plan.side,
            "files": {key: str(target) for key, target in files.items()},
            "notes": notes,
            "domain": domain,
            **({} if objects is None else {"objects": objects}),
        }
        progress.write_small(work / "record.json", record)
        progress.publish(work / "store", files["labels"])
        return record

    def _earlier(self, path: Path, work: Path, files: dict[str, Path]) -> dict[str, Any] | None:
        """Return the record of an image finished before an interruption; None without one."""
        finished = next((record for record in self._records if record["image"] == str(path)), None)
        # interrupted between the last block and the report
        if finished is None and (work / "record.json").is_file():
            finished = json.loads((work / "record.json").read_text(encoding="utf-8"))
            if (work / "store").is_dir():
                progress.publish(work / "store", files["labels"])
        return finished

    def _classify(self, path: Path, job: Job, total: Sequence[tuple[int, Region]]) -> None:
        """Compute the probabilities of all unfinished blocks."""
        work = Path(job.work)
        remaining = [(page, r) for page, r in total if not progress.is_finished(work, page, r, job.chunk)]
        if len(remaining) < len(total):
            self.note(f"{path.name}: {len(total) - len(remaining)} of {len(total)} blocks are already done.")
        self.watch.start(f"segmenting {path.name}", 1)
        self.watch.step(1 - len(remaining) / len(total))
        for _ in self._run(run_block, job, remaining):
            self.watch.step(1 / len(total))
        engine.cache_clear()

    def _settle(
        self, image: OutOfCoreImage, job: Job, total: Sequence[tuple[int, Region]]
    ) -> tuple[Job, list[Areas] | None]:
        """Reweight and label all unfinished blocks; return the job including class frequencies, and the areas."""
        areas = None
        if job.prior != "uniform":
            areas = [area_of_page(job, image, page) for page in range(image.n_pages)]
            job = replace(job, priors=tuple(tuple(page.priors[0].tolist()) for page in areas))
        work = Path(job.work)
        remaining = [
            (p, r) for p, r in total if not progress.is_finished(work, p, r, job.chunk, progress.SETTLED)
        ]
        deque(self._run(finalize_block, job, remaining), maxlen=0)
        return job, areas

    def _job(
        self, path: Path, model: Model, features: Features, limits: Sequence[Limits], pieces: list[Region]
    ) -> tuple[Job, MemoryPlan]:
        """Plan the blocks, and create the empty result if needed."""
        image, work = self.images[path], progress.partial(self.out, output_stem(path))
        job_file = work / "job.json"
        chunk = json.loads(job_file.read_text())["chunk"] if job_file.is_file() else None
        plan_options = {"chunk": chunk, "parts": 16 if self.request.scheduler else 1}
        plan = make_plan(image, features, model, pieces, self.post.smooth, self.memory, **plan_options)
        job = Job(
            image=str(path.resolve()),
            state=fingerprint_files(path),
            channel=self.reading.channel,
            z=self.reading.z,
            axes=self.reading.axes,
            limits=tuple(limits),
            model=str(self.model_file.resolve()),
            sha256=file_digest(self.model_file),
            weights=self.request.weights,
            tile=self.request.tile,
            device=features.device,
            smooth=self.post.smooth,
            prior=self.post.resolve_prior(model.classifier),
            work=str(work.resolve()),
            chunk=plan.chunk,
            reduction=plan.reduction,
            picture=image.n_pages // 2,
            threads=plan.threads,
        )
        if chunk is None:
            _create(job, image, len(model.names))
        return job, plan

    def _run(
        self, compute: Callable[[str, int, Bounds], None], job: Job, remaining: Sequence[tuple[int, Region]]
    ) -> Iterator[None]:
        """Compute blocks locally or on a cluster; yields after each."""
        tasks = [(page, (r.top, r.bottom, r.left, r.right)) for page, r in remaining]
        if self.request.scheduler is not None and tasks:
            from vispe.segment.out_of_core.dask_cluster import run_on_cluster

            yield from run_on_cluster(self.request.scheduler, compute, job.dumps(), tasks)
            return
        for page, bounds in tasks:
            compute(job.dumps(), page, bounds)
            yield

    def _files(self, path: Path) -> dict[str, Path]:
        name = output_stem(path)
        files = {"overlay": self.out / f"{name}_overlay.png", "labels": self.out / f"{name}_seg.ome.zarr"}
        return files | (
            {"objects_table": self.out / f"{name}{ENDINGS[1]}"} if self.request.objects is not None else {}
        )

    def _rows(self, image: OutOfCoreImage) -> int:
        """Return the side of the pieces that are read for the grey limits, at most a sixteenth of the memory."""
        fitting = (self.memory / 16 / (image.channels * image.dtype.itemsize)) ** 0.5
        return max(min(_ROWS, int(fitting)), 1)


def _create(job: Job, image: OutOfCoreImage, n_classes: int) -> None:
    """Create the empty arrays of a result, and store its job."""
    work = Path(job.work)
    remove(work / "store", work)
    for name in (progress.DONE, progress.SETTLED):
        (work / name).mkdir(parents=True, exist_ok=True)
    progress.create_raw(work, image, n_classes, job.chunk)
    zarr_store.create(work / "store", image, n_classes, job.chunk)
    height, width = (-(-n // job.reduction) for n in image.shape)
    side = job.chunk // job.reduction
    shape, chunks = (height, width, image.channels), (side, side, image.channels)
    progress.create_array(work / "picture", shape, chunks)
    progress.write_small(work / "job.json", asdict(job))
