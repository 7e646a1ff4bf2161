"""What /debug/kv shows of a cache with shared, cached, and swapped blocks and waiting sequences."""

from typing import Any

from engine_worker.kv.preemption import HostTierConfig, PreemptionMode
from tests.builders import FakeModelRunner, make_engine, make_prompt, make_request

HOST_TIER = HostTierConfig(num_blocks=9, preemption_mode=PreemptionMode.SWAP)


def test_kv_view_blocks_sequences_and_events_agree() -> None:
    engine = make_engine(FakeModelRunner(num_blocks=8), num_blocks=8, host_tier=HOST_TIER)  # 7 blocks of 4
    for name in ("a", "b"):
        engine.add_request(make_request([*make_prompt(4), ord(name), 5, 6], name, max_tokens=12, ignore_eos=True))
    view = engine.kv_view()
    assert [sequence["status"] for sequence in view["sequences"]] == ["waiting", "waiting"]
    while not engine.stats().num_swapped:
        engine.step()
    view = engine.kv_view()
    running, swapped = view["sequences"]
    assert (running["status"], swapped["status"], view["waits_for"]) == ("running", "swapped", "blocks")
    assert (swapped["block_table"], swapped["num_preemptions"]) == ([], 1)
    assert len(swapped["host_block_table"]) == view["host"]["num_active_blocks"] == 4
    assert view["device"]["states"].count("a") == len(running["block_table"]) == view["device"]["num_active_blocks"]
    (event,) = [event for event in engine.kv_events(0)["events"] if event["kind"] == "swap_out"]
    assert (event["request_id"], event["num_blocks"], event["num_tokens"]) == ("b", 4, swapped["num_computed_tokens"])
    totals = view["totals"]
    assert (totals["swap_preemptions"], totals["swapped_out_blocks"], totals["swapped_in_blocks"]) == (1, 4, 0)


def test_kv_view_counts_references_of_shared_blocks() -> None:
    engine = make_engine()
    for name in ("a", "b", "c"):
        engine.add_request(make_request([*make_prompt(4), ord(name)], name, max_tokens=12, ignore_eos=True))
    engine.step()
    view = engine.kv_view()
    assert (view["device"]["ref_counts"], view["device"]["states"][:5]) == ({"1": 3}, "psaaa")


def test_kv_view_names_running_slot_as_awaited_resource() -> None:
    engine = make_engine(max_num_seqs=1)
    for name in ("a", "b"):
        engine.add_request(make_request(5, name, max_tokens=12, ignore_eos=True))
    engine.step()
    assert engine.kv_view()["waits_for"] == "a running slot"


def test_kv_view_has_a_table_per_group() -> None:
    windows = (0, 8)
    engine = make_engine(FakeModelRunner(windows=windows), windows=windows)  # blocks of 4
    engine.add_request(make_request(17, "a", max_tokens=12, ignore_eos=True))
    for _ in range(3):
        engine.step()
    view, stats = engine.kv_view(), engine.stats().kv_cache
    (sequence,) = view["sequences"]
    full, window = sequence["tables"]
    assert (view["windows"], full["window"], window["window"]) == ([0, 8], 0, 8)
    assert (len(full["blocks"]), full["num_released_blocks"]) == (5, 0)
    assert (len(window["blocks"]), window["num_released_blocks"]) == (3, 2)
    assert sequence["block_table"] == full["blocks"] + window["blocks"]
    assert stats.group_blocks == (5, 3) and stats.num_active_blocks == 8


def test_kv_view_has_recurrent_states() -> None:
    host_tier = HostTierConfig(num_blocks=9, num_state_blocks=3, preemption_mode=PreemptionMode.SWAP)
    sizes: dict[str, Any] = {"num_blocks": 8, "num_state_blocks": 5}
    engine = make_engine(FakeModelRunner(**sizes), **sizes, host_tier=host_tier)
    for name in ("a", "b"):
        engine.add_request(make_request([*make_prompt(4), ord(name), 5, 6], name, max_tokens=12, ignore_eos=True))
    while not engine.stats().num_swapped:
        engine.step()
    view = engine.kv_view()
    running, swapped = view["sequences"]
    device, host = view["recurrent_states"]["device"], view["recurrent_states"]["host"]
    assert device["states"][running["state_block"]] == host["states"][swapped["host_state_block"]] == "a"
    assert (running["host_state_block"], swapped["state_block"]) == (None, None)
    assert (device["num_active_blocks"], host["num_active_blocks"], host["num_blocks"]) == (1, 1, 2)
