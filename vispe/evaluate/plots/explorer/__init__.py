"""Interactive figure of encodings: a self-contained HTML document for notebooks, files and the documentation."""
