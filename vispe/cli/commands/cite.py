"""`vispe cite`: references for vispe, encodings and position schemes."""

POSITIONALS = ("names",)


def cite(names: list[str] | None = None, json: bool = False) -> None:
    """Print how to cite vispe, the encodings and the position schemes.

    Args:
        names: encodings and position schemes that you used; by default only vispe is cited.
        json: print JSON.

    Examples:
        vispe cite
        vispe cite alibi2d sincos2d vrope
    """
    from json import dumps

    import vispe
    from vispe.multimodal import list_schemes, scheme_info

    scheme_names = list_schemes()
    infos = [vispe.encoding_info(name) for name in names or () if name not in scheme_names]
    papers = {info.name: {"paper": info.paper, "year": info.year} for info in infos}
    schemes = {name: {"paper": scheme_info(name).paper} for name in names or () if name in scheme_names}
    if json:
        entries = {"vispe": {"version": vispe.__version__}, "encodings": papers, "schemes": schemes}
        print(dumps(entries, indent=2))
        return
    print(
        "@software{vispe,\n"
        "  title = {vispe: positional encodings for vision transformers},\n"
        f"  version = {{{vispe.__version__}}}\n"
        "}"
    )
    for name, entry in (papers | schemes).items():
        year = f" ({entry['year']})" if entry.get("year") else ""
        print(f"\n{name}: {entry['paper'] or 'no paper'}{year}")
