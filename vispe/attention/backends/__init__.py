"""The backends: each has `refuses(call)`, which says why it cannot serve a call, and `run(call)`."""
