"""`vispe paint`: interactive segmentation in the browser."""

from typing import Literal

POSITIONALS = ("images",)
SHORT = {"out": "-o"}


def paint(
    images: list[str],
    out: str | None = None,
    classes: list[str] | None = None,
    classifier: Literal["ensemble", "logistic", "forest", "boosting"] = "ensemble",
    features: Literal["filters", "tokens", "both"] | None = None,
    stored_features: str | None = None,
    page: int | None = None,
    channel: str | None = None,
    axes: str | None = None,
    crop: str | None = None,
    mask: str | None = None,
    seed: int = 0,
    device: str = "auto",
    port: int = 0,
    browser: bool = True,
    force: bool = False,
    json: bool = False,
) -> None:
    """Draw scribbles in a browser window and watch the segmentation update.

    The page is served on this machine only (127.0.0.1), at a URL with a token, and loads nothing from other hosts.
    Saving writes into OUT: NAME_strokes.json for `vispe segment --labels`, model.vispe for `vispe apply` and
    NAME_seg.png. Several images share classes and model; scribbles and label maps are saved for each. Press Ctrl-C to
    stop.

    Args:
        images: an image file; or several files, folders or globs, which share the classes and one model.
        out: output folder; default NAME_paint next to the (first) image.
        classes: names of the classes 1, 2, ..., separated by commas; default background,object. More can be added in
            the window.
        classifier: as for vispe segment; ensemble (default) shows the result of logistic first.
        features: filters, tokens of vispe_micro, or both (default).
        crop: rows and columns of the sample, such as 0:884,0:1024; other pixels are not segmented.
        mask: image file with 0 for pixels that are not segmented; with several images also a folder of masks, matched
            by name.
        port: port of the server; 0 selects a free one.
        browser: open the browser; --no-browser only prints the URL.
        json: print the URL and OUT as JSON.

    Examples:
        vispe paint steel.png --classes matrix,carbide
        vispe paint stack.tif --page 3 -o painted --no-browser
        vispe paint series/*.tif --classes matrix,pore -o painted
    """
    import sys
    import webbrowser
    from json import dumps

    from vispe.cli.terminal import one_line
    from vispe.errors import counted
    from vispe.segment.live.paint.open_page import open_paint
    from vispe.segment.live.paint.server import Server

    session = open_paint(
        images, out, classes or (), page=page, channel=channel, axes=axes, crop=crop, mask=mask, features=features,
        classifier=classifier, stored_features=stored_features, seed=seed, device=device, force=force,
        watch=lambda text: print(f"vispe: note: {one_line(text)}", file=sys.stderr),
    )  # fmt: skip
    with Server(session, port) as server:
        facts = {"address": server.address, "out": str(session.out)}
        print(dumps(facts) if json else f"vispe paint: {server.address}", flush=True)
        print("Press Ctrl-C to stop.", file=sys.stderr, flush=True)
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            if not session.saved:
                folder = one_line(str(session.out))
                count = sum(len(item.strokes) for item in session.images)
                print(f"\nvispe: not saved to {folder}: {counted(count, 'stroke')}.", file=sys.stderr)
