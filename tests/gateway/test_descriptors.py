"""Log one line when file descriptors run out, and one when some are free again."""

import logging
import os
import resource

import pytest

from gateway.http.descriptors import DescriptorCheck


def test_descriptor_exhaustion_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    check = DescriptorCheck()
    check.check()
    assert caplog.records == []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_free = os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, hard))  # every descriptor below is open
    try:
        check.check()
        check.check()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    check.check()
    check.check()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert str(next_free) in caplog.records[0].getMessage()
