"""UELLM: static batches of requests with like SLOs and like predicted output lengths.

Source: He, "Batch Scheduling and KV Cache Optimization for Large Language Model Inference"
(master's thesis, 2026), chapter 3.

Idea. A static batch runs until its longest answer ends, so short answers are padded, and a request
with a tight SLO waits for the long answer of a request with a loose one. UELLM predicts the bucket
of each output length, batches requests with like SLOs and like lengths (SLO-ODBS), corrects the
reserved KV memory while answers grow, and maps the layers of a model to unequal GPUs (HELR).

Which file answers what:

- Algorithm 3-1 (SLO-ODBS, phases 1 to 3): `slo_odbs.py`; systems `slo-odbs`, `slo-dbs`, `odbs`.
- Algorithm 3-1, lines 5 to 12 and 20, Eq. 3-3 to 3-5 (when a batch closes):
  `slo_odbs.BatchRule` and `OpenBatch`.
- §3.4.3, the variants with one of the two terms: `slo_odbs.SloDbs` (SLO alone), `slo_odbs.Odbs`
  (length alone).
- Eq. 3-2 (resource profile of a request): `slo_odbs.Profile`.
- §3.3.3 (online monitor of predicted lengths): `length_monitor.py`.
- Eq. 2-2 (padding to minimise), baseline S3: `s3.py`; system `s3`.
- Algorithm 3-1 on a server that batches continuously (not in the thesis):
  `slo_odbs_continuous.py`.
- Figure 3-3 (one batch of three answers against two batches): `tests/harness/policies`.

In other folders:

- Eq. 3-1, §3.3.1 (prediction of output lengths): `predictors/lengths/`,
  `workloads/length_buckets.py`.
- Algorithm 3-2 (HELR) and the exact optimum, Morphling: `tuner/placement/`.
- Execution of padded static batches:
  `engine/simulator/static.py`, `engine/torch/executed_static.py`.
- Baselines `fifo`, `sjf`, `ljf`: files of these names in `policies/`.

Errata, measurements and commands: docs/papers/uellm.md.
"""
