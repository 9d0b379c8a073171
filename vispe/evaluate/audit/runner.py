"""Runner of audits: all measures in one pass over images, with controls, resumable and distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from vispe.backbones.distributed import Processes
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.audit.checkpoint import AuditCheckpoint, audit_facts
from vispe.evaluate.audit.findings import Audit, Finding
from vispe.evaluate.audit.measures import choose
from vispe.evaluate.audit.runs import VIEWS, RunExecutor, runs_of
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Control, Measure
from vispe.evaluate.measure.verdict import judge
from vispe.utils.option_values import read_option
from vispe.utils.options import Seed


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
    processes = processes or Processes()
    supported = tuple(m for m in measures if not m.needs - audited.can)
    refused = {m.name: _reason(m, audited) for m in measures if m.needs - audited.can}
    runs, missing = runs_of(audited, supported, controls, seed)
    facts = ""
    if state is not None:
        facts = audit_facts(audited, supported, controls, len(images), seed)
        facts += f"; {list(names)}; {processes.count} process(es)"
        # every process writes its own checkpoint
        state = Path(f"{state}.{processes.rank}") if processes.rank else Path(state)
    checkpoint = AuditCheckpoint(
        state, facts, {run.view: {m.name: Accumulator() for m in run.measures} for run in runs}
    )
    ledger = RunExecutor(runs, images, seed, processes, checkpoint).execute(on_progress)
    findings: list[Finding] = []
    for measure in measures:
        if measure.name in refused:
            continue
        try:
            outcome = measure.summarize(ledger["own"][measure.name], audited)
        except UnsupportedHost as error:
            refused[measure.name] = str(error).rstrip(".")
            continue
        control_outcomes = {}
        for run in (run for run in runs[1:] if measure in run.measures):
            try:
                control_outcomes[run.view] = measure.summarize(ledger[run.view][measure.name], run.audited)
            except UnsupportedHost as error:
                missing[f"{run.view} of {measure.name}"] = str(error).rstrip(".")
        judged = judge(
            measure.limit, outcome, {v: o for v, o in control_outcomes.items() if v in measure.controls}, seed
        )
        findings.append(Finding.of(measure, outcome, control_outcomes, judged))
    return Audit(
        audited.title,
        tuple(findings),
        {m.name: (m.question, refused[m.name]) for m in measures if m.name in refused},
        len(images),
        missing,
    )


def _reason(measure: Measure, audited: AuditedModel) -> str:
    """Return why a model lacks something that a measure needs."""
    return audited.why.get(min(measure.needs - audited.can), "the model does not give what it needs")
