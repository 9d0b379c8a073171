"""Ids of longer inputs than a table was trained for."""

from vispe.encodings.additive.trained.learned import extended_indices, table_indices


def longer(case):
    mode, trained = case.config("mode"), case.config("trained")
    length, longest = case.config("length"), case.config("longest")
    if mode == "interpolate":
        return {"positions": extended_indices(length, trained, longest)}
    # 'original' counts on: a table with an entry for every token
    rules = {"recurrent": ("tile", trained), "group": ("nearest", trained), "original": ("tile", length)}
    if mode not in rules:
        raise ValueError(f"a mode {mode!r} is not known")
    rule, entries = rules[mode]
    return {"positions": table_indices(length, entries, rule).long()}
