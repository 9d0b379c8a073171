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
    from vispe.cli.common import Output, share_done, versions
    from vispe.errors import OptionError
    from vispe.evaluate.three_cell.results import compare, plot_table, read_rows, report, to_markdown
    from vispe.evaluate.three_cell.trainer import Recipe

    if seeds < 1:
        raise OptionError(f"threecell needs at least one run per encoding, got --seeds {seeds}.")
    recipe = Recipe() if steps is None else Recipe(steps=steps)
    output = Output(out, ["three_cell.json", "three_cell.png", "report.html"], force=True)
    file = output.files[0] if output.files else None
    with share_done("training") as progress:
        also = {"versions": versions()}
        rows = compare(encodings, seeds, recipe, file=file, workers=workers, also=also, progress=progress)

    def contents() -> dict[str, object]:
        kept = read_rows(file, recipe)
        return {"three_cell.png": plot_table(kept), "report.html": report(kept)}

    output.finish(json, rows, lambda: to_markdown(rows), contents, indent=1)
