"""Collocation: a language model and an embedding model share the memory of one GPU.

Source: "SLO-Aware KV Cache Management for Collocated LLM-Embedding Services", a proposal without
published results.

Idea. The KV cache of answers grows while they are generated; an embedding pass takes much memory
for a moment. Side by side on one GPU each can starve the other. One policy that knows both models,
their memory and their SLOs admits requests, shares the memory out and chooses which request to
evict.

Which file answers what:

- Algorithm 1 (admit, defer or reject by the memory that all requests would hold until they end):
  `collocation_policy.Collocation`; system `collocation`.
- §3.1 (speculative reservation for high priority): `collocation_policy.Collocation`.
- Algorithm 2 (quota between the two models, moved towards the one about to be late):
  `collocation_policy.Collocation`, `collocation_policy.smooth_adjust`.
- Algorithm 3 (eviction by priority, slack and cost of recomputation):
  `collocation_policy.Collocation`.
- Ablations: `ablations.CollocationLru` (LRU in place of Algorithm 3; `collocation-lru`),
  `ablations.CollocationOpen` (without Algorithm 1; `collocation-open`).
- Baselines (`static-split` of §3.3, `collocated-fcfs` of §3.4, `merged-batches` of §5.4):
  `collocation_baselines.py`.

In other folders:

- What such a policy sees and answers: `core/collocated_policy.py`.
- Forecast of the embedding load: `predictors/load_forecaster.py`.
- Beside a real vLLM:
  `servers/plugin/embedding_scheduler.py`, `servers/gateway/collocated_gateway.py`.
- The embedder and its memory: `engine/simulator/embedding.py`, `predictors/embedder.py`.
- §2.2 (objective; columns `llm_attainment`, `embed_attainment`, `objective`):
  `harness/results/metrics.py`.

Errata, measurements and commands: docs/papers/collocation.md.
"""
