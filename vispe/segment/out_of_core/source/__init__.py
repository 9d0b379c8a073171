"""Images of which regions are read on demand."""
