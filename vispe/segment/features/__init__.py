"""What a pixel is described by: filters, tokens, and how they are cut, kept and put together."""
