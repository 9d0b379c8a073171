"""`vispe list`: the encodings by name."""

from typing import Literal

POSITIONALS = ("filter",)


def list(
    filter: str = "*",
    kind: Literal["additive", "rotary", "bias", "mixing", "positions"] | None = None,
    ndim: int | None = None,
    exclude: str | None = None,
    knows: Literal["distance", "direction", "place", "content"] | None = None,
    invariant: Literal["translation", "quarter_turns", "reflection", "rotation"] | None = None,
    json: bool = False,
) -> None:
    """List the positional encodings.

    Args:
        filter: wildcard for the names; one with a dot lists presets.
        kind: only encodings of this kind.
        ndim: only encodings that accept this number of axes.
        exclude: wildcard for names to leave out.
        knows: only encodings that tell tokens apart by this.
        invariant: only encodings and presets whose part of attention stays the same under this.
        json: print JSON.

    Examples:
        vispe list
        vispe list 'alibi2d.*'
        vispe list --kind additive --json
        vispe list --kind bias --invariant rotation --ndim 3
    """
    import vispe

    names = vispe.list_encodings(
        filter, kind=kind, ndim=ndim, exclude=exclude or (), knows=knows, invariant=invariant
    )
    infos = {name: vispe.encoding_info(name) for name in names}
    if json:
        from json import dumps

        rows = [
            {
                "name": name,
                "kinds": i.kinds,
                "ndim": i.ndim,
                "summary": i.summary,
                "year": i.year,
                "knows": i.knows,
                "invariant": i.invariant,
            }
            for name, i in infos.items()
        ]
        print(dumps(rows, indent=2))
        return
    width = max(map(len, names), default=0)
    for name, info in infos.items():
        print(f"{name:<{width}}  {'+'.join(info.kinds):<8}  {info.summary}")
