"""Engines' own metrics."""

from homing.router.replicas.external.engine_metrics import Numbers, read_numbers

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="8192"} 1.0
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
"""


def test_vllm_tells_load_and_blocks() -> None:
    """Summed over its ranks; a metric whose name only begins alike is another one."""
    assert read_numbers(VLLM) == Numbers(running=5, waiting=1, kv_usage=0.25, num_blocks=8192, block_size=32)


def test_sglang_tells_load() -> None:
    """Under names of its own."""
    assert read_numbers(SGLANG) == Numbers(running=4, waiting=0, kv_usage=0.5)


def test_what_is_not_told_is_not_made_up() -> None:
    """vLLM says None for what a rank does not know yet."""
    assert (
        read_numbers('vllm:cache_config_info{num_gpu_blocks="None"} 1.0\nvllm:num_requests_running NaN\n') == Numbers()
    )
