"""Result stores of an out-of-core run: unfinished ones, their resumption, and the files of each image."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vispe.errors import InputError, VispeError
from vispe.segment.materials.image_record import TABLE
from vispe.segment.objects.object_files import ENDINGS
from vispe.segment.out_of_core import output_stem, progress
from vispe.segment.out_of_core.block_engine import (
    limit_concurrency,
)
from vispe.segment.out_of_core.source.image import OutOfCoreImage
from vispe.segment.run.inputs import BatchImage
from vispe.segment.run.run_state import (
    Run,
)
from vispe.utils.files import remove


class ResultStores(Run):
    """Run whose results are stores that are written in parts and can be resumed.

    Attributes:
        sources: the opened images.
    """

    sources: dict[Path, OutOfCoreImage]

    def _work(self, image: BatchImage) -> Path:
        return progress.partial(self.out, output_stem(image.path))

    @contextmanager
    def locked_results(self) -> Iterator[None]:
        """Lock the results folder, as `Run.locked_results`, and limit the chunks that are read concurrently."""
        with limit_concurrency(), super().locked_results():
            yield

    def _check(self, targets: Sequence[Path], resumes: bool) -> None:
        folders = [path for path in targets if path.suffix == ".zarr" and path.is_dir()]
        if folders and not (self.force or resumes):
            raise InputError(f"{folders[0]} exists; add --force to overwrite it.")
        target_paths = {target.resolve() for target in targets}
        if overwritten := [path for path in self.sources if path.resolve() in target_paths]:
            raise InputError(f"{overwritten[0]} is an input and would be overwritten. Choose another folder.")
        super()._check([path for path in targets if path not in folders], resumes)
        for target in folders:
            progress.check_result(target)
        for image in self.images:
            progress.check_partial(self._work(image))

    def _partial_results(self) -> bool:
        return any(self.out.glob("*_seg.partial/job.json"))

    def _prepare_folder(self, targets: Sequence[Path]) -> None:
        """Remove partial results that are not resumed, and start the journal, since blocks are resumed as well."""
        for image in self.images:
            if not self.state.resumes or self.state.record(image.path) is not None:
                self._remove_partial(image)
        stems = [output_stem(image.path) for image in self.images]
        if not self.state.resumes and (others := progress.other_partial_results(self.out, stems)):
            self.note(f"{self.out} contains unfinished results of other images: {', '.join(others)}.")
        self.state.start(targets)

    def _remove_partial(self, image: BatchImage) -> None:
        remove(self._work(image), self.out)

    def _discard(self) -> None:
        """Remove the files of a run without a finished block."""
        if any(progress.has_blocks(self._work(image)) for image in self.images):
            return
        for image in self.images:
            self._remove_partial(image)
        super()._discard()

    def fail(self, image: BatchImage, error: VispeError | OSError) -> None:
        """Skip an image after an error; re-raise if it is the only one."""
        super().fail(image, error)
        if image.path in self.sources and not progress.has_blocks(self._work(image)):
            self._remove_partial(image)

    def _files_of(self, path: Path) -> dict[str, Path]:
        name = output_stem(path)
        files = {"overlay": self.out / f"{name}_overlay.png", "labels": self.out / f"{name}_seg.ome.zarr"}
        if self.request.objects is not None:
            files["objects_table"] = self.out / f"{name}{ENDINGS[1]}"
        if self.request.materials:
            files["materials"] = self.out / f"{name}{TABLE}"
        if self.request.trust:
            files |= {kind: self.out / f"{name}_{kind}.png" for kind in ("trust", "disagreement")}
        return files

    def _image_targets(self, image: BatchImage) -> list[Path]:
        return list(self._files_of(image.path).values())
