"""`vispe cite`: references for vispe, encodings, position schemes, measures and recipes."""

POSITIONALS = ("names",)


def cite(names: list[str] | None = None, json: bool = False) -> None:
    """Print how to cite vispe, and the papers of encodings, position schemes, measures and recipes.

    Args:
        names: encodings, position schemes, measures of `vispe audit`, and recipes such as retrofit, slot_distillation
            or segment; by default only vispe is cited. All entries of a name with several meanings are printed.

    Examples:
        vispe cite
        vispe cite alibi2d sincos2d vrope
        vispe cite strips retrofit
    """
    from json import dumps

    import vispe

    cited = _entries(names or [])
    if json:
        print(dumps({"vispe": {"version": vispe.__version__}, **cited}, indent=2))
        return
    print(
        "@software{vispe,\n"
        "  title = {vispe: positional encodings for vision and multimodal transformers},\n"
        f"  version = {{{vispe.__version__}}}\n"
        "}"
    )
    every = [name for entries in cited.values() for name in entries]
    for group, entries in cited.items():
        for name, entry in entries.items():
            label = name if every.count(name) == 1 else f"{name} ({group.removesuffix('s')})"
            year = f" ({entry['year']})" if entry.get("year") else ""
            papers = entry.get("papers", [entry["paper"]] if entry.get("paper") else [])
            print("\n" + "\n".join(f"{label}: {paper}{year}" for paper in papers or ["no paper"]))


def _entries(names: list[str]) -> dict[str, dict[str, dict]]:
    """Return the references of names, by group (encodings, schemes, measures, recipes) and name.

    Raises:
        UnknownName: a name in none of the groups.
    """
    import vispe
    import vispe.experimental.measures
    from vispe.encodings.spec import SCHEME_NAMES
    from vispe.errors import UnknownName, did_you_mean
    from vispe.evaluate.audit.measures import all_measures
    from vispe.multimodal import scheme_info
    from vispe.train.recipe_papers import RECIPE_PAPERS

    cited: dict[str, dict[str, dict]] = {"encodings": {}, "schemes": {}, "measures": {}, "recipes": {}}
    if not names:
        return cited
    encodings, schemes, measures = vispe.list_encodings(), sorted(SCHEME_NAMES), all_measures()
    for name in names:
        if name.partition(".")[0] in encodings:
            info = vispe.encoding_info(name)  # raises for a preset that does not exist
            cited["encodings"][info.name] = {"paper": info.paper, "year": info.year}
        elif name not in {*schemes, *measures, *RECIPE_PAPERS}:
            known = [*encodings, *vispe.list_encodings("*.*"), *schemes, *measures, *RECIPE_PAPERS]
            raise UnknownName(
                f"cite: unknown name, got {name!r}.{did_you_mean(name, known)} Use an encoding or a position scheme of "
                f"`vispe list`, a measure ({', '.join(measures)}) or a recipe ({', '.join(RECIPE_PAPERS)})."
            )
        if name in schemes:
            cited["schemes"][name] = {"paper": scheme_info(name).paper}
        if name in measures:
            cited["measures"][name] = {"papers": list(measures[name].papers)}
        if name in RECIPE_PAPERS:
            cited["recipes"][name] = {"papers": list(RECIPE_PAPERS[name])}
    return cited
