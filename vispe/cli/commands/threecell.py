"""`vispe threecell`: small models trained on the three-cell benchmark."""

POSITIONALS = ("encodings",)
SHORT = {"out": "-o"}


def threecell(
    encodings: list[str],
    out: str | None = None,
    seeds: int = 3,
    steps: int | None = None,
    workers: int = 0,
    json: bool = False,
) -> None:
    """Train small models on the three-cell benchmark and score what their encodings can tell.

    A black image holds one red, one green and one blue cell; six bits ask which of two is nearer to red, how the
    three are turned, which of two areas is larger and where their sum lies. A small ViT is trained from scratch with
    each encoding. Scores are percent right on unseen images; the last line is the best constant answer, which is all
    that a model without position can give. Distance exact, area exact: both bits right; balanced: mean over the bits
    of the accuracy on ones and on zeros.

    Args:
        encodings: names or specs of two-axis encodings.
        out: folder for three_cell.json, three_cell.png and report.html; runs that are in it already are kept, and one
            that was stopped goes on.
        seeds: runs per encoding.
        steps: updates; more give better scores and take longer.
        workers: runs at once, one core each; 0 is one after the other with all cores.
        json: print all rows as JSON.

    Examples:
        vispe threecell sincos2d rope_axial alibi2d none -o out
        vispe threecell 'alibi2d(wrap=false)' --seeds 1 --json
    """
    import sys
    from json import dumps
    from pathlib import Path

    import timm
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    import vispe
    from vispe.errors import OptionError
    from vispe.evaluate.three_cell.table import plot_table, read_rows, report, run_missing, to_markdown
    from vispe.evaluate.three_cell.train import Recipe, ThreeCellViT
    from vispe.files import atomic_path

    if seeds < 1:
        raise OptionError(f"threecell needs at least one run per encoding, got --seeds {seeds}.")
    recipe = Recipe() if steps is None else Recipe(steps=steps)
    for encoding in encodings:
        ThreeCellViT(encoding, recipe)  # a name that does not exist must not be found out after an hour
    file = None if out is None else Path(out) / "three_cell.json"
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        read_rows(file, recipe)
    versions = {"vispe": vispe.__version__, "torch": torch.__version__, "timm": timm.__version__}
    total, rows = len(encodings) * seeds, []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("training", total=total * recipe.steps)

        def follow(encoding: str, seed: int, step: int, loss: float) -> None:
            bar.update(task, description=f"{encoding}, seed {seed}, loss {loss:.2f}")
            if not workers:
                bar.advance(task)

        runs = run_missing(
            encodings,
            range(seeds),
            recipe,
            file=file,
            workers=workers,
            also={"versions": versions},
            on_step=follow,
        )
        for row in runs:
            rows.append(row)
            if workers:
                bar.advance(task, recipe.steps)
    if file is not None:
        rows = [r for r in read_rows(file, recipe) if r["encoding"] in encodings and r["seed"] < seeds]
    if file is not None:
        with atomic_path(file.with_suffix(".png"), force=True) as temporary:
            plot_table(read_rows(file, recipe)).savefig(temporary, format="png")
        page = report(read_rows(file, recipe)).write(file.with_name("report.html"), force=True)
    print(dumps(rows, indent=1) if json else to_markdown(rows))
    if file is not None:
        print(f"written: {file}, {file.with_suffix('.png')}, {page}", file=sys.stderr)
