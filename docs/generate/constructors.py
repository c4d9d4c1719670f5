"""A griffe extension: a class of the Rust extension has its constructor's signature on its page.

The stub declares `__new__`, as the extension defines it; mkdocstrings looks for `__init__` only.
"""

from typing import Any

import griffe


class Constructors(griffe.Extension):
    """Copy each `__new__` of a stub to `__init__`."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add `__init__` to a class that has `__new__` alone."""
        new = cls.members.get("__new__")
        if isinstance(new, griffe.Function) and "__init__" not in cls.members:
            init = griffe.Function(
                "__init__", lineno=new.lineno, endlineno=new.endlineno, parameters=new.parameters
            )
            cls.set_member("__init__", init)
