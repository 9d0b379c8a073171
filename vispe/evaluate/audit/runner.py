"""Runner of audits: all measures in one pass over images, with controls, resumable and distributed."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vispe.backbones.attention_recorder import LayerAttention
from vispe.backbones.distributed import Processes
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost, counted, short
from vispe.evaluate.audit.findings import Audit, Finding
from vispe.evaluate.audit.measures import choose
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Control, Measure
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.evaluate.measure.verdict import judge
from vispe.utils.digest import tensor_digest
from vispe.utils.files import atomic_path
from vispe.utils.option_values import read_option
from vispe.utils.options import Seed

SAVE_EVERY = 20.0  # seconds between two checkpoints
VIEWS: tuple[Control, ...] = ("random", "none")

Ledger = dict[str, dict[str, Accumulator]]
"""Accumulators by run ('own' and the controls) and measure."""


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


def audit(
    audited: AuditedModel,
    images: Sequence[Tensor],
    measures: Sequence[Measure] | None = None,
    *,
    controls: Sequence[Control] = VIEWS,
    seed: int = 0,
    names: Sequence[str] = (),
    state: Path | None = None,
    processes: Processes | None = None,
    on_progress: Callable[[str, float], None] = lambda label, share: None,
) -> Audit:
    """Evaluate measures on a model, in one pass over the images, and one for each control.

    Memory does not grow with the number of images. With several processes, each evaluates a part of the
    images; the result equals that of a single process.

    Args:
        audited: the model.
        images: (c, H, W) each, normalised, all of one size; loaded one at a time.
        measures: the measures; by default those of the report.
        controls: control models to run, a subset of those that the measures request.
        seed: random seed of random weights, random numbers of measures, and bootstrap draws.
        names: names of the images; an interrupted audit is only resumed with the same names.
        state: checkpoint file, written every 20 seconds; an interrupted audit resumes from it, after reading its
            evaluated images again to compare them.
        processes: rank and number of processes.
        on_progress: called with a description and the completed fraction.

    Raises:
        OptionError: an unknown control, or an invalid seed.
        ShapeError: no images, or images of different sizes.
        InputError: the checkpoint is damaged or belongs to another audit.
    """
    if unknown := set(controls) - set(VIEWS):
        raise OptionError(f"audit: unknown control, got {min(unknown)!r}. Use one of {', '.join(VIEWS)}.")
    if not len(images):
        raise ShapeError("audit: no images, got an empty sequence. Pass at least one image.")
    seed = read_option("seed", seed, Seed)
    measures = choose() if measures is None else measures
    one = processes or Processes()
    supported = tuple(m for m in measures if not m.needs - audited.can)
    refused = {m.name: _reason(m, audited) for m in measures if m.needs - audited.can}
    runs, missing = _runs(audited, supported, controls, seed)
    facts = ""
    if state is not None:
        facts = f"{_facts(audited, supported, controls, len(images), seed)}; {list(names)}; {one.count} process(es)"
    runner = _Runner(runs, images, seed, one, state, facts)
    ledger = runner.go(on_progress)
    findings: list[Finding] = []
    for measure in measures:
        if measure.name in refused:
            continue
        try:
            own = measure.summarize(ledger["own"][measure.name], audited)
        except UnsupportedHost as error:
            refused[measure.name] = str(error).rstrip(".")
            continue
        others = {}
        for p in (p for p in runs[1:] if measure in p.measures):
            try:
                others[p.view] = measure.summarize(ledger[p.view][measure.name], p.audited)
            except UnsupportedHost as error:
                missing[f"{p.view} of {measure.name}"] = str(error).rstrip(".")
        judged = judge(measure.limit, own, {v: o for v, o in others.items() if v in measure.controls}, seed)
        findings.append(Finding.of(measure, own, others, judged))
    order = {m.name: k for k, m in enumerate(measures)}
    return Audit(
        audited.title,
        tuple(sorted(findings, key=lambda f: order[f.name])),
        {m.name: (m.asks, refused[m.name]) for m in measures if m.name in refused},
        len(images),
        missing,
    )


def _runs(
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


class _Runner:
    """Executes the runs on the images of this process, and holds their accumulators."""

    def __init__(
        self,
        runs: Sequence[AuditRun],
        images: Sequence[Tensor],
        seed: int,
        processes: Processes,
        state: Path | None,
        facts: str,
    ) -> None:
        self.runs, self.images, self.seed, self.processes = runs, images, seed, processes
        # every process writes its own checkpoint
        self.state = None if state is None else Path(f"{state}.{processes.rank}" if processes.rank else state)
        self.facts = facts
        self.ledger: Ledger = {p.view: {m.name: Accumulator() for m in p.measures} for p in runs}
        self.done: list[str] = []
        # digest of each evaluated image, by its index
        self.digests: dict[int, str] = {}
        self.saved = time.monotonic()
        self.size: tuple[int, ...] | None = None

    def go(self, on_progress: Callable[[str, float], None]) -> Ledger:
        """Return the accumulators of all processes, merged."""
        error: Exception | None = None
        try:
            self._restore()
            self._walk(on_progress)
        except Exception as caught:  # raised by all processes below, so that none blocks forever
            error = caught
        parts = self.processes.joined(self.ledger, error)
        merged = parts[0]
        for part in parts[1:]:
            for view, acc in part.items():
                for name, more in acc.items():
                    merged[view][name].join(more)
        return merged

    def _walk(self, on_progress: Callable[[str, float], None]) -> None:
        numbers = self.processes.share(len(self.images))
        own = self.runs[0]
        generating = [m for m in own.measures if m.items]
        # measures that generate images count as one image each
        steps = len(numbers) * len(self.runs) + len(generating)
        at = 0
        for number in numbers:
            image = None  # each image is loaded once for all runs
            for one in self.runs:
                if (mark := f"{one.view} {number}") not in self.done:
                    label = "own pass" if one.view == "own" else f"control: {one.view}"
                    on_progress(f"image {number + 1} of {len(self.images)}, {label}", at / steps)
                    image = self._read_image(number) if image is None else image
                    self._look(one, number, image)
                    self._mark(mark)
                at += 1
        for measure in generating:
            for one in self.runs:
                if measure in one.measures:
                    on_progress(measure.name, at / steps)
                    self._items(one, measure)
            at += 1

    def _items(self, one: AuditRun, measure: Measure) -> None:
        """Run a measure on the images that it generates, a part of them in every process."""
        acc = self.ledger[one.view][measure.name]
        for item in self.processes.share(measure.items):
            if (mark := f"{one.view} {measure.name} {item}") not in self.done:
                acc.begin(item)
                measure.rerun(acc, PerturbedRuns(one.audited, None, item, self.seed))
                self._mark(mark)

    def _read_image(self, number: int) -> Tensor:
        image = self.images[number]
        if self.size is None:
            self.size = tuple(image.shape)
        if tuple(image.shape) != self.size or image.ndim != 3:
            raise ShapeError(
                f"audit: images must be (c, H, W) of one size, got {tuple(image.shape)} for image {number + 1} after "
                f"{self.size}. Crop or resize them first."
            )
        if (
            self.state is not None
            and self.digests.setdefault(number, digest := tensor_digest([image])) != digest
        ):
            raise self._other_audit()
        return image

    def _look(self, one: AuditRun, number: int, image: Tensor) -> None:
        acc = self.ledger[one.view]
        active = [m for m in one.measures if not m.items]
        for m in active:
            acc[m.name].begin(number)
        on_layers = [m for m in active if type(m).on_layer is not Measure.on_layer]
        # capturing all layers is slow: control runs skip it if it would only add curves over layers
        needed = one.view == "own" or not all(m.layered for m in on_layers)
        runs = PerturbedRuns(one.audited, image, number, self.seed)
        if on_layers and needed and "attention" in one.audited.can:

            def on_layer(captured: LayerAttention) -> None:
                for m in on_layers:
                    m.on_layer(acc[m.name], captured)

            runs.set_original(one.audited.watch(image[None], on_layer))
        rerunning = [m for m in active if type(m).rerun is not Measure.rerun]
        on_features = [m for m in active if type(m).on_features is not Measure.on_features]
        for m in on_features:
            m.on_features(acc[m.name], runs.maps())
        for m in rerunning:
            m.rerun(acc[m.name], runs)
        for m in active:
            acc[m.name].scratch = {}

    def _mark(self, mark: str) -> None:
        self.done.append(mark)
        if self.state is not None and time.monotonic() - self.saved > SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        assert self.state is not None
        acc = {v: {n: (k.records, k.sums) for n, k in of.items()} for v, of in self.ledger.items()}
        with atomic_path(self.state, force=True) as temporary:
            entries = {"facts": self.facts, "done": self.done, "digests": self.digests, "kept": acc}
            torch.save(entries, temporary)
        self.saved = time.monotonic()

    def _restore(self) -> None:
        if self.state is None or not self.state.exists():
            return
        try:
            saved = torch.load(self.state, weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise InputError(
                f"audit: {self.state} is damaged ({short(error, 160)}). Delete it to start again."
            ) from error
        if saved["facts"] != self.facts:
            raise self._other_audit()
        self.done, self.digests = saved["done"], saved["digests"]
        for number in self.digests:
            self._read_image(number)
        self.ledger = {
            v: {n: Accumulator(records, sums) for n, (records, sums) in of.items()}
            for v, of in saved["kept"].items()
        }

    def _other_audit(self) -> InputError:
        return InputError(
            f"audit: {self.state} is the checkpoint of another audit (other model, images, measures or controls). "
            "Use another folder, or delete the file to start again."
        )


def _reason(measure: Measure, audited: AuditedModel) -> str:
    return audited.why.get(
        next(iter(sorted(measure.needs - audited.can))), "the model does not give what it needs"
    )


def _facts(
    audited: AuditedModel, measures: Sequence[Measure], controls: Sequence[str], count: int, seed: int
) -> str:
    """Return a fingerprint of all but the images, which must be equal to resume an audit."""
    names = ", ".join(repr(m) for m in measures)
    # models with the same name may have different weights
    tensors = () if audited.model is None else (*audited.model.parameters(), *audited.model.buffers())
    return f"{audited.title} {tensor_digest(tensors)}; {names}; {list(controls)}; {count} images; seed {seed}"
