"""Browser window for interactive scribbles with live results: `vispe paint`."""
