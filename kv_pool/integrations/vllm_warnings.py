"""`warn`: log a warning now, and in each process of vLLM in which logging is configured later."""

import logging
import os
from collections.abc import Callable
from typing import Any

from kv_pool.environment import explain_plugins, list_mistakes
from kv_pool.loggers import get_logger

# A child of vLLM's logger, which vLLM configures.
logger = get_logger(__name__)


class _WarningRecords:
    """A factory of log records that first logs the warnings which this process's log lacks.

    vLLM calls plugins before it configures logging, so that the first process prints a warning without
    vLLM's prefix. A forked engine process does not call them again.

    Args:
        make_record: the factory that makes the records.

    Attributes:
        logged_in: warning -> id of the process whose log has it; 0 for none.
    """

    def __init__(self, make_record: Callable[..., logging.LogRecord]) -> None:
        self._make_record = make_record
        self.logged_in: dict[str, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make_record(*args, **kwargs)
        if record.name.startswith("vllm") and logger.hasHandlers():
            process_id = os.getpid()
            missing = [message for message, where in self.logged_in.items() if where != process_id]
            # First, because logging them calls this method.
            self.logged_in |= dict.fromkeys(missing, process_id)
            for message in missing:
                logger.warning("%s", message)
        return record


_records: _WarningRecords | None = None


def warn(message: str) -> None:
    """Log a warning, and log it again with the first line of vLLM in each process whose log lacks it.

    No-op if the log of this process has it.
    """
    global _records
    if _records is None:
        _records = _WarningRecords(logging.getLogRecordFactory())
        logging.setLogRecordFactory(_records)
    process_id = os.getpid()
    if _records.logged_in.get(message) != process_id:
        _records.logged_in[message] = process_id if logger.hasHandlers() else 0
        logger.warning("%s", message)


def warn_if_unused() -> None:
    """Warn if variables of the plugin are set and vLLM does not load it. For code that it loads otherwise."""
    if explain_plugins():
        for mistake in list_mistakes():
            warn(f"kv_pool is not used: {mistake}")
