"""What mkdocs calls while it builds the site: a line `<!-- generated: NAME -->` becomes a table."""

import re
import sys
from pathlib import Path

# mkdocs does not put the root there.
sys.path.insert(0, str(Path(__file__).parents[2]))

from docs.generate.reference import TABLES

PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return a page's text with its generated parts."""
    return PLACE.sub(lambda found: TABLES[found[1]](), markdown)
