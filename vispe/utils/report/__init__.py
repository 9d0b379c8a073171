"""Presentation of results: statistics, tables, figure style and HTML reports."""
