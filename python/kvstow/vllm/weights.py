"""Which weights the tier's blocks were computed with, by what the user says in a file."""

from __future__ import annotations

import logging
from pathlib import Path

from kvstow import ConfigError
from kvstow.vllm.options import WHERE

logger = logging.getLogger("vllm." + __name__)


class WeightsVersion:
    """What a file said when it last counted; nothing of its content is understood."""

    def __init__(self, path: str | None) -> None:
        """Read it; without a path, the weights never change.

        Raises:
            ConfigError: it cannot be read.
        """
        self._path = None if path is None else Path(path)
        self._content: bytes | None = None
        if self._path is not None:
            try:
                self._content = self._path.read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"{WHERE}.weights_version_path is {path!r}, which cannot be read "
                    f"({error.strerror}); write a line there that names the weights"
                ) from error

    def changed(self, *, remember: bool) -> bool:
        """Whether it says something else now; also if it cannot be read, to be on the safe side.

        Args:
            remember: what it says now is compared with the next time, no longer what it said.
        """
        if self._path is None:
            return False
        try:
            content = self._path.read_bytes()
        except OSError as error:
            logger.warning(
                "kvstow: weights_version_path %s cannot be read (%s): the host tier is emptied",
                self._path,
                error.strerror,
            )
            self._content = None
            return True
        if content == self._content:
            return False
        if remember:
            self._content = content
        logger.info("kvstow: other weights, says %s: the host tier is emptied", self._path)
        return True
