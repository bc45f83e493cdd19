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
        value = f"{self.value:g} {self.unit}"
        return (
            f"{self.quantity}, {value} (`{self.where}`): {self.fitted_to}. Used by {self.used_by}."
        )


_FIG_9 = "fitted to Fig. 9"
_RATIOS = f"{_FIG_9}, ratios of naive to pooled starts (three numbers, three constants)"
_ACTIVATION = "predictors/activation.py"
_NAIVE = '`activation = "naive"` of `prism`, `swap = "start"` of `qlm`'

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
        "device map `uellm-even-table-2-1` of the suite `uellm-deploy`, and topology "
        "`uellm-3090-v100`",
    ),
)  # fmt: skip


def fitted_to(paper: str) -> tuple[FittedConstant, ...]:
    """The constants that were fitted to a paper."""
    return tuple(constant for constant in FITTED_TO_PAPERS if constant.paper == paper)
