"""Run on images that are processed in blocks: intensity limits, blocks, final labels, and result stores."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vispe.errors import counted
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.tiles import Region, blocks
from vispe.segment.invariance_report.image_report import trust_image
from vispe.segment.materials.image_record import measure_image
from vispe.segment.model.model_file import Model
from vispe.segment.model.post_processing import no_large_component
from vispe.segment.model.prediction import Segmenter
from vispe.segment.out_of_core import output_stem, progress, zarr_store
from vispe.segment.out_of_core.block_engine import engine, file_digest, prepare_page, run_block
from vispe.segment.out_of_core.finalize import area_of_page, finalize_block
from vispe.segment.out_of_core.intensity_limits import Limits
from vispe.segment.out_of_core.job import Job
from vispe.segment.out_of_core.lazy_page import PageWindow
from vispe.segment.out_of_core.memory_plan import MemoryPlan, make_plan, page_bytes
from vispe.segment.out_of_core.source.image import OutOfCoreImage
from vispe.segment.out_of_core.store_inputs import StoreInputs
from vispe.segment.out_of_core.summary import draw, objects_of_store, stored_page, summary
from vispe.segment.run.inputs import BatchImage, check_channels
from vispe.segment.run.out_of_distribution import ood_record, ood_warning, pixel_size_warning
from vispe.segment.run.reports.image_record import Clock, timing, vanishing_class_notes
from vispe.segment.run.results_folder.resume import fingerprint_files
from vispe.segment.types import Areas
from vispe.utils.version import versions

Bounds = tuple[int, int, int, int]


class OutOfCoreRun(StoreInputs):
    """Run that segments its images block by block into result stores."""

    def describe(self, features: Features, model: Model, **more: Any) -> None:
        """Write the settings of the run into the report."""
        super().describe(features, model, memory_bytes=self.memory, scheduler=self.request.scheduler, **more)

    def _bytes(self, image: BatchImage, model: Model) -> tuple[int, int]:
        return 0, 0

    def _segment(self, image: BatchImage, by: Segmenter) -> dict[str, Any]:
        """Segment one image from its store into the result store, and return its record."""
        work, target = self._work(image), self._files_of(image.path)["labels"]
        record_file = work / "record.json"
        # interrupted between the last block and the journal
        if record_file.is_file():
            record = json.loads(record_file.read_text(encoding="utf-8"))
        else:
            record = self._compute(image, by)
            progress.write_small(record_file, record)
        if (work / "store").is_dir():
            progress.publish(work / "store", target)
        return record

    def _compute(self, image_file: BatchImage, by: Segmenter) -> dict[str, Any]:
        """Segment one image from its store into the unfinished result, and return its record."""
        path, model, features, clock = image_file.path, by.model, by.features, Clock()
        image, files, work = self.sources[path], self._files_of(path), self._work(image_file)
        check_channels(path, image.channels, model)
        limits, data, notes = self.limits(path)
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
            notes.append(
                f"the overlay of {path.name} shows page {job.overlay_page} of {image.n_pages} (from 0)."
            )
        if job.reduction > 1:
            notes.append(f"the overlay of {path.name} shows every {job.reduction}th label along each axis.")
        if not added["has_large_component"]:
            notes.append(no_large_component(self.post))
        more = {} if objects is None else {"objects": objects}
        files |= self._page_reports(image, job, by, more, notes)
        domain = ood_record(model, added["seen"])
        notes += ood_warning(path.name, domain, None)
        notes += pixel_size_warning(path.name, model, image.pixel_size)
        draw(files["overlay"], image, model, job, added["pages"][job.overlay_page])
        for text in notes:
            self.watch.note(text)
        return {
            **summary(image, model, added, areas, data, image_file.labels),
            **timing(clock(), image.n_pages * image.shape[0] * image.shape[1]),
            "tile": features.tile,
            "block": plan.side,
            "files": {key: str(target) for key, target in files.items()},
            "notes": notes,
            "domain": domain,
            **more,
        }

    def _page_reports(
        self, image: OutOfCoreImage, job: Job, by: Segmenter, record: dict[str, Any], notes: list[str]
    ) -> dict[str, Path]:
        """Write the reports that need complete pages, complete `record` and `notes`, and return their files."""
        path, files = image.path, self._files_of(image.path)
        if self.request.materials:
            maps = (stored_page(image, job, number)[1].labels for number in range(image.n_pages))
            options = by.model.names, image.pixel_size, files["materials"], True
            record["materials"], text = measure_image(path.name, maps, *options)
            notes += text
        if self.request.trust:
            grey, result = stored_page(image, job, job.overlay_page)
            target, callbacks = (
                self.out / output_stem(path),
                {"step": lambda fraction: None, "note": self.note},
            )
            trust = trust_image(image, job.overlay_page, grey, result, by, target, **callbacks, force=True)
            record["trust"] = trust.record
            notes += trust.notes
        return files

    def _classify(self, path: Path, job: Job, total: Sequence[tuple[int, Region]]) -> None:
        """Compute the probabilities of all unfinished blocks."""
        work = Path(job.work)
        remaining = [(page, r) for page, r in total if not progress.is_finished(work, page, r, job.chunk)]
        if len(remaining) < len(total):
            self.note(
                f"{path.name}: {len(total) - len(remaining)} of {counted(len(total), 'block')} are already done."
            )
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
        image, work = self.sources[path], progress.partial(self.out, output_stem(path))
        job_file = work / "job.json"
        chunk = json.loads(job_file.read_text())["chunk"] if job_file.is_file() else None
        classes, channels = model.classifier.n_classes, image.channels
        needed = {
            "min_area": self.post.min_area > 1,
            "clean": self.post.clean,
            "materials": self.request.materials,
            "trust": self.request.trust,
        }
        sizes = page_bytes(classes, channels)
        complete = {name: sizes[name] for name, used in needed.items() if used}
        plan_options = {"chunk": chunk, "parts": 16 if self.request.scheduler else 1, "complete": complete}
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
            min_area=self.post.min_area,
            clean=self.post.clean,
            prior=self.post.resolve_prior(model.classifier),
            work=str(work.resolve()),
            chunk=plan.chunk,
            reduction=plan.reduction,
            overlay_page=image.n_pages // 2,
            threads=plan.threads,
        )
        if chunk is None:
            progress.create_results(job, image, len(model.names))
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
