"""Settings of experiments under which mechanisms act."""

SEVERAL = {
    "models": "fleet(llama-3.1-8b*2, qwen2.5-7b*2, mistral-7b*2, qwen3-8b*2)",
    "gpu": "h100-80g",
    "gpus": 2,
    "slo": "ttft=0.5",
    "overlong_requests": "reject",
}
TALKS = {"workload": "sharegpt", "sessions": "sessions(4,3)", "num_gpu_blocks": 1500}
BESIDE = {"workload": "collocated(1:1)", "embedder": "bge-m3", "num_gpu_blocks": 1500}
