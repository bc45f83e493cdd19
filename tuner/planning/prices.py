"""Prices of GPUs: lists with one basis and one date, shipped or from a file.

basis = "our cluster, written off over four years"
date = 2026-11-01
usd_per_kwh = 0.20     # these two: energy, at the power limit of each GPU
pue = 1.3

[usd_per_gpu_hour]
h100-80g = 1.10
"rtx-3090@250w" = 0.09
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...harness.experiments.config.experiment_file import line_of, read_toml, setting_error
from ...predictors.specs import entries, gpu, gpus, price_basis
from ...workloads.errors import FileFormatError, SloBenchError, UnknownNameError

_SHIPPED = "price_lists"
_ESTIMATE = "price: estimate"  # at the end of a GPU's origin
_Usd = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PriceList(BaseModel):
    """Prices of GPUs on one basis. Fields are those of a price file (see the module)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    basis: Annotated[str, Field(min_length=1)]
    date: datetime.date
    source: str = ""
    estimates: frozenset[str] = frozenset()  # GPUs whose price is not a published one
    usd_per_kwh: _Usd = 0.0
    pue: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    owned: bool = False
    usd_per_gpu_hour: Annotated[dict[str, _Usd], Field(min_length=1)]

    @property
    def title(self) -> str:
        """Basis and date in one line."""
        energy = ""
        if self.usd_per_kwh:
            energy = f" + {self.usd_per_kwh:g} USD per kWh × PUE {self.pue:g}, at the power limit"
        return f"{self.basis}, {self.date}{energy}"

    def price(self, name: str) -> float | None:
        """USD per hour of one GPU, with its energy; None: the list does not have it.

        A GPU with a power cap (`rtx-3090@250w`) has the price of the GPU unless it is listed.
        """
        listed = self._listed(name)
        if listed is None:
            return None
        return listed + self.usd_per_kwh * self.pue * gpu(name).power_w / 1000 or None

    def price_off(self, name: str) -> float:
        """USD per hour of one GPU that is off: a rented one is given back, one's own is not."""
        return (self._listed(name) or 0.0) if self.owned else 0.0

    def _listed(self, name: str) -> float | None:
        base = self.usd_per_gpu_hour.get(name.partition("@")[0])
        return self.usd_per_gpu_hour.get(name, base)

    def changed(self, prices: Mapping[str, float]) -> PriceList:
        """The list with some prices in USD per hour in place of its own."""
        if not prices:
            return self
        for name in prices:
            gpu(name)  # unknown names are errors
        named = ", ".join(prices)
        return self.model_copy(
            update={
                "basis": f"{self.basis}, with --price for {named}",
                "usd_per_gpu_hour": {**self.usd_per_gpu_hour, **prices},
            }
        )


def default_prices() -> PriceList:
    """The catalogue's prices, with those of the user's own catalogue files."""
    listed = {n: spec for n, spec in gpus().items() if spec.price_per_hour_usd}
    table = price_basis()
    user_files = sorted({str(entry["_file"]) for entry in entries("gpus").values()} - {"gpus.toml"})
    if user_files:
        table["basis"] += f", with GPUs of {', '.join(user_files)}"
    return PriceList(
        usd_per_gpu_hour={name: spec.price_per_hour_usd for name, spec in listed.items()},
        estimates=frozenset(n for n, spec in listed.items() if spec.origin.endswith(_ESTIMATE)),
        **table,
    )


def shipped_lists() -> list[str]:
    """Names of price lists that come with the package, beside the catalogue's."""
    folder = files(__package__) / _SHIPPED
    return sorted(path.name.removesuffix(".toml") for path in folder.iterdir())


def read_prices(name_or_path: str) -> PriceList:
    """A shipped list by name, or that in a file.

    Raises:
        UnknownNameError: it is neither.
        FileFormatError: the file cannot be read, or a field in it is wrong (with its line).
    """
    path = Path(name_or_path)
    if name_or_path in shipped_lists():
        path = Path(str(files(__package__) / _SHIPPED / f"{name_or_path}.toml"))
    elif path.suffix != ".toml" and not path.is_file():
        raise UnknownNameError("price list", name_or_path, [*shipped_lists(), "FILE.toml"])
    table, text = read_toml(path)
    try:
        prices = PriceList.model_validate(table)
    except ValidationError as error:
        problem = setting_error(error, PriceList, "field")
        raise FileFormatError(path, line_of(text, problem.location), str(problem)) from None
    for name in prices.usd_per_gpu_hour:
        try:
            gpu(name)
        except SloBenchError as error:
            line = line_of(text, ("usd_per_gpu_hour", name))
            raise FileFormatError(path, line, str(error)) from None
    return prices
