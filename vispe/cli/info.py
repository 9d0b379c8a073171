"""`vispe info`: the facts of one encoding."""

POSITIONALS = ("name",)


def info(name: str, json: bool = False) -> None:
    """Show what one encoding is, its options and presets.

    Args:
        name: name of the encoding, or of one of its presets.
        json: print JSON.

    Examples:
        vispe info alibi2d
        vispe info alibi2d.geometric --json
    """
    from json import dumps

    import vispe

    facts = vars(vispe.encoding_info(name))
    preset = name.partition(".")[2]
    presets = {preset: facts["presets"][preset]} if preset in facts["presets"] else facts["presets"]
    if json:
        print(dumps(facts | {"presets": presets}, indent=2, default=str))
        return
    print(f"{facts['name']}: {facts['summary']}\n")
    rows = {
        "kind": ", ".join(facts["kinds"]) or "none",
        "axes": ", ".join(map(str, facts["ndim"])),
        "new resolution": "no resampling needed" if facts["extrapolates"] else "resampled",
        "structured form": "yes" if facts["fused"] else "no",
        "paper": f"{facts['paper']} ({facts['year']})" if facts["paper"] else "none",
    }
    for key, value in rows.items():
        print(f"{key:<18} {value}")
    for title, entries in (("options", facts["options"]), ("presets", presets)):
        if entries:
            print(f"\n{title}")
            width = max(map(len, entries))
            for key, value in entries.items():
                text = ", ".join(f"{k}={v}" for k, v in value.items()) if title == "presets" else f"{value!r}"
                print(f"  {key:<{width}}  {text}")
