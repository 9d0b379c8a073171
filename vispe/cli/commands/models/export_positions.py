"""`vispe export-positions`: position scheme of a vision-language model for an inference engine."""

POSITIONALS = ("model",)
SHORT = {"out": "-o"}


def export_positions(
    model: str,
    out: str,
    scheme: str | None = None,
    positions: int = 32768,
    grid_thw: str = "64x64x64",
    nearest: bool = False,
    force: bool = False,
    json: bool = False,
) -> None:
    """Export the position scheme of a vision-language model for an inference engine.

    Writes a table of cosines and sines, the indices of coordinates in it, and the configuration of the model, for
    engines such as vLLM or SGLang. `load_positions` of vispe.hosts.transformers.serving reads them in the engine.
    Weights are not read.

    Args:
        model: folder of a transformers model, as written by save_pretrained.
        out: output folder.
        scheme: position scheme; default the one saved with the model, otherwise the model's own.
        positions: number of integer coordinates in the table, from 0; upper bound for prompt and answer.
        grid_thw: frames x rows x columns of the largest video, in tokens; determines the negative range of the table.
        nearest: round the coordinates of schemes without a common denominator to 1/64 of a step.

    Examples:
        vispe export-positions my-model -o my-model/positions
        vispe export-positions my-model --scheme videorope --positions 131072 --grid-thw 256x32x32 -o positions
    """
    from json import dumps
    from re import fullmatch

    from vispe.errors import OptionError, counted
    from vispe.hosts.transformers.serving import serve_positions

    if not fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", grid_thw):
        raise OptionError(
            f"export-positions: --grid-thw is frames x rows x columns, such as 64x64x64, got {grid_thw!r}."
        )
    frames, rows, columns = (int(side) for side in grid_thw.split("x"))
    table = serve_positions(
        model, scheme, positions=positions, grid_thw=(frames, rows, columns), nearest=nearest
    )
    files = table.save(out, force)
    facts = table.described() | {"files": [str(path) for path in files]}
    if json:
        print(dumps(facts))
        return
    print(*files, sep="\n")
    usage = (
        "needs TableRotary, which `install` adds to the model"
        if facts["mrope_section"] is None
        else f"mrope_section {facts['mrope_section']}"
        + (" interleaved" if facts["mrope_interleaved"] else "")
    )
    print(
        f"{table.rows.scheme}: {counted(facts['rows'], 'row')}, {facts['megabytes_float32']} MB in float32; {usage}"
    )
