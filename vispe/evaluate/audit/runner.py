"""All measures in one pass over images, with their controls; what was kept is saved, shared and joined."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.attention_recorder import Seen
from vispe.backbones.distributed import Processes
from vispe.errors import InputError, OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.findings import Audit, Finding
from vispe.evaluate.audit.measure import Kept, Measure, View, choose
from vispe.evaluate.audit.verdict import judge
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.files import atomic_path

SAVE_EVERY = 20.0  # seconds
VIEWS: tuple[View, ...] = ("random", "none")

Ledger = dict[str, dict[str, Kept]]
"""What was kept, by view ('own' and the controls) and measure."""


@dataclass(frozen=True)
class Pass:
    """One look at every image: the model itself, or a control.

    Attributes:
        view: 'own', or what the control is.
        host: the model that looks.
        measures: what is measured.
    """

    view: str
    host: Host
    measures: tuple[Measure, ...]


def audit(
    host: Host,
    images: Sequence[Tensor],
    measures: Sequence[Measure] | None = None,
    *,
    controls: Sequence[View] = VIEWS,
    seed: int = 0,
    names: Sequence[str] = (),
    state: Path | None = None,
    processes: Processes | None = None,
    on_progress: Callable[[str, float], None] = lambda words, share: None,
) -> Audit:
    """Ask all measures of a model, in one pass over images and one for each control.

    Memory does not grow with the number of images. Several processes share the images and give what one gives.

    Args:
        host: the model.
        images: (c, H, W) each, normalised, all of one size; read one at a time.
        measures: what is asked; by default those of the page.
        controls: which passes beside the model's own are made, of those that measures ask for.
        seed: of random weights, of what measures draw and of intervals.
        names: of the images; a run goes on only with images of the same names.
        state: file in which what was kept is saved every 20 seconds; a run that was killed goes on from it.
        processes: this process among several.
        on_progress: called with what is being done and the share of all work that is finished.

    Raises:
        OptionError: an unknown control.
        ShapeError: no images, or images of several sizes.
        InputError: the state is that of another audit.
    """
    if unknown := set(controls) - set(VIEWS):
        raise OptionError(f"There is no control {min(unknown)!r}; they are {', '.join(VIEWS)}.")
    if not len(images):
        raise ShapeError("An audit got no images; give at least one.")
    measures = choose() if measures is None else measures
    one = processes or Processes()
    able = tuple(m for m in measures if not m.needs - host.can)
    refused = {m.name: _reason(m, host) for m in measures if m.needs - host.can}
    passes, missing = _passes(host, able, controls, seed)
    facts = f"{_facts(host, able, controls, images, seed)}; {list(names)}; {one.count} process(es)"
    run = _Run(passes, images, seed, one, state, facts)
    ledger = run.go(on_progress)
    findings: list[Finding] = []
    for measure in measures:
        if measure.name in refused:
            continue
        try:
            own = measure.finish(ledger["own"][measure.name], host)
        except UnsupportedHost as error:
            refused[measure.name] = str(error).rstrip(".")
            continue
        others = {}
        for p in (p for p in passes[1:] if measure in p.measures):
            try:
                others[p.view] = measure.finish(ledger[p.view][measure.name], p.host)
            except UnsupportedHost as error:
                missing[f"{p.view} of {measure.name}"] = str(error).rstrip(".")
        judged = judge(measure.name, own, {v: o for v, o in others.items() if v in measure.controls}, seed)
        findings.append(Finding.of(measure, own, others, judged))
    order = {m.name: k for k, m in enumerate(measures)}
    return Audit(
        host.title,
        tuple(sorted(findings, key=lambda f: order[f.name])),
        {m.name: (m.asks, refused[m.name]) for m in measures if m.name in refused},
        len(images),
        missing,
    )


def _passes(
    host: Host, measures: tuple[Measure, ...], controls: Sequence[View], seed: int
) -> tuple[list[Pass], dict[str, str]]:
    """Return the model's own pass and those of the controls, and why some controls are missing."""
    passes, missing = [Pass("own", host, measures)], {}
    for view in VIEWS:
        wanting = tuple(m for m in measures if view in (*m.controls, *m.beside))
        if not wanting or view not in controls:
            continue
        try:
            other = host.twin(seed) if view == "random" else host.without()
            passes.append(Pass(view, other, wanting))
            if other.same:  # a control that keeps what was trained is no control
                kept = f"{len(other.same)} parameters, such as {other.same[0]}"
                missing[f"{view} of {kept}"] = "nothing draws them again, so the twin keeps what was trained"
        except UnsupportedHost as error:
            missing[view] = str(error).rstrip(".")
    return passes, missing


class _Run:
    """The passes over this process's share of the images, and what was kept so far."""

    def __init__(
        self,
        passes: Sequence[Pass],
        images: Sequence[Tensor],
        seed: int,
        processes: Processes,
        state: Path | None,
        facts: str,
    ) -> None:
        self.passes, self.images, self.seed, self.processes = passes, images, seed, processes
        # what a process keeps is its own: each saves a file
        self.state = None if state is None else Path(f"{state}.{processes.rank}" if processes.rank else state)
        self.facts = facts
        self.ledger: Ledger = {p.view: {m.name: Kept() for m in p.measures} for p in passes}
        self.done: list[str] = []
        self.saved = time.monotonic()
        self.size: tuple[int, ...] | None = None

    def go(self, on_progress: Callable[[str, float], None]) -> Ledger:
        """Return what all processes kept of all images."""
        self._restore()
        error: Exception | None = None
        try:
            self._walk(on_progress)
        except Exception as caught:  # raised by all processes below, so that none waits for ever
            error = caught
        parts = self.processes.joined(self.ledger, error)
        whole = parts[0]
        for part in parts[1:]:
            for view, kept in part.items():
                for name, more in kept.items():
                    whole[view][name].join(more)
        return whole

    def _walk(self, on_progress: Callable[[str, float], None]) -> None:
        share = self.processes.share(len(self.images))
        own = self.passes[0]
        pictures = [m for m in own.measures if m.items]
        # measures with pictures of their own count as one image each
        steps = len(share) * len(self.passes) + len(pictures)
        at = 0
        for number in share:
            image = None  # read once for all passes
            for one in self.passes:
                if (mark := f"{one.view} {number}") not in self.done:
                    words = "own pass" if one.view == "own" else f"control: {one.view}"
                    on_progress(f"image {number + 1} of {len(self.images)}, {words}", at / steps)
                    image = self._picture(number) if image is None else image
                    self._look(one, number, image)
                    self._mark(mark)
                at += 1
        for measure in pictures:
            for one in self.passes:
                if measure in one.measures:
                    on_progress(measure.name, at / steps)
                    self._items(one, measure)
            at += 1

    def _items(self, one: Pass, measure: Measure) -> None:
        """Show a measure its own pictures; every process has its share of them."""
        kept = self.ledger[one.view][measure.name]
        for item in self.processes.share(measure.items):
            if (mark := f"{one.view} {measure.name} {item}") not in self.done:
                kept.begin(item)
                measure.ask(kept, Reruns(one.host, None, item, self.seed))
                self._mark(mark)

    def _picture(self, number: int) -> Tensor:
        image = self.images[number]
        if self.size is None:
            self.size = tuple(image.shape)
        if tuple(image.shape) != self.size or image.ndim != 3:
            raise ShapeError(
                f"An audit needs images (c, H, W) of one size, but image {number + 1} is {tuple(image.shape)} after "
                f"{self.size}; crop or resize them first."
            )
        return image

    def _look(self, one: Pass, number: int, image: Tensor) -> None:
        kept = self.ledger[one.view]
        looking = [m for m in one.measures if not m.items]
        for m in looking:
            kept[m.name].begin(number)
        seeing = [m for m in looking if type(m).see is not Measure.see]
        # a pass through all layers is slow: a control makes it for a headline, not for curves alone
        worth = one.view == "own" or not all(m.layered for m in seeing)
        reruns = Reruns(one.host, image, number, self.seed)
        if seeing and worth and "attention" in one.host.can:

            def on_layer(seen: Seen) -> None:
                for m in seeing:
                    m.see(kept[m.name], seen)

            reruns.know(one.host.watch(image[None], on_layer))
        asking = [m for m in looking if type(m).ask is not Measure.ask]
        ending = [m for m in looking if type(m).end is not Measure.end]
        for m in ending:
            m.end(kept[m.name], reruns.maps())
        for m in asking:
            m.ask(kept[m.name], reruns)
        for m in looking:
            kept[m.name].scratch = {}

    def _mark(self, mark: str) -> None:
        self.done.append(mark)
        if self.state is not None and time.monotonic() - self.saved > SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        assert self.state is not None
        kept = {v: {n: (k.records, k.sums) for n, k in of.items()} for v, of in self.ledger.items()}
        with atomic_path(self.state, force=True) as temporary:
            torch.save({"facts": self.facts, "done": self.done, "kept": kept}, temporary)
        self.saved = time.monotonic()

    def _restore(self) -> None:
        if self.state is None or not self.state.exists():
            return
        saved = torch.load(self.state, weights_only=True)
        if saved["facts"] != self.facts:
            raise InputError(
                f"{self.state} is what another audit kept (other model, images, measures or controls); give another "
                "folder, or delete the file to begin anew."
            )
        self.done = saved["done"]
        self.ledger = {
            v: {n: Kept(records, sums) for n, (records, sums) in of.items()}
            for v, of in saved["kept"].items()
        }


def _reason(measure: Measure, host: Host) -> str:
    return host.why.get(next(iter(sorted(measure.needs - host.can))), "the model does not give what it needs")


def _facts(
    host: Host, measures: Sequence[Measure], controls: Sequence[str], images: Sequence[Tensor], seed: int
) -> str:
    """Return what must be the same for an audit to go on."""
    first = np.asarray(images[0], dtype=np.float64)
    asked = ", ".join(repr(m) for m in measures)
    # the same name may have other weights
    parameters = () if host.model is None else host.model.parameters()
    weights = sum(float(p.detach().double().sum()) for p in parameters)
    pictures = f"{len(images)} images {first.shape} {first.sum():.6f}"
    return f"{host.title} {weights:.9g}; {asked}; {list(controls)}; {pictures}; seed {seed}"
