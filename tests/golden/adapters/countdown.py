"""Golden cases of sinusoids of the remaining length, or of the completed fraction."""

import vispe


def run(case):
    tokens = case.config("tokens")
    options = {"dim": case.config("dim"), "mode": case.config("kind")}
    if "offset" in case.settings:
        options["offset"] = case.config("offset")
    encoding = vispe.create_encoding("countdown", **options)
    length = case.input("length")
    attrs = {"length": length}
    yield "grid", {"embedding": encoding.table(vispe.Grid((tokens,)).positions().replace(attrs=attrs))}
    free = vispe.Positions(vispe.Grid((tokens,)).positions().coords.expand(len(length), -1, -1), attrs=attrs)
    yield "free", {"embedding": encoding.table(free)}
