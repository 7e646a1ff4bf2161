"""The settings of all programs, by name; and which PAGESTREAM_ variables none of them reads.

The programs do not import each other, so their names are listed here. tests/test_architecture.py compares the lists
with the programs: a new option must be added here and to the changelog. Its help text is its documentation.
"""

import sys
from collections.abc import MutableMapping

from shared.settings import ENVIRONMENT_PREFIX, closest, is_service_link

SERVE = """
    model revision served_model_name models_file host port metrics_port gateways workers tensor_parallel_size redis_url
    store_namespace store_max_memory_bytes max_model_len files_dir drain_seconds log_format otlp_traces_endpoint
    vllm_metric_names
"""
GATEWAY = """
    model served_model_name models_file redis_url store_namespace host port reuse_port own_port api_key api_keys_file ui
    ui_history allowed_hosts open_routes allow_unauthenticated
    max_model_len max_num_queued_reqs max_num_streams max_bytes_in_flight
    sse_keep_alive_seconds write_stall_seconds body_timeout_seconds
    max_num_queued_tokens prefix_affinity durable_accept durable_accept_timeout_seconds
    default_timeout_seconds default_queue_timeout_seconds no_worker no_worker_wait_seconds
    max_timeout_seconds
    default_detach_seconds max_detach_seconds drain_seconds
    chat_template tool_call_parser reasoning_parser generation_config task force_include_usage
    files_dir max_file_bytes max_files_bytes max_files_bytes_per_key files_retention_seconds max_batch_concurrency
    check exit_with_parent log_format otlp_traces_endpoint vllm_metric_names
"""
BATCHES = GATEWAY + "metrics_host metrics_port"
WORKER = """
    model device dtype model_impl load_format quantization int4_group_size max_model_len
    tensor_parallel_size enable_expert_parallel rendezvous_endpoint num_threads kv_cache_dtype block_size
    kv_cache_memory_bytes kv_cache_memory_ratio swap_space_bytes max_num_seqs max_num_batched_tokens
    deterministic cudagraph_mode enforce_eager
    preemption_mode offloaded_prefixes enable_prefix_caching max_prefill_tokens_with_decodes async_scheduling
    speculative_config served_model_name redis_url store_namespace worker_id drain_seconds step_timeout_seconds
    dead_after_seconds check
    exit_with_parent metrics_host metrics_port log_format otlp_traces_endpoint vllm_metric_names
"""
# PAGESTREAM_CONFIG names the file of settings; docker-compose.yml reads the others.
_OTHER_VARIABLES = "config registry version"
_KNOWN = frozenset((SERVE + BATCHES + WORKER + _OTHER_VARIABLES).upper().split())


def discard_unread_variables(environ: MutableMapping[str, str], program: str) -> None:
    """Warn on stderr of each PAGESTREAM_ variable that no program reads, and remove it, so that no child repeats it."""
    for name in [name for name, value in environ.items() if _is_unread(name, value)]:
        del environ[name]
        close = closest(name.removeprefix(ENVIRONMENT_PREFIX), _KNOWN)
        hint = f"; did you mean {ENVIRONMENT_PREFIX}{close}?" if close else ""
        sys.stderr.write(f"{program}: warning: no program reads {name}{hint}\n")


def _is_unread(name: str, value: str) -> bool:
    word = name.removeprefix(ENVIRONMENT_PREFIX)
    return word not in (name, *_KNOWN) and not is_service_link(name, value)
