"""Programs that write parts of the documentation: the diagrams, and tables read from the code."""
