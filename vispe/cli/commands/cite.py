"""`vispe cite`: what to cite."""

POSITIONALS = ("names",)


def cite(names: list[str] | None = None, json: bool = False) -> None:
    """Print how to cite vispe and the encodings.

    Args:
        names: encodings that were used; without any, only vispe.
        json: print JSON.

    Examples:
        vispe cite
        vispe cite alibi2d sincos2d
    """
    from json import dumps

    import vispe

    infos = [vispe.encoding_info(name) for name in names or ()]
    papers = {info.name: {"paper": info.paper, "year": info.year} for info in infos}
    if json:
        print(dumps({"vispe": {"version": vispe.__version__}, "encodings": papers}, indent=2))
        return
    print(
        "@software{vispe,\n"
        "  title = {vispe: positional encodings for vision transformers},\n"
        f"  version = {{{vispe.__version__}}}\n"
        "}"
    )
    for name, entry in papers.items():
        print(f"\n{name}: {entry['paper'] or 'no paper'}" + (f" ({entry['year']})" if entry["year"] else ""))
