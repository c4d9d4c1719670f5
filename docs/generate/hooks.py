"""What mkdocs calls while it builds the site: `<!-- generated: NAME -->` becomes a table.

The line after it, which says so to who reads the file, goes away.
"""

import re
import sys
from pathlib import Path

# mkdocs does not put the root there.
sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.generate.reference import TABLES

PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->\n.*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return a page's text with its generated parts."""
    return PLACE.sub(lambda found: TABLES[found[1]](), markdown)
