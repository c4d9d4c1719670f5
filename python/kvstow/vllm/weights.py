"""The version of the weights that the tier's blocks were computed with, read from a user's file.

vLLM builds the connector once it has loaded the weights. A file that was written meanwhile may name
those that come next. If the server loads them in place later, the file does not change any more. So
what such a file says counts as other weights each time, until it says something else.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvstow.vllm.digest import weights_named
from kvstow.vllm.identity import version_may_be_newer
from kvstow.vllm.options import WHERE

logger = logging.getLogger("vllm." + __name__)


class WeightsVersion:
    """The content of the file when it was last accepted. Any change means other weights."""

    def __init__(
        self, path: str | None, *, tier: str = "the host tier", option: str = f"{WHERE}."
    ) -> None:
        """Read the file. Without a path, the weights never change.

        Args:
            path: the file.
            tier: what other weights empty, for messages.
            option: where the option is, for messages.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._path, self._tier = None if path is None else Path(path), tier
        self._content: bytes | None = None
        # What the file says if that may be of other weights than those that are loaded.
        self._doubtful: bytes | None = None
        if path is None:
            return
        self._content = weights_named(path, option)
        if version_may_be_newer(path):  # after the read, and so for what was read as well
            self._content, self._doubtful = None, weights_named(path, option)
            logger.warning(
                "kvstow: weights_version_path %s has changed since this process began, perhaps "
                "after vLLM loaded the weights. So until it says something else, each reset "
                "empties %s, and below the host nothing is warm or shared. Write the "
                "file before the server starts",
                path,
                tier,
            )

    def changed(self, *, remember: bool) -> bool:
        """Whether the file has changed. A file that cannot be read counts as changed, to be safe.

        Args:
            remember: whether the next call compares with the present content. If not, any content
                counts as changed in the next call, also the one from before.
        """
        if self._path is None:
            return False
        try:
            content = self._path.read_bytes()
        except OSError as error:
            logger.warning(
                "kvstow: weights_version_path %s cannot be read (%s), so this reset empties %s. "
                "Restore the file, or each reset empties the tier",
                self._path,
                error.strerror,
                self._tier,
            )
            self._content = None
            return True
        if content == self._doubtful:
            return True
        self._doubtful = None
        if content == self._content:
            return False
        self._content = content if remember else None
        logger.info(
            "kvstow: %s names other weights, so this reset empties %s", self._path, self._tier
        )
        return True
