"""Prism: several models share GPUs; models come and go, and memory is shared page by page.

Source: Yu et al., "Prism: Unleashing GPU Sharing for Cost-Efficient Multi-LLM Serving".

Idea. Of many models few are popular, most are idle most of the time, and which ones changes within
minutes. If the KV caches and weights of all models on a GPU come from one pool of pages, and
models are placed, evicted and activated by demand, fewer GPUs serve them within the same SLOs.

Which file answers what:

- §6.2 (placement at regular times, activation on demand, eviction): `prism_controller.py`; system
  `prism`.
- Algorithm 1, appendix A.1 (place models so that the largest KV pressure ratio is small, migration
  threshold, tensor-parallel parts apart): `kv_pressure.py`.
- §6.2 (idle models leave under memory pressure, the largest SLO first):
  `prism_controller.eviction_order`; the threshold from the distribution of idle gaps is in
  `core/idle_gaps.py`.
- Algorithm 2, §6.3 (one queue for all models of a GPU, Moore-Hodgson): `shared_queue.py`,
  admission to the engines in `prism_controller.Queues`.
- Algorithm 2 on one instance with one model: `prism_local.py`; system `prism-queue`.

In other folders:

- Moore-Hodgson order: `shared/moore_hodgson.py`.
- §5.1 (2 MiB pages shared by models): `core/kv/pages.py`.
- §5.2 (activation: engine pool, parallel loading): `predictors/activation.py`.
- §7.1 (models share a GPU's compute under MPS): `engine/simulator/shared_gpu.py`.
- The same placement and queue before real servers: `servers/gateway/served_gpus.py`,
  `servers/launch/model_lifecycle.py`, `servers/launch/model_servers.py`.
- SLOs from P95 on a dedicated GPU (§7.1): `harness/experiments/derived_slo.py`.
- Baselines `muxserve` (MuxServe++), `qlm`, `static-partition`: files of these names in
  `policies/`.

Errata, measurements and commands: docs/papers/prism.md.
"""
