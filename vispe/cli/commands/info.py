"""`vispe info`: the facts of one encoding, or which encoding works in which host."""

POSITIONALS = ("name",)


def info(name: str = "", json: bool = False) -> None:
    """Show what one encoding is, its options, presets and hosts; without a name, the hosts of all encodings.

    Args:
        name: name of the encoding, or of one of its presets; all encodings without one.
        json: print JSON.

    Examples:
        vispe info
        vispe info alibi2d
        vispe info alibi2d.geometric --json
    """
    from json import dumps

    import vispe
    from vispe.hosts.support import HOSTS, support, support_table

    if not name:
        table = support_table()
        if json:
            print(dumps(dict(table), indent=2))
        else:
            _print_table(table, HOSTS)
        return
    facts = vars(vispe.encoding_info(name))
    hosts = support(name)
    preset = name.partition(".")[2]
    presets = {preset: facts["presets"][preset]} if preset in facts["presets"] else facts["presets"]
    if json:
        print(dumps(facts | {"presets": presets, "hosts": hosts}, indent=2, default=str))
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
    print("\nhosts")
    for host, reason in hosts.items():
        print(f"  {host:<10} {'yes' if reason is None else 'no: ' + reason}")


def _print_table(table: list[tuple[str, dict[str, str | None]]], hosts: dict[str, str]) -> None:
    """Print a row for each encoding, the hosts below, and the reasons once each."""
    width = max(len(name) for name, _ in table)
    reasons: dict[str, int] = {}
    print(f"{'':<{width}}  {'  '.join(f'{host:<5}' for host in hosts)}")
    for name, row in table:
        cells = [
            "yes" if reason is None else f"no {reasons.setdefault(reason, len(reasons) + 1)}"
            for reason in row.values()
        ]
        padded = [f"{c:<{max(len(h), 5)}}" for c, h in zip(cells, hosts, strict=True)]
        print(f"{name:<{width}}  {'  '.join(padded)}".rstrip())
    print("\nhosts")
    for host, text in hosts.items():
        print(f"  {host:<10} {text}")
    print("\nreasons")
    for reason, number in reasons.items():
        print(f"  {number}  {reason}")
