"""`vispe list`: names of encodings and position schemes."""

import sys
from typing import Any, Literal

POSITIONALS = ("filter",)


def list(
    filter: str = "*",
    kind: Literal["additive", "rotary", "bias", "mixing", "positions", "scheme"] | None = None,
    ndim: int | None = None,
    exclude: str | None = None,
    encodes: Literal["distance", "direction", "position", "content"] | None = None,
    invariant: Literal["translation", "quarter_turns", "reflection", "rotation"] | None = None,
    json: bool = False,
) -> int | None:
    """List the positional encodings and the position schemes.

    Schemes are listed below the encodings, unless an option applies to encodings only. The exit code is 1 if nothing
    matches.

    Args:
        filter: wildcard for the names; one with a dot lists presets.
        kind: only encodings of this kind; scheme for position schemes of vision-language models.
        ndim: only encodings that accept this number of axes.
        exclude: wildcard for names to exclude.
        encodes: only encodings that carry this information.
        invariant: only encodings and presets whose contribution to attention is invariant under this.

    Examples:
        vispe list
        vispe list 'alibi2d.*'
        vispe list --kind additive --json
        vispe list --kind scheme
        vispe list --kind bias --invariant rotation --ndim 3
    """
    import vispe

    only = {"ndim": ndim, "encodes": encodes, "invariant": invariant}
    encodings_only = kind not in (None, "scheme") or any(value is not None for value in only.values())
    schemes = [] if encodings_only else _schemes(filter, exclude)
    if kind == "scheme":
        _check_no_filters(only)
        names = []
    else:
        names = vispe.list_encodings(filter, kind=kind, exclude=exclude or (), **only)
    infos = [vispe.encoding_info(name) for name in names]
    encodings: Any = [
        {
            "name": name,
            "kinds": i.kinds,
            "ndim": i.ndim,
            "summary": i.summary,
            "year": i.year,
            "encodes": i.encodes,
            "invariant": i.invariant,
        }
        for name, i in zip(names, infos, strict=True)
    ]
    if json:
        from json import dumps

        print(dumps([*encodings, *schemes], indent=2))
    if not encodings and not schemes:
        print(_no_match(filter), file=sys.stderr)
        return 1
    if json:
        return None
    width = max((len(row["name"]) for row in (*encodings, *schemes)), default=0)
    for row in encodings:
        print(f"{row['name']:<{width}}  {'+'.join(row['kinds']):<8}  {row['summary']}")
    if encodings and schemes:
        print("\nposition schemes, for the language model of vision-language models")
    for row in schemes:
        print(f"{row['name']:<{width}}  {'scheme':<8}  {row['summary']}")
    return None


def _no_match(filter: str) -> str:
    """Return the message for an empty list, with the closest names."""
    import vispe
    from vispe.errors import did_you_mean
    from vispe.multimodal import list_schemes

    known = [*vispe.list_encodings(), *vispe.list_encodings("*.*"), *list_schemes()]
    return f"vispe: list: no name matches {filter!r} and the options.{did_you_mean(filter, known)}"


def _schemes(filter: str, exclude: str | None) -> Any:
    """Return the records of the position schemes that match `filter` and not `exclude`."""
    from fnmatch import fnmatch

    from vispe.multimodal import list_schemes, scheme_info

    names = [n for n in list_schemes() if fnmatch(n, filter) and not (exclude and fnmatch(n, exclude))]
    return [
        {
            "name": name,
            "kinds": ["scheme"],
            "ndim": None,  # the keys of an encoding first, then those of schemes alone
            "summary": i.summary,
            "year": None,
            "encodes": None,
            "invariant": None,
            "axes": i.axes,
            "paper": i.paper,
        }
        for name, i in zip(names, map(scheme_info, names), strict=True)
    ]


def _check_no_filters(only: Any) -> None:
    """Raise if options that apply to encodings are combined with `--kind scheme`."""
    from vispe.errors import OptionError

    filters = [f"--{name}" for name, value in only.items() if value is not None]
    if filters:
        raise OptionError(
            f"list: {', '.join(filters)} selects encodings, got --kind scheme. Omit one of them."
        )
