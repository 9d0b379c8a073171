"""Attention backends, each with `unsupported_reason(call)` and `run(call)`."""
