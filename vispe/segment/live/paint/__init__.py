"""A window in the browser in which strokes are painted and the result follows: `vispe paint`."""
