"""Commands that retrofit, convert, export and inspect models."""
