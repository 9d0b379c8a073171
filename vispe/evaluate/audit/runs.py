"""Runs of an audit, of the model itself and of its controls, on the images of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from vispe.backbones.attention_recorder import LayerAttention
from vispe.backbones.distributed import Processes
from vispe.errors import ShapeError, UnsupportedHost, counted
from vispe.evaluate.audit.checkpoint import AuditCheckpoint, Ledger
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Control, Measure
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns

VIEWS: tuple[Control, ...] = ("random", "none")
"""Names of the controls."""


@dataclass(frozen=True)
class AuditRun:
    """One pass over all images, of the model itself or of a control.

    Attributes:
        view: 'own', or the name of the control.
        audited: the model.
        measures: the measures of this run.
    """

    view: str
    audited: AuditedModel
    measures: tuple[Measure, ...]


def runs_of(
    audited: AuditedModel, measures: tuple[Measure, ...], controls: Sequence[Control], seed: int
) -> tuple[list[AuditRun], dict[str, str]]:
    """Return the runs of the model and of its controls, and the reasons for missing controls."""
    runs, missing = [AuditRun("own", audited, measures)], {}
    for view in VIEWS:
        requested_by = tuple(m for m in measures if view in (*m.controls, *m.reported_controls))
        if not requested_by or view not in controls:
            continue
        try:
            other = audited.reinitialized(seed) if view == "random" else audited.without()
            runs.append(AuditRun(view, other, requested_by))
            if other.unchanged:  # a model that keeps trained parameters is not a valid control
                parameters = f"{counted(len(other.unchanged), 'parameter')}, such as {other.unchanged[0]}"
                missing[f"{view} of {parameters}"] = (
                    "they have no initialiser, so the control has trained values"
                )
        except UnsupportedHost as error:
            missing[view] = str(error).rstrip(".")
    return runs, missing


class RunExecutor:
    """Executor of the runs on the images of this process.

    Args:
        runs: the runs, the model itself first.
        images: all images.
        seed: random seed of the measures.
        processes: rank and number of processes.
        checkpoint: accumulators and finished steps.
    """

    def __init__(
        self,
        runs: Sequence[AuditRun],
        images: Sequence[Tensor],
        seed: int,
        processes: Processes,
        checkpoint: AuditCheckpoint,
    ) -> None:
        self.runs, self.images, self.seed, self.processes = runs, images, seed, processes
        self.checkpoint = checkpoint
        self.size: tuple[int, ...] | None = None

    def execute(self, on_progress: Callable[[str, float], None]) -> Ledger:
        """Return the accumulators of all processes, merged."""
        error: Exception | None = None
        try:
            self.checkpoint.restore(self._read_image)
            self._run_all(on_progress)
        except Exception as caught:  # raised by all processes below, so that none blocks forever
            error = caught
        parts = self.processes.joined(self.checkpoint.ledger, error)
        merged = parts[0]
        for part in parts[1:]:
            for view, accumulators in part.items():
                for name, accumulator in accumulators.items():
                    merged[view][name].join(accumulator)
        return merged

    def _run_all(self, on_progress: Callable[[str, float], None]) -> None:
        numbers = self.processes.share(len(self.images))
        generating = [m for m in self.runs[0].measures if m.items]
        # measures that generate images count as one image each
        steps = len(numbers) * len(self.runs) + len(generating)
        at = 0
        for number in numbers:
            image = None  # each image is loaded once for all runs
            for run in self.runs:
                if (step := f"{run.view} {number}") not in self.checkpoint.done:
                    label = "own pass" if run.view == "own" else f"control: {run.view}"
                    on_progress(f"image {number + 1} of {len(self.images)}, {label}", at / steps)
                    image = self._read_image(number) if image is None else image
                    self._run_image(run, number, image)
                    self.checkpoint.finish(step)
                at += 1
        for measure in generating:
            for run in self.runs:
                if measure in run.measures:
                    on_progress(measure.name, at / steps)
                    self._run_generated(run, measure)
            at += 1

    def _run_generated(self, run: AuditRun, measure: Measure) -> None:
        """Run a measure on the images that it generates, a part of them in every process."""
        acc = self.checkpoint.ledger[run.view][measure.name]
        for item in self.processes.share(measure.items):
            if (step := f"{run.view} {measure.name} {item}") not in self.checkpoint.done:
                acc.begin(item)
                measure.rerun(acc, PerturbedRuns(run.audited, None, item, self.seed))
                self.checkpoint.finish(step)

    def _read_image(self, number: int) -> Tensor:
        image = self.images[number]
        if self.size is None:
            self.size = tuple(image.shape)
        if tuple(image.shape) != self.size or image.ndim != 3:
            raise ShapeError(
                f"audit: images must be (c, H, W) of one size, got {tuple(image.shape)} for image {number + 1} after "
                f"{self.size}. Crop or resize them first."
            )
        self.checkpoint.compare(number, image)
        return image

    def _run_image(self, run: AuditRun, number: int, image: Tensor) -> None:
        """Run all measures of a run on one image."""
        acc = self.checkpoint.ledger[run.view]
        active = [m for m in run.measures if not m.items]
        for m in active:
            acc[m.name].begin(number)
        on_layers = [m for m in active if type(m).on_layer is not Measure.on_layer]
        # capturing all layers is slow: control runs skip it if it would only add curves over layers
        needed = run.view == "own" or not all(m.layered for m in on_layers)
        passes = PerturbedRuns(run.audited, image, number, self.seed)
        if on_layers and needed and "attention" in run.audited.can:

            def on_layer(captured: LayerAttention) -> None:
                for m in on_layers:
                    m.on_layer(acc[m.name], captured)

            passes.set_original(run.audited.watch(image[None], on_layer))
        rerunning = [m for m in active if type(m).rerun is not Measure.rerun]
        on_features = [m for m in active if type(m).on_features is not Measure.on_features]
        for m in on_features:
            m.on_features(acc[m.name], passes.maps())
        for m in rerunning:
            m.rerun(acc[m.name], passes)
        for m in active:
            acc[m.name].scratch = {}
