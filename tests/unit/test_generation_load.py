"""parse_metrics on text as vLLM 0.32 writes it."""

from __future__ import annotations

from asyncgrpo_core.server.load import LoadSample, parse_metrics

TWO_ENGINES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.75
vllm:num_preemptions_total{engine="0",model_name="policy"} 2.0
vllm:num_preemptions_total{engine="1",model_name="policy"} 5.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="50"} 1.0
python_gc_objects_collected_total{generation="0"} 10.0
"""


def test_usage_is_the_maximum_and_the_rest_are_sums_over_engines() -> None:
    """F072, F073, F110."""
    assert parse_metrics(TWO_ENGINES) == LoadSample(0.75, 7.0, 1.0, 7.0, 2400)


def test_missing_metrics_are_none() -> None:
    assert parse_metrics("# nothing here\nfoo 1\n") == LoadSample()


def test_block_count_that_is_not_known_yet_is_none() -> None:
    text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert parse_metrics(text).kv_cache_tokens is None
