"""A command that runs quietly puts the log's level back as it was."""

from __future__ import annotations

import logging

from poem.cli._quiet import quiet


def test_the_log_is_as_loud_as_before() -> None:
    log = logging.getLogger("poem")
    before = log.level
    try:
        log.setLevel(logging.DEBUG)
        with quiet():
            assert log.level == logging.ERROR
            with quiet(False):
                assert log.level == logging.ERROR
        assert log.level == logging.DEBUG
    finally:
        log.setLevel(before)
