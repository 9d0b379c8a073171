"""The encodings: one file each, named after it, in a folder for each kind; imported when it is first asked for."""
