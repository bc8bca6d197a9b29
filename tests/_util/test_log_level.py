"""A command that holds warnings back restores the level of the log."""

from __future__ import annotations

import logging

from poem._util.log_level import errors_only


def test_the_level_of_the_log_is_restored() -> None:
    log = logging.getLogger("poem")
    before = log.level
    try:
        log.setLevel(logging.DEBUG)
        with errors_only():
            assert log.level == logging.ERROR
            with errors_only(False):
                assert log.level == logging.ERROR
        assert log.level == logging.DEBUG
    finally:
        log.setLevel(before)
