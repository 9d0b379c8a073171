"""The state of a run on images larger than memory: checked inputs, then model, then results."""

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
from vispe.segment.objects.object_files import ENDINGS, TOGETHER, write_together
from vispe.segment.out_of_core import progress, zarr_store
from vispe.segment.out_of_core import stem as stem_of
from vispe.segment.out_of_core.block_engine import engine, file_digest, open_features, prepare_page, run_block
from vispe.segment.out_of_core.finalize import area_of_page, settle_block
from vispe.segment.out_of_core.image_source import BigImage, open_image
from vispe.segment.out_of_core.intensity_limits import Limits, find_limits
from vispe.segment.out_of_core.job import Job
from vispe.segment.out_of_core.lazy_page import Window
from vispe.segment.out_of_core.memory_plan import DEFAULT, Plan, make_plan, parse_memory
from vispe.segment.out_of_core.scribbles import match_labels
from vispe.segment.out_of_core.summary import draw, objects_of_store, summary
from vispe.segment.run.disk_space import DiskFull, room
from vispe.segment.run.inputs import Reading
from vispe.segment.run.lock import claimed
from vispe.segment.run.out_of_distribution import judged, warned
from vispe.segment.run.prediction import Areas
from vispe.segment.run.request import Request
from vispe.segment.run.resume import state_of
from vispe.segment.run.run_report import Clock, Report, faded, timed
from vispe.segment.run.run_state import MODEL_NAME, Run, check_channels

Ends = tuple[int, int, int, int]
_ROWS = 1024  # side of the pieces in which an image is read for its grey limits


class BigRun(Run):
    """The state of a run on stores: the opened images, and what of them is done.

    Args:
        asked: what it is asked to do.
        images: Zarr stores, or TIFF files.
        labels: files and stores of labels.

    Attributes:
        labels_of: the label file of each image that has one.
        model_file: the model that the images are segmented with, once there is one.
    """

    def __init__(self, asked: Request, images: Sequence[Path], labels: Sequence[Path] = ()) -> None:
        super().__init__(asked)
        self.memory = parse_memory(asked.memory or DEFAULT)
        self.model_file = self.out / MODEL_NAME if self.writes_model else Path(asked.model)
        self._records: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._fresh = self._wrote_model = False
        if self.post.min_area > 1:
            raise OptionError(
                f"min_area={self.post.min_area} needs whole patches, which can be larger than memory; leave it out for "
                "images in a store, or use smooth."
            )
        if self.post.clean:
            raise OptionError(
                "clean needs the picture beside the probabilities of a whole page, which can be larger than memory; "
                "leave it out for images in a store, or use smooth."
            )
        if asked.scheduler is not None:
            require("distributed", "big", "a dask scheduler")
        self.images: dict[Path, BigImage] = {}
        for path in images:
            try:
                reading = self.reading
                self.images[path] = open_image(path, channel=reading.channel, z=reading.z, axes=reading.axes)
            except (VispeError, OSError) as error:
                self.fail(path, error, len(images))
        stems = [stem_of(path) for path in self.images]
        if len(set(stems)) < len(stems):
            twice = next(s for s in stems if stems.count(s) > 1)
            raise InputError(f"two images are called {twice}; rename one or use separate folders.")
        self.labels_of = match_labels(labels, list(self.images), self.note) if labels else {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Claim the folder of the results; a new run that is refused before it has any result leaves nothing there."""
        with claimed(self.out):
            try:
                yield
            except VispeError as error:
                if self._fresh and not isinstance(error, DiskFull) and not self.report.images:
                    self._discard()
                raise

    def _discard(self) -> None:
        """Remove what a run without a finished block has written."""
        works = [progress.partial(self.out, stem_of(path)) for path in self.images]
        if any(next((work / "done").glob("*.json"), None) for work in works):
            return
        for work in works:
            remove(work, self.out)
        progress.forget_run(self.out)
        if self._wrote_model:
            self.model_file.unlink(missing_ok=True)

    def keep_model(self, model: Model, force: bool) -> None:
        """Write the model file."""
        with room(self.out, MODEL_NAME):
            save_model(self.model_file, model, force)
            progress.note_run(self.out, self._facts, self._records, file_digest(self.model_file))
        self._wrote_model = True

    def fail(self, path: Path, error: VispeError | OSError, count: int) -> None:
        """Leave an image out, unless it is the only one."""
        if count == 1:
            raise error
        work = progress.partial(self.out, stem_of(path))
        if self._fresh and not next((work / "done").glob("*.json"), None):
            remove(work, self.out)
        self.images.pop(path, None)
        self.left_out(path, error)

    def begin(self, asked: dict[str, Any]) -> bool:
        """Check the outputs and note what decides the results; return whether an unfinished run goes on."""
        facts = {
            **asked,
            "images": {str(path.resolve()): state_of(path) for path in self.images},
            "reading": asdict(self.reading),
            "post": asdict(self.post),
            "objects": None if self.asked.objects is None else asdict(self.asked.objects),
            "versions": versions(),
        }
        self._facts, finished = facts, progress.can_go_on(self.out, facts, self.force)
        names = ("report.json", "report.csv", "report.html", *([MODEL_NAME] if self.writes_model else []))
        targets = [self.out / name for name in names]
        targets += [self.out / TOGETHER] if self.asked.objects is not None else []
        for path in self.images:
            targets += self._files(path).values()
        if finished is None:
            inputs = [path for path in self.images if path.is_file()]
            folders = [path for path in targets if path.suffix == ".zarr" and path.is_dir()]
            if folders and not self.force:
                raise InputError(f"{folders[0]} exists; add --force to overwrite it.")
            check_writable([path for path in targets if path not in folders], self.force, protect=inputs)
            found = {target.resolve() for target in targets}
            if same := [path for path in self.images if path.resolve() in found]:
                raise InputError(f"{same[0]} is an input and would be overwritten; choose another folder.")
            for target in folders:
                progress.check_result(target)
            stems = [stem_of(path) for path in self.images]
            for stem in stems:
                progress.check_partial(progress.partial(self.out, stem))
            for stem in stems:
                remove(progress.partial(self.out, stem), self.out)
            if others := progress.left_behind(self.out, stems):
                self.note(f"{self.out} holds unfinished results of other images: {', '.join(others)}.")
            progress.note_run(self.out, facts, (), None)
            self._fresh = True
            return False
        for path in self.images:
            progress.check_partial(progress.partial(self.out, stem_of(path)))
        self._records = finished
        self.note(f"going on with the unfinished run in {self.out}.")
        return True

    def limits(self, path: Path, reading: Reading) -> tuple[list[Limits], int, list[str]]:
        """Find the grey limits of an image, or recall them."""
        image, work = self.images[path], progress.partial(self.out, stem_of(path))
        kept = work / "limits.json"
        if kept.is_file():
            known = json.loads(kept.read_text())
            limits = [None if pair is None else tuple(pair) for pair in known["limits"]]
            return limits, known["data"], known["notes"]
        self.watch.start("finding grey levels", 1)
        found = find_limits(image, reading.normalize, reading.clip, self._rows(image), self.watch.step)
        work.mkdir(parents=True, exist_ok=True)
        progress.write_small(kept, {"limits": found[0], "data": found[1], "notes": found[2]})
        return found

    def predict(self, model: Model) -> Report:
        """Segment every image, write its files, renew the report."""
        if self.asked.objects is not None:
            self.asked.objects.numbers(model.names)
        features = open_features(model, self.asked.weights, self.asked.tile, self.asked.device)
        self.describe(features, model, memory_bytes=self.memory, scheduler=self.asked.scheduler)
        count, complete = len(self.images) + len(self.report.failures), True
        for path in list(self.images):
            try:
                with room(self.out, f"the result of {path.name}"):
                    record = self._one(path, model, features)
            except DiskFull:
                raise
            except (VispeError, OSError) as error:
                self.fail(path, error, count)
                complete = False
            else:
                self.report.images.append(record)
                self.watch.done(record)
                progress.note_run(self.out, self._facts, self.report.images, progress.trained_model(self.out))
                remove(progress.partial(self.out, stem_of(path)), self.out)
            self.report.write(self.out)
            if self.asked.objects is not None:
                write_together(self.out, [r["files"]["objects_table"] for r in self.report.images])
        self.report.finish(self.out)
        if complete:
            progress.forget_run(self.out)
        elif self._fresh and not self.report.images:
            self._discard()
        return self.report

    def _one(self, path: Path, model: Model, features: Features) -> dict[str, Any]:
        """Take an image from its store to that of its result, and return its record."""
        image, files, clock = self.images[path], self._files(path), Clock()
        work = progress.partial(self.out, stem_of(path))
        if (earlier := self._earlier(path, work, files)) is not None:
            return earlier
        check_channels(path, image.channels, model)
        reading = replace(self.reading, normalize=model.normalize, clip=model.clip)
        limits, data, notes = self.limits(path, reading)
        prepared = prepare_page(features, Window(image, 0, None))
        notes = [*image.notes, *notes, *prepared.notes]
        job, plan = self._job(path, model, features, limits, prepared.pieces)
        regions = blocks(*image.shape, plan.side)
        total = [(page, region) for page in range(image.n_pages) for region in regions]
        self._classify(path, job, total)
        job, areas = self._settle(image, job, total)
        if areas is not None:
            notes += faded(sum(areas[1:], areas[0]), model.names)
        added = progress.sums(work, image, job.chunk, len(model.names))
        objects = None
        if self.asked.objects is not None:
            table, known = files["objects_table"], self.asked.objects
            objects, more = objects_of_store(image, job, model, known, self.memory, data, table)
            notes += more
        facts = {"model_sha256": job.sha256, "vispe": versions()["vispe"]}
        zarr_store.finish(work / "store", image, model.names, model.colors, job.chunk, plan.side, facts)
        if image.n_pages > 1:
            notes.append(
                f"the overlay of {path.name} shows page {job.picture} of {image.n_pages} (counted from 0)."
            )
        if job.reduction > 1:
            notes.append(
                f"the overlay of {path.name} shows one label of {job.reduction} x {job.reduction} pixels."
            )
        domain = judged(model, added["seen"])
        notes += warned(path.name, domain, None)
        draw(files["overlay"], image, model, job, added["pages"][job.picture])
        for text in notes:
            self.watch.note(text)
        record = {
            **summary(image, model, added, areas, data, self.labels_of.get(path)),
            **timed(clock(), image.n_pages * image.shape[0] * image.shape[1]),
            "tile": features.tile,
            "block": plan.side,
            "files": {key: str(target) for key, target in files.items()},
            "notes": notes,
            "domain": domain,
            **({} if objects is None else {"objects": objects}),
        }
        progress.write_small(work / "record.json", record)
        progress.put_in_place(work / "store", files["labels"])
        return record

    def _earlier(self, path: Path, work: Path, files: dict[str, Path]) -> dict[str, Any] | None:
        """Return the record of an image that was finished before the run stopped; None where there is none."""
        finished = next((record for record in self._records if record["image"] == str(path)), None)
        # killed between the last block and the report
        if finished is None and (work / "record.json").is_file():
            finished = json.loads((work / "record.json").read_text(encoding="utf-8"))
            if (work / "store").is_dir():
                progress.put_in_place(work / "store", files["labels"])
        return finished

    def _classify(self, path: Path, job: Job, total: Sequence[tuple[int, Region]]) -> None:
        """Compute the probabilities of all blocks that are not done."""
        work = Path(job.work)
        left = [(page, r) for page, r in total if not progress.is_done(work, page, r, job.chunk)]
        if len(left) < len(total):
            self.note(f"{path.name}: {len(total) - len(left)} of {len(total)} blocks are done already.")
        self.watch.start(f"segmenting {path.name}", 1)
        self.watch.step(1 - len(left) / len(total))
        for _ in self._run(run_block, job, left):
            self.watch.step(1 / len(total))
        engine.cache_clear()

    def _settle(
        self, image: BigImage, job: Job, total: Sequence[tuple[int, Region]]
    ) -> tuple[Job, list[Areas] | None]:
        """Weigh and decide all blocks that are not settled; returns the job with the frequencies, and the areas."""
        areas = None
        if job.prior != "uniform":
            areas = [area_of_page(job, image, page) for page in range(image.n_pages)]
            job = replace(job, priors=tuple(tuple(page.priors[0].tolist()) for page in areas))
        work = Path(job.work)
        left = [(p, r) for p, r in total if not progress.is_done(work, p, r, job.chunk, progress.SETTLED)]
        deque(self._run(settle_block, job, left), maxlen=0)
        return job, areas

    def _job(
        self, path: Path, model: Model, features: Features, limits: Sequence[Limits], pieces: list[Region]
    ) -> tuple[Job, Plan]:
        """Plan the blocks, and make the empty result unless there is one."""
        image, work = self.images[path], progress.partial(self.out, stem_of(path))
        begun = work / "job.json"
        chunk = json.loads(begun.read_text())["chunk"] if begun.is_file() else None
        more = {"chunk": chunk, "parts": 16 if self.asked.scheduler else 1}
        plan = make_plan(image, features, model, pieces, self.post.smooth, self.memory, **more)
        job = Job(
            image=str(path.resolve()),
            state=state_of(path),
            channel=self.reading.channel,
            z=self.reading.z,
            axes=self.reading.axes,
            limits=tuple(limits),
            model=str(self.model_file.resolve()),
            sha256=file_digest(self.model_file),
            weights=self.asked.weights,
            tile=self.asked.tile,
            device=features.device,
            smooth=self.post.smooth,
            prior=self.post.weighing(model.classifier),
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
        self, compute: Callable[[str, int, Ends], None], job: Job, left: Sequence[tuple[int, Region]]
    ) -> Iterator[None]:
        """Compute blocks here or on a cluster; yields after each."""
        tasks = [(page, (r.top, r.bottom, r.left, r.right)) for page, r in left]
        if self.asked.scheduler is not None and tasks:
            from vispe.segment.out_of_core.dask_cluster import run_on_cluster

            yield from run_on_cluster(self.asked.scheduler, compute, job.dumps(), tasks)
            return
        for page, ends in tasks:
            compute(job.dumps(), page, ends)
            yield

    def _files(self, path: Path) -> dict[str, Path]:
        name = stem_of(path)
        files = {"overlay": self.out / f"{name}_overlay.png", "labels": self.out / f"{name}_seg.ome.zarr"}
        return files | (
            {"objects_table": self.out / f"{name}{ENDINGS[1]}"} if self.asked.objects is not None else {}
        )

    def _rows(self, image: BigImage) -> int:
        """Side of the pieces that are read for grey levels, a sixteenth of the memory at most."""
        fitting = (self.memory / 16 / (image.channels * image.dtype.itemsize)) ** 0.5
        return max(min(_ROWS, int(fitting)), 1)


def _create(job: Job, image: BigImage, n_classes: int) -> None:
    """Make the empty arrays of a result, and note with which job it was begun."""
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
