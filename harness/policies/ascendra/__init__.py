"""Ascendra: low-priority instances for throughput, high-priority ones for urgent requests.

Source: Ikram and Li, "Ascendra: Dynamic Request Prioritization for Efficient LLM Serving".

Idea. A request becomes urgent as its TTFT deadline comes near. Instances that schedule out of
order for throughput (LP) make some requests late; a few instances reserved for urgent requests
(HP) save them. Requests move before their prefill begins, so no KV crosses the network.

Which file answers what:

- §4 (controller: LP instances in turn, subgroups of §8.7): `ascendra_controller.py`; system
  `ascendra`.
- §6.1 (tickets of idle HP instances, one outstanding): `ascendra_controller.Ascendra.route`.
- §5.3 (a request that would be late is offloaded to the HP instance with the shortest queue):
  `low_priority.AscendraLp.timeout` decides, `ascendra_controller.Ascendra.on_returned`
  chooses the instance.
- Algorithm 1, §5.2 (value functions), §5.4 (decodes first), budgets of compute, memory and tokens:
  `low_priority.py`; alone system `ascendra-lp`.
- §6 (prompts before decodes), §6.2 (elastic batch from past decode lengths), §8.5 (safe while 10 %
  of memory is free): `high_priority.py`.
- §6.3, §8.6 (drop requests past their TTFT SLO under overload): parameter `overdue` of both.
- Figure 1 (five requests on two GPUs): `tests/harness/policies`.

In other folders:

- Appendix A (FLOPs and bytes of a mixed batch, regression refitted online):
  `predictors/refitted.py`.
- The controller before real servers: `servers/gateway/controlled.py`.
- Baselines that drop too (§8.6): `shared/timeouts.py`.

Errata, measurements and commands: docs/papers/ascendra.md; docs/papers/prefill-order.md compares
the LP order with Prism's.
"""
