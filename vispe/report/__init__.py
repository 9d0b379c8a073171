"""How results are shown: statistics, tables, figures and pages."""
