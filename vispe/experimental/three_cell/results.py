"""Three-cell scores of many encodings and seeds: results file, table, figure and HTML report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vispe.errors import InputError, OptionError
from vispe.experimental.three_cell.model import ThreeCellRecipe, ThreeCellViT
from vispe.experimental.three_cell.summary import Row
from vispe.experimental.three_cell.trainer import train
from vispe.utils.files import atomic_path

if TYPE_CHECKING:
    pass


def compare(
    encodings: Sequence[str],
    seeds: int,
    recipe: ThreeCellRecipe,
    *,
    file: Path | None = None,
    num_workers: int = 0,
    also: Mapping[str, Any] | None = None,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
) -> list[Row]:
    """Train every encoding with the seeds 0, 1, ... and return all results, including those already in a file.

    Args:
        encodings: specs as text.
        seeds: number of runs per encoding.
        recipe: training configuration.
        file: JSON file of all results; its folder is created.
        num_workers: number of processes with one thread each; 0 trains in this process.
        also: additional entries of the file.
        progress: called with a description of the run and the completed fraction of all steps.

    Raises:
        UnknownEncoding: an unknown name, before any training.
        InputError: the file was written with another recipe, or is not a results file.
    """
    for encoding in encodings:
        ThreeCellViT(encoding, recipe)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    total, done = len(encodings) * seeds * recipe.steps, 0

    def follow(encoding: str, seed: int, step: int, loss: float) -> None:
        nonlocal done
        done += 1
        progress(f"{encoding}, seed {seed}, loss {loss:.2f}", done / total)

    rows = []
    for row in run_missing(
        encodings, range(seeds), recipe, file=file, num_workers=num_workers, also=also, on_step=follow
    ):
        rows.append(row)
        done += recipe.steps if num_workers else 0
        progress(f"{row['encoding']}, seed {row['seed']}", done / total)
    if file is None:
        return rows
    return [r for r in read_rows(file, recipe) if r["encoding"] in encodings and r["seed"] < seeds]


def run_missing(
    encodings: Sequence[str],
    seeds: Sequence[int],
    recipe: ThreeCellRecipe | None = None,
    *,
    file: str | Path | None = None,
    num_workers: int = 0,
    also: Mapping[str, Any] | None = None,
    on_step: Callable[[str, int, int, float], None] | None = None,
) -> Iterator[Row]:
    """Train the runs that are missing in a file, and yield the result of each run when it is written.

    An interrupted run resumes from its checkpoint, which is stored next to the file until the run is finished.

    Args:
        encodings: specs as text.
        seeds: random seeds of the weights and the training images.
        recipe: training configuration; `ThreeCellRecipe()` by default.
        file: JSON file of all results; None stores nothing.
        num_workers: number of processes with one thread each; 0 trains in this process, with its threads.
        also: additional entries of the file, such as the environment.
        on_step: called with encoding, seed, step and loss; ignored with workers.

    Raises:
        InputError: the file was written with another recipe, or is not a results file.
        OptionError: duplicate encodings or seeds, or negative `num_workers`.
    """
    recipe = recipe or ThreeCellRecipe()
    if len(set(encodings)) < len(encodings) or len(set(seeds)) < len(seeds) or num_workers < 0:
        raise OptionError(
            f"run_missing: encodings and seeds must be distinct, num_workers at least 0, got {', '.join(encodings)}, "
            f"seeds {', '.join(map(str, seeds))} and num_workers={num_workers}."
        )
    file = None if file is None else Path(file)
    rows = read_rows(file, recipe)
    done = {(r["encoding"], r["seed"]) for r in rows}
    jobs = [(e, s) for s in seeds for e in encodings if (e, s) not in done]
    for row in _results(jobs, recipe, file, num_workers, on_step):
        rows.append(row)
        rows.sort(key=lambda r: (r["encoding"], r["seed"]))
        if file is not None:
            content = {**(also or {}), "recipe": recipe.to_dict(), "rows": rows}
            with atomic_path(file, force=True) as part:
                part.write_text(json.dumps(content, indent=1) + "\n")
            _checkpoint(file, row["encoding"], row["seed"]).unlink(missing_ok=True)
        yield row


def read_rows(file: str | Path | None, recipe: ThreeCellRecipe | None = None) -> list[Row]:
    """Return the results in a file, [] if it does not exist.

    Raises:
        InputError: the file was written with another recipe, or is not a results file.
    """
    if file is None or not Path(file).exists():
        return []
    try:
        content = json.loads(Path(file).read_text())
        rows, used = content["rows"], content["recipe"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not a file of three-cell scores. Pass another file.") from error
    if recipe is not None and used != recipe.to_dict():
        differ = [k for k, v in recipe.to_dict().items() if used.get(k) != v]
        raise InputError(
            f"{file} was written with another recipe ({', '.join(f'{k} {used.get(k)}' for k in differ)}). Pass another "
            "file, or use that recipe."
        )
    return rows


def _results(
    jobs: Sequence[tuple[str, int]],
    recipe: ThreeCellRecipe,
    file: Path | None,
    num_workers: int,
    on_step: Callable[[str, int, int, float], None] | None,
) -> Iterator[Row]:
    if not num_workers:
        for encoding, seed in jobs:
            yield _one(encoding, seed, recipe, file, on_step)
        return
    with ProcessPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        started = [pool.submit(_one, *job, recipe, file) for job in jobs]
        for future in as_completed(started):
            yield future.result()


def _one(
    encoding: str,
    seed: int,
    recipe: ThreeCellRecipe,
    file: Path | None,
    on_step: Callable[[str, int, int, float], None] | None = None,
) -> Row:
    follow = None if on_step is None else lambda step, loss: on_step(encoding, seed, step, loss)
    path = None if file is None else _checkpoint(file, encoding, seed)
    row = train(encoding, seed, recipe, checkpoint=path, on_step=follow)[1].to_dict()
    return {name: value for name, value in row.items() if name != "recipe"}


def _checkpoint(file: Path, encoding: str, seed: int) -> Path:
    name = "".join(c if c.isalnum() or c in "._" else "-" for c in encoding)
    return file.with_name(f".{file.stem}-{name}-{seed}.pt")
