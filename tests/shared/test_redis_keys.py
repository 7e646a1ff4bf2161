"""Store key names are a contract between processes of different versions. Change them only on purpose."""

import pytest

from shared.redis_keys import PRIORITY_CLASSES, RESUMED, RedisKeys, store_namespace


def test_key_names_are_pinned():
    keys = RedisKeys("org/model")
    assert keys.queue("interactive") == "{org/model}:q:interactive"
    assert keys.queues == (
        "{org/model}:q:resumed",
        "{org/model}:q:newer",
        "{org/model}:q:interactive",
        "{org/model}:q:batch",
    )
    assert keys.request("7f") == "{org/model}:r:7f"
    assert keys.journal("7f") == "{org/model}:j:7f"
    assert keys.fence("w0.1") == "{org/model}:w:w0.1"
    assert keys.dead_letters == "{org/model}:dlq"
    assert keys.gateway_channel("g") == "{org/model}:gw:g"
    assert keys.control_channel("w0.1") == "{org/model}:ctl:w0.1"
    assert keys.heartbeat_channel == "{org/model}:hb"


def test_namespace_is_part_of_each_name():
    assert RedisKeys("org/model", "blue").queue("batch") == "{blue|org/model}:q:batch"
    assert RedisKeys("m", "blue").heartbeat_channel == "{blue|m}:hb"


@pytest.mark.parametrize("text", ["a|b", "{a}", "a b", "x" * 65])
def test_namespace_with_other_characters_is_refused(text):
    with pytest.raises(ValueError, match="expected up to 64 letters"):
        store_namespace(text)


@pytest.mark.parametrize("name", ["", "a{b", "a}b"])
def test_model_name_with_braces_is_refused(name):
    with pytest.raises(ValueError, match="served model name"):
        RedisKeys(name)


def test_queue_of_unknown_class_is_refused():
    with pytest.raises(ValueError, match="interactive, batch"):
        RedisKeys("m").queue("urgent")
    assert RESUMED not in PRIORITY_CLASSES  # clients cannot select it
