"""One self-contained HTML page with charts and tables: the look of all kvstow reports.

A page fetches nothing. Its script draws the charts as SVG, for any width, in light and dark. The
charts alone can be a PNG, too (`picture`), if matplotlib is installed.

May import: nothing of kvstow.
"""

from kvstow.report.page import Chart, Part, Series, Table, Text, html_page

__all__ = ["Chart", "Part", "Series", "Table", "Text", "html_page"]
