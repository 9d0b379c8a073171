"""Schemes in serving engines: coordinates as row indices into a table of cosines and sines.

rows = Rows.reaching(create_scheme("videorope"), 32768)
(request,) = rows.requests(Stream.of([[Text(5), Image(4, 6), Text(3)]]))  # .ids (3, 32), .delta
table = table_of(rows, frequencies)  # .cache, .axis_of_pair, .sections
"""

from vispe.multimodal.serving.table import RotaryTable, table_of
from vispe.multimodal.serving.table_rotary import TableRotary, install
from vispe.multimodal.serving.table_rows import ServedRequest, TableRows

__all__ = ["RotaryTable", "ServedRequest", "TableRotary", "TableRows", "install", "table_of"]
