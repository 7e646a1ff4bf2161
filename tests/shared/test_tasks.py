"""Tasks that end together."""

import asyncio
import gc
import logging

import pytest

from shared.tasks import run_until_first_ends


async def fail(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def fail_when_cancelled(error: Exception) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise error


async def test_all_that_raise_the_same_error_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="first"):
        await run_until_first_ends(
            fail(ValueError("first")), fail(ValueError("second")), fail_when_cancelled(ValueError("third"))
        )
    gc.collect()  # asyncio reports errors that nobody read when their task is deleted
    assert caplog.records == []


async def test_another_error_beside_the_raised_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="first"):
        await run_until_first_ends(fail(ValueError("first")), fail_when_cancelled(KeyError("other")))
    assert [record.getMessage() for record in caplog.records] == ["task: failed beside another: KeyError('other')"]
