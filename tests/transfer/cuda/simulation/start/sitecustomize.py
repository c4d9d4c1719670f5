"""Python imports this file as it starts; see `library.environment`."""

from tests.transfer.cuda.simulation.library import install

install()
