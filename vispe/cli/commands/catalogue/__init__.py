"""Commands that list, describe, draw and cite encodings and position schemes."""
