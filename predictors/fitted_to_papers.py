"""Constants that were fitted to a published result: the one list, for reports and docs/papers/.

What reproduces a figure that it was fitted to is no reproduction. A constant that is fitted to a
result of a paper stands here; `tests/predictors/test_fitted_to_papers.py` holds values to the code.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import activation


@dataclass(frozen=True)
class FittedConstant:
    """One constant: the paper (its page in docs/papers/), what it is, and what it was fitted to."""

    paper: str
    quantity: str
    value: float
    unit: str
    fitted_to: str
    where: str
    used_by: str

    def sentence(self) -> str:
        """What the constant is, its value and place, what it was fitted to, and what uses it."""
        value = f"{self.value:g} {self.unit}".rstrip()
        return (
            f"{self.quantity}, {value} (`{self.where}`): {self.fitted_to}. Used by {self.used_by}."
        )


_FIG_9 = "fitted to Fig. 9"
_RATIOS = f"{_FIG_9}, ratios of naive to pooled starts (three numbers, three constants)"
_ACTIVATION = "predictors/activation.py"
_NAIVE = '`activation = "naive"` of `prism`, `swap = "start"` of `qlm`'
_UELLM_AT_ONCE = "harness/experiments/suites/uellm-at-once.toml"
_UELLM_SUITES = "the suites `uellm*`"
_LONGEST_ANSWERS = "fitted to the longest answers of the batches in the authors' logs"

FITTED_TO_PAPERS = (
    FittedConstant(
        "prism", "Bandwidth of a host link", activation.LINK_BYTES_PER_S / 1e9, "GB/s",
        f"{_FIG_9}, activation times of 8B and 14B",
        _ACTIVATION, "every start of a model of `prism`",
    ),
    FittedConstant(
        "prism", "Host links of a load", activation.LOAD_LINKS, "links",
        f"chosen so that {_FIG_9.removeprefix('fitted to ')}'s activation time of 70B is met",
        _ACTIVATION, "every start of a model of `prism`",
    ),
    FittedConstant(
        "prism", "Naive start, engine", activation.NAIVE_ENGINE_S, "s",
        _RATIOS, _ACTIVATION, _NAIVE,
    ),
    FittedConstant(
        "prism", "Naive start, process group", activation.NAIVE_GROUP_S, "s",
        _RATIOS, _ACTIVATION, _NAIVE,
    ),
    FittedConstant(
        "prism", "Naive start, host link", activation.NAIVE_BYTES_PER_S / 1e9, "GB/s",
        _RATIOS, _ACTIVATION, f"{_NAIVE}; every swap of `qlm`",
    ),
    FittedConstant(
        "uellm", "Extra time of a layer that is not on the first GPU", 2.7, "ms",
        "fitted to Table 2-1 (tokens/s against layers on GPU#0, one sequence)",
        "tuner/placement/topologies/uellm-table-2-1.toml",
        "topologies `uellm-table-2-1` and `uellm-3090-v100`",
    ),
    FittedConstant(
        "uellm", "Extra time of a layer that is not on GPU#0", 1.25, "ms",
        "fitted to the authors' logs, 57.1 against 29.5 ms a step of ten sequences with 22 such "
        "layers and without (single sequences: 0.72 ms)",
        "tuner/placement/topologies/uellm.toml",
        "topology `uellm` and the device maps `uellm-*` made with it",
    ),
    FittedConstant(
        "uellm", "The same of S³", 2.4, "ms",
        "fitted to S³'s logs, 82.4 ms a step", "predictors/device_maps/uellm-even-s3.json",
        "S³ as published in the suite `uellm-at-once`",
    ),
    FittedConstant(
        "uellm", "Start of Morphling, stress tests included", 197, "s",
        "fitted to the total times of the authors' logs",
        "predictors/device_maps/uellm-morphling-197s.json", "the suite `uellm-at-once`",
    ),
    FittedConstant(
        "uellm", "Host time of a step", 14, "ms",
        "fitted to the authors' logs, 28.5, 29.9 and 32.2 ms a step of 5, 10 and 15 sequences",
        _UELLM_AT_ONCE, _UELLM_SUITES,
    ),
    FittedConstant(
        "uellm", "Answers of ChatGLM2, median of a lognormal with sigma 0.55", 169, "tokens",
        _LONGEST_ANSWERS, _UELLM_AT_ONCE, _UELLM_SUITES,
    ),
    FittedConstant(
        "uellm", "Answers of ChatGLM2 that run to the limit", 0.5, "%",
        _LONGEST_ANSWERS, _UELLM_AT_ONCE, _UELLM_SUITES,
    ),
    FittedConstant(
        "uellm", "Factor of predictions, a fifth of whose buckets are right", 0.45, "",
        "fitted to the sizes of S³'s batches in the authors' logs, which need predictions of 102 "
        "tokens in the mean", _UELLM_AT_ONCE, "the suite `uellm-at-once`",
    ),
)  # fmt: skip


def fitted_to(paper: str) -> tuple[FittedConstant, ...]:
    """The constants that were fitted to a paper."""
    return tuple(constant for constant in FITTED_TO_PAPERS if constant.paper == paper)
