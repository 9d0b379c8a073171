"""Kind rotary: queries and keys are transformed by where they are."""
