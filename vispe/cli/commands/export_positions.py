"""`vispe export-positions`: the position scheme of a vision-language model, for an engine that serves it."""

POSITIONALS = ("model",)
SHORT = {"out": "-o"}


def export_positions(
    model: str,
    out: str,
    scheme: str | None = None,
    positions: int = 32768,
    picture: str = "64x64x64",
    nearest: bool = False,
    force: bool = False,
    json: bool = False,
) -> None:
    """Write the position scheme of a vision-language model for an engine that serves it.

    For engines such as vLLM or SGLang: a table of cosines and sines, how coordinates are numbered in it, and the
    configuration of the model. `load_positions` of vispe.hosts.transformers.serving reads them inside the engine.
    Weights are not read.

    Args:
        model: folder of a model of transformers, as save_pretrained writes it.
        out: folder to write.
        scheme: position scheme; without one that which the model was saved with, else its own.
        positions: whole coordinates from 0 on that the table has; prompt and answer need to stay below.
        picture: frames x rows x columns of the largest video, in tokens; decides how far the table reaches below 0.
        nearest: round coordinates of schemes that have no common fraction to 64 parts of a step.
        force: overwrite the files.
        json: print JSON.

    Examples:
        vispe export-positions my-model -o my-model/positions
        vispe export-positions my-model --scheme videorope --positions 131072 --picture 256x32x32 -o positions
    """
    from json import dumps
    from re import fullmatch

    from vispe.errors import OptionError
    from vispe.hosts.transformers.serving import serve_positions

    if not fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", picture):
        raise OptionError(f"picture is frames x rows x columns, such as 64x64x64, got {picture!r}.")
    frames, rows, columns = (int(side) for side in picture.split("x"))
    served = serve_positions(
        model, scheme, positions=positions, picture=(frames, rows, columns), nearest=nearest
    )
    files = served.save(out, force)
    said = served.described() | {"files": [str(path) for path in files]}
    if json:
        print(dumps(said))
        return
    print(*files, sep="\n")
    how = (
        "needs TableRotary, which `install` puts in"
        if said["mrope_section"] is None
        else f"mrope_section {said['mrope_section']}" + (" interleaved" if said["mrope_interleaved"] else "")
    )
    print(f"{served.rows.scheme}: {said['rows']} rows, {said['megabytes_float32']} MB in float32; {how}")
