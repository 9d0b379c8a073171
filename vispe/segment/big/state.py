"""The state of a run on images larger than memory: checked inputs, then model, then results."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, OptionError, VispeError, require
from vispe.files import check_writable
from vispe.segment.big import progress, store
from vispe.segment.big import stem as stem_of
from vispe.segment.big.engine import engine, file_digest, open_features, prepare_page, run_block
from vispe.segment.big.job import Job
from vispe.segment.big.limits import Limits, find_limits
from vispe.segment.big.page import Window
from vispe.segment.big.plan import DEFAULT, Plan, make_plan, parse_memory
from vispe.segment.big.settle import area_of_page, settle_block
from vispe.segment.big.source import BigImage, open_image
from vispe.segment.big.summary import draw, summary
from vispe.segment.features.features import Features
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.model.file import Model, versions
from vispe.segment.run.batch import MODEL_NAME
from vispe.segment.run.claim import claimed
from vispe.segment.run.disk import DiskFull, room
from vispe.segment.run.inputs import Reading
from vispe.segment.run.predict import Post
from vispe.segment.run.report import Clock, Report, Watcher, described, faded
from vispe.segment.run.resume import state_of

Ends = tuple[int, int, int, int]
_ROWS = 1024  # side of the pieces in which an image is read for its grey limits


class BigRun:
    """The state of one run: checked inputs, then model, then results.

    Args:
        images: Zarr stores, or TIFF files.
        out: folder for the results.
        reading: how images are read.
        post: smoothing.
        force: overwrite.
        watch: hears of progress.
        memory: for the work besides the libraries, such as '2 GiB'; `DEFAULT` if None.
        scheduler: address of a dask scheduler; None works in this process.
        model: whether a model file is written.
    """

    model_file: Path
    asked: dict[str, Any]
    labels_of: dict[Path, Path]

    def __init__(
        self,
        images: Sequence[Path],
        out: str | Path,
        reading: Reading | None,
        post: Post | None,
        force: bool,
        watch: Watcher | None,
        memory: str | None,
        scheduler: str | None,
        *,
        model: bool,
    ) -> None:
        self.reading, self.post = reading or Reading(), post or Post()
        self.force, self.watch = force, watch or Watcher()
        self.memory = parse_memory(memory or DEFAULT)
        self.scheduler, self.out, self._model = scheduler, Path(out), model
        self.report = Report({})
        self.records: list[dict[str, Any]] = []
        self.labels_of = {}
        self._fresh = self.wrote_model = False
        if self.post.min_area > 1:
            raise OptionError(
                f"min_area={self.post.min_area} needs whole patches, which can be larger than memory; leave it out for "
                "images in a store, or use smooth."
            )
        if scheduler is not None:
            require("distributed", "big", "a dask scheduler")
        self.images: dict[Path, BigImage] = {}
        for path in images:
            try:
                how = self.reading
                self.images[path] = open_image(path, channel=how.channel, z=how.z, axes=how.axes)
            except (VispeError, OSError) as error:
                self.fail(path, error, len(images))
        stems = [stem_of(path) for path in self.images]
        if len(set(stems)) < len(stems):
            twice = next(s for s in stems if stems.count(s) > 1)
            raise InputError(f"two images are called {twice}; rename one or use separate folders.")

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
            progress.remove(work)
        progress.forget_run(self.out)
        if self.wrote_model:
            self.model_file.unlink(missing_ok=True)

    def fail(self, path: Path, error: VispeError | OSError, count: int) -> None:
        """Leave an image out, unless it is the only one."""
        if count == 1:
            raise error
        work = progress.partial(self.out, stem_of(path))
        if self._fresh and not next((work / "done").glob("*.json"), None):
            progress.remove(work)
        self.images.pop(path, None)
        reason = " ".join(str(error).split())
        self.report.failures.append({"image": str(path), "reason": reason})
        self.watch.failed(str(path), reason)

    def note(self, text: str) -> None:
        """Keep and announce something about the whole run, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)
            self.watch.note(text)

    def begin(self, asked: dict[str, Any]) -> bool:
        """Check the outputs and note what was asked; return whether an unfinished run goes on."""
        how = {
            **asked,
            "images": {str(path.resolve()): state_of(path) for path in self.images},
            "reading": asdict(self.reading),
            "post": asdict(self.post),
            "versions": versions(),
        }
        self.asked, finished = how, progress.can_go_on(self.out, how, self.force)
        targets = [
            self.out / name for name in ("report.json", "report.csv", *([MODEL_NAME] if self._model else []))
        ]
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
                raise InputError(
                    f"{same[0]} is an input and would be overwritten; choose another output folder."
                )
            progress.sweep(self.out, inputs=[*self.images, *inputs])
            for path in self.images:
                progress.remove(progress.partial(self.out, stem_of(path)))
            progress.note_run(self.out, how, (), None)
            self._fresh = True
            return False
        self.records = finished
        self.note(f"going on with the unfinished run in {self.out}.")
        return True

    def limits(self, path: Path, reading: Reading) -> tuple[list[Limits], int, list[str]]:
        """Find the grey limits of an image, or recall them."""
        image, work = self.images[path], progress.partial(self.out, stem_of(path))
        kept = work / "limits.json"
        if kept.is_file():
            found = json.loads(kept.read_text())
            return (
                [None if one is None else tuple(one) for one in found["limits"]],
                found["data"],
                found["notes"],
            )
        self.watch.start("finding grey levels", 1)
        found = find_limits(image, reading.normalize, reading.clip, self._rows(image), self.watch.step)
        work.mkdir(parents=True, exist_ok=True)
        progress.write_small(kept, {"limits": found[0], "data": found[1], "notes": found[2]})
        return found

    def predict(
        self, command: str, model: Model, weights: str | None, tile: int | None, device: str, **extra: Any
    ) -> Report:
        """Segment every image, write its files, renew the report."""
        reading = replace(self.reading, normalize=model.normalize, clip=model.clip)
        features = open_features(model, weights, tile, device)
        self.report.run = {
            "command": command,
            **extra,
            **described(features, model, self.post),
            "memory_bytes": self.memory,
            "scheduler": self.scheduler,
        }
        count, complete = len(self.images) + len(self.report.failures), True
        for path in list(self.images):
            try:
                with room(self.out, f"the result of {path.name}"):
                    record = self._one(path, model, features, reading, weights, tile)
            except DiskFull:
                raise
            except (VispeError, OSError) as error:
                self.fail(path, error, count)
                complete = False
            else:
                self.report.images.append(record)
                self.watch.done(record)
                progress.note_run(self.out, self.asked, self.report.images, progress.trained_model(self.out))
                progress.remove(progress.partial(self.out, stem_of(path)))
            self.report.write(self.out)
        if complete:
            progress.forget_run(self.out)
        elif self._fresh and not self.report.images:
            self._discard()
        return self.report

    def _one(
        self,
        path: Path,
        model: Model,
        features: Features,
        reading: Reading,
        weights: str | None,
        tile: int | None,
    ) -> dict[str, Any]:
        image, files, clock = self.images[path], self._files(path), Clock()
        work = progress.partial(self.out, stem_of(path))
        earlier = next((r for r in self.records if r["image"] == str(path)), None)
        complete = work / "record.json"
        if earlier is None and complete.is_file():  # killed between the last block and the report
            earlier = json.loads(complete.read_text(encoding="utf-8"))
            if (work / "store").is_dir():
                progress.put_in_place(work / "store", files["labels"])
        if earlier is not None:
            return earlier
        if image.channels != model.channels:
            raise InputError(
                f"{path} has {image.channels} channel(s), but the model was trained with {model.channels}; choose "
                "channels with --channel."
            )
        limits, data, notes = self.limits(path, reading)
        notes = [*image.notes, *notes]
        job, plan, regions, found = self._job(path, image, model, features, limits, weights, tile)
        notes += found
        total = [(page, region) for page in range(image.n_pages) for region in regions]
        left = [(page, r) for page, r in total if not progress.is_done(work, page, r, job.chunk)]
        if len(left) < len(total):
            self.note(f"{path.name}: {len(total) - len(left)} of {len(total)} blocks are done already.")
        self.watch.start(f"segmenting {path.name}", 1)
        self.watch.step(1 - len(left) / len(total))
        for _ in self._run(run_block, job, left):
            self.watch.step(1 / len(total))
        engine.cache_clear()
        areas = None
        if job.prior != "uniform":
            areas = [area_of_page(job, image, page) for page in range(image.n_pages)]
            job = replace(job, priors=tuple(tuple(found.priors[0].tolist()) for found in areas))
            notes += faded(sum(areas[1:], areas[0]), model.names)
        whole = [(p, r) for p, r in total if not progress.is_done(work, p, r, job.chunk, progress.SETTLED)]
        deque(self._run(settle_block, job, whole), maxlen=0)
        added = progress.sums(work, image, job.chunk, len(model.names))
        facts = {"model_sha256": job.sha256, "vispe": versions()["vispe"]}
        store.finish(work / "store", image, model.names, model.colors, job.chunk, plan.side, facts)
        if image.n_pages > 1:
            notes.append(
                f"the overlay of {path.name} shows page {job.picture} of {image.n_pages} (counted from 0)."
            )
        if job.reduction > 1:
            notes.append(
                f"the overlay of {path.name} shows one label of {job.reduction} x {job.reduction} pixels."
            )
        draw(files["overlay"], image, model, job, added["counts"], areas)
        for text in notes:
            self.watch.note(text)
        label = self.labels_of.get(path)
        record = {
            **summary(image, model, added, areas, data, clock()),
            "labels": None if label is None else str(label),
            "tile": features.tile,
            "block": plan.side,
            "files": {key: str(target) for key, target in files.items()},
            "notes": notes,
        }
        progress.write_small(complete, record)
        progress.put_in_place(work / "store", files["labels"])
        return record

    def _job(
        self,
        path: Path,
        image: BigImage,
        model: Model,
        features: Features,
        limits: Sequence[Limits],
        weights: str | None,
        tile: int | None,
    ) -> tuple[Job, Plan, list[Region], list[str]]:
        """Plan the blocks, and make the empty result unless there is one."""
        import zarr

        work = progress.partial(self.out, stem_of(path))
        begun = work / "job.json"
        chunk = json.loads(begun.read_text())["chunk"] if begun.is_file() else None
        prepared = prepare_page(features, Window(image, 0, None))
        parts = 16 if self.scheduler else 1
        plan = make_plan(
            *(image, features, model, prepared.pieces, self.post.smooth, self.memory),
            chunk=chunk,
            parts=parts,
        )
        job = Job(
            image=str(path.resolve()),
            state=state_of(path),
            channel=self.reading.channel,
            z=self.reading.z,
            axes=self.reading.axes,
            limits=tuple(limits),
            model=str(self.model_file.resolve()),
            sha256=file_digest(self.model_file),
            weights=weights,
            tile=tile,
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
            progress.remove(work / "store")
            for name in (progress.DONE, progress.SETTLED):
                (work / name).mkdir(parents=True, exist_ok=True)
            progress.create_raw(work, image, len(model.names), plan.chunk)
            store.create(work / "store", image, len(model.names), plan.chunk)
            height, width = (-(-n // plan.reduction) for n in image.shape)
            side = plan.chunk // plan.reduction
            zarr.create_array(
                store=str(work / "picture"),
                shape=(height, width, image.channels),
                chunks=(side, side, image.channels),
                dtype=np.float32,
                overwrite=True,
            )
            progress.write_small(begun, asdict(job))
        return job, plan, blocks(*image.shape, plan.side), list(prepared.notes)

    def _run(
        self, compute: Callable[[str, int, Ends], None], job: Job, left: Sequence[tuple[int, Region]]
    ) -> Iterator[None]:
        """Compute blocks here or on a cluster; yields after each."""
        tasks = [(page, (r.top, r.bottom, r.left, r.right)) for page, r in left]
        if self.scheduler is not None and tasks:
            from vispe.segment.big.cluster import run_on_cluster

            yield from run_on_cluster(self.scheduler, compute, job.dumps(), tasks)
            return
        for page, ends in tasks:
            compute(job.dumps(), page, ends)
            yield

    def _files(self, path: Path) -> dict[str, Path]:
        name = stem_of(path)
        return {"overlay": self.out / f"{name}_overlay.png", "labels": self.out / f"{name}_seg.ome.zarr"}

    def _rows(self, image: BigImage) -> int:
        """Side of the pieces that are read for grey levels, a sixteenth of the memory at most."""
        fitting = (self.memory / 16 / (image.channels * image.dtype.itemsize)) ** 0.5
        return max(min(_ROWS, int(fitting)), 1)
