"""BanaServe: separate prefill and decode, one KV store for all, layers and heads that migrate.

Source: He, "Batch Scheduling and KV Cache Optimization for Large Language Model Inference"
(master's thesis, 2026), chapter 4.

Idea. Separate prefill and decode instances do not disturb each other, but their ratio is fixed
while the load is not, and prefix caches that belong to one instance draw requests to it. BanaServe
moves layers or attention heads from loaded to idle GPUs, and keeps prefixes in a store that all
instances read, so that requests can be routed by load alone.

Which file answers what:

- §4.2 to §4.4 (orchestrator: routing, hand-over, control step): `banaserve_controller.py`; system
  `banaserve`.
- Algorithm 4-1, Eq. 4-28 to 4-31 (which modules move from which device to which):
  `module_balancing.py`.
- §4.3.1, §4.3.2, §4.4.3, §4.4.4 (which moves are possible now; making one): `modules.py`.
- Eq. 4-1 to 4-9 as costs, Eq. 4-24 (bytes and seconds of a move, extra time of every later step),
  §4.3.1, §4.3.2 (step time of an instance with modules on other GPUs): `module_costs.py`.
- Eq. 4-16 to 4-18, 4-23, 4-26 (latencies, use and throughput that a placement is predicted to
  have): `prediction.py`. Eq. 4-25, 4-27 (budgets; the best placement): `placement_search.py`.
- Eq. 4-15, 4-16 (objective; column `banaserve_objective`): `objective.py`.

In other folders:

- Algorithm 4-2, Eq. 4-33 (load-aware dispatch): `load_aware.py`, also the router `load-aware`.
- Eq. 4-19 to 4-23, 4-28 (compute and memory use of an instance): `shared/instance_load.py`.
- §4.3.3 (global KV store, three tiers): `core/kv/kv_store.py`, `core/kv/kv_store_manager.py`,
  `shared/kv_store_parameters.py`.
- Eq. 4-10 to 4-14 (layer pipeline): `core/kv/layer_pipeline.py` and `vllm_layerwise.py` simulated,
  `engine/torch/pipeline.py` run.
- Eq. 4-1 to 4-9 executed on real processes: `engine/torch/distributed.py`, `attention.py`,
  `migrating.py`.
- Baselines `distserve`, `splitwise`, `mooncake`, `memserve`, `llumnix`: files of these names.

Errata, measurements and commands: docs/papers/banaserve.md.
"""
