"""Where a command's own log goes: RUN/logs/flow.log. The console stays for progress and results."""

from __future__ import annotations

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_file(path: Path) -> logging.Handler:
    """Send everything that is logged in this process to a file, and nothing to the console.

    Call it again after importing a library that configures logging for itself (Prefect does): the handlers that
    write to the console are taken away then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = next((h for h in logging.getLogger().handlers if _writes_to(h, path)), None)
    if handler is None:
        handler = logging.FileHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for logger in [root, *_known_loggers()]:
        was_silent = not logger.propagate and logger is not root
        for old in [h for h in logger.handlers if _is_console(h)]:
            logger.removeHandler(old)
            if was_silent and handler not in logger.handlers:
                logger.addHandler(handler)
    if handler not in root.handlers:
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in ("asyncgrpo_core", "prefect"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    return handler


def close_remote_handlers() -> None:
    """Send what handlers still hold and take away all but the file: their server is about to be stopped.

    Prefect's handler sends logs to its API from a background thread; it would try in vain for tens of seconds.
    """
    for logger in [logging.getLogger(), *_known_loggers()]:
        for handler in list(logger.handlers):
            handler.flush()
            if not isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)


def _known_loggers() -> list[logging.Logger]:
    return [item for item in logging.Logger.manager.loggerDict.values() if isinstance(item, logging.Logger)]


def _is_console(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)


def _writes_to(handler: logging.Handler, path: Path) -> bool:
    return isinstance(handler, logging.FileHandler) and Path(handler.baseFilename) == path.absolute()
