"""The documentation; `generate` has the programs that write parts of it."""
