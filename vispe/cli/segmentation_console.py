"""Console output of segmentation runs, shared by the commands that write label maps."""

from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any

from rich.progress import TaskID, TextColumn

from vispe.cli.common import progress
from vispe.cli.messages import name_options
from vispe.cli.terminal import one_line
from vispe.errors import counted
from vispe.segment.classify.fractions import estimate_words, map_words
from vispe.segment.run.reports.run_report import ProgressCallbacks


class Console(ProgressCallbacks):
    """Console output of a segmentation run: results on stdout, progress and notes on stderr.

    Args:
        json: print the complete report as JSON at the end instead of one line per image.
        command: function of the command, whose options replace parameters in messages.
        positionals: positional parameters of the command.
    """

    def __init__(self, json: bool, command: Callable[..., int], positionals: Sequence[str]) -> None:
        self.json, self.command, self.positionals = json, command, positionals
        self.bar = progress(TextColumn("{task.completed:.1f}/{task.total:.0f} images"))
        self.stderr = self.bar.console
        self.task: TaskID | None = None

    def start(self, what: str, total: int) -> None:
        """Start the progress bar of a stage."""
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(what, total=total)

    def step(self, fraction: float) -> None:
        """Advance the progress bar by a fraction of one image."""
        self.bar.advance(self.task, fraction)

    def note(self, text: str) -> None:
        """Print a message for the user."""
        self.stderr.print(f"vispe: note: {self._message(text)}")

    def failed(self, path: str, reason: str) -> None:
        """Print the reason why an image was skipped."""
        self.stderr.print(f"vispe: {one_line(path)} was skipped: {self._message(reason)}")

    def done(self, record: Mapping[str, Any]) -> None:
        """Print the results of an image."""
        if not self.json:
            print(one_line(describe(record)), flush=True)

    def __enter__(self) -> "Console":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def finish(self, report: Any, out: str) -> int:
        """Print the report (with `json`) or the skipped images, and return the exit code."""
        if self.json:
            print(dumps(report.as_dict(), indent=2))
        if report.failures:
            count = len(report.failures)
            self.stderr.print(
                f"vispe: {counted(len(report.images), 'image')} done in {out}, {count} skipped:"
            )
            for failure in report.failures:
                self.stderr.print(f"  {one_line(failure['image'])}: {self._message(failure['reason'])}")
        return report.exit_code

    def _message(self, text: str) -> str:
        return one_line(name_options(text, self.command, self.positionals))


def describe(record: Mapping[str, Any]) -> str:
    """Return the results of an image as one line."""
    line = f"{record['image']}: {map_words(record['map_fractions'])}"
    if record["fraction_kind"] == "estimate" and None not in record["map_fractions"].values():
        bounds = record["fractions_ci95"] or {}
        fractions = (
            f"{name} {estimate_words(v, bounds.get(name))}" for name, v in record["fractions"].items()
        )
        line += f"; estimated true fractions (95 %): {', '.join(fractions)}"
    if "objects" in record:
        classes = record["objects"]["classes"].items()
        counts = ", ".join(f"{objects['count']} {name}" for name, objects in classes)
        line += f"; objects: {counts}"
        if learnt := record["objects"].get("object_classes"):
            line += f" ({', '.join(f'{n} {name}' for name, n in learnt['counts'].items())})"
    if "scores" in record:
        line += f"; mIoU {record['scores']['miou']:.3f}"
    if "trust" in record:
        line += f"; trust: {record['trust']['brief']}"
    return f"{line} -> {record['files']['labels']}"
