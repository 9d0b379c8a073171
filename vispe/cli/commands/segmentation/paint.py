"""`vispe paint`: interactive segmentation in the browser."""

from typing import Literal

POSITIONALS = ("image",)
SHORT = {"out": "-o"}


def paint(
    image: str,
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
    NAME_seg.png. Press Ctrl-C to stop.

    Args:
        image: an image file.
        out: output folder; default NAME_paint next to the image.
        classes: names of the classes 1, 2, ..., separated by commas; default background,object. More can be added in
            the window.
        classifier: as for vispe segment; ensemble (default) shows the result of logistic first.
        features: filters, tokens of vispe_micro, or both (default).
        crop: rows and columns of the sample, such as 0:884,0:1024; other pixels are not segmented.
        mask: image file with 0 for pixels that are not segmented.
        port: port of the server; 0 selects a free one.
        browser: open the browser; --no-browser only prints the URL.
        json: print the URL and OUT as JSON.

    Examples:
        vispe paint steel.png --classes matrix,carbide
        vispe paint stack.tif --page 3 -o painted --no-browser
    """
    import sys
    import webbrowser
    from json import dumps

    from vispe.cli.terminal import one_line
    from vispe.segment.live.paint.open_page import open_paint
    from vispe.segment.live.paint.server import Server

    session = open_paint(
        image, out, classes or (), page=page, channel=channel, axes=axes, crop=crop, mask=mask, features=features,
        classifier=classifier, stored_features=stored_features, seed=seed, device=device, force=force,
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
                print(
                    f"\nvispe: {len(session.strokes)} stroke(s) were not saved to {folder}.", file=sys.stderr
                )
