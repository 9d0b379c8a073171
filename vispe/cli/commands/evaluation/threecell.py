"""`vispe threecell`: the three-cell benchmark, small models trained from scratch."""

POSITIONALS = ("encodings",)
SHORT = {"out": "-o"}


def threecell(
    encodings: list[str],
    out: str | None = None,
    seeds: int = 3,
    steps: int | None = None,
    num_workers: int = 0,
    json: bool = False,
) -> None:
    """Train small models on the three-cell benchmark and score which positional tasks they solve.

    A black image contains one red, one green and one blue cell; the labels are six bits: which of two cells is nearer
    to red, the orientation of the three, which of two areas is larger and the location of their sum. A small ViT is
    trained from scratch with each encoding. Scores are the accuracy in percent on held-out images; the last line is the
    best constant prediction, the upper limit of a model without position. Distance exact, area exact: both bits
    correct; balanced: mean over the bits of the accuracy on ones and on zeros.

    Args:
        encodings: names or specs of two-axis encodings.
        out: folder for three_cell.json, three_cell.png and report.html; finished runs in it are reused, and an
            interrupted one resumes.
        seeds: number of runs per encoding.
        steps: training steps; more give better scores and take longer.
        num_workers: runs in parallel, one core each; 0 runs them sequentially with all cores.

    Examples:
        vispe threecell sincos2d rope_axial alibi2d none -o out
        vispe threecell 'alibi2d(wrap=false)' --seeds 1 --json
    """
    import os

    from vispe.cli.common import Output, progress_bar, versions
    from vispe.errors import InputError, OptionError
    from vispe.experimental.three_cell.model import ThreeCellRecipe
    from vispe.experimental.three_cell.results import compare, read_rows
    from vispe.experimental.three_cell.summary import ThreeCellTable, plot_table, report

    if seeds < 1:
        raise OptionError(f"threecell: --seeds must be 1 or more, got {seeds}.")
    recipe = ThreeCellRecipe() if steps is None else ThreeCellRecipe(steps=steps)
    output = Output(out, ["three_cell.json", "three_cell.png", "report.html"], force=True)
    file, *figures = output.files or [None]
    # figures of earlier runs are replaced, files of something else are not
    if not read_rows(file) and (foreign := [path for path in figures if os.path.lexists(path)]):
        raise InputError(
            f"threecell: {foreign[0]} exists and is not of this benchmark. Choose another folder."
        )
    with progress_bar("training") as progress:
        extra = {"versions": versions()}
        records = compare(
            encodings, seeds, recipe, file=file, num_workers=num_workers, also=extra, progress=progress
        )

    def contents() -> dict[str, object]:
        all_records = read_rows(file, recipe)
        return {"three_cell.png": plot_table(all_records), "report.html": report(all_records)}

    output.finish(json, records, ThreeCellTable(records).to_markdown, contents, indent=1)
