"""A figure as plotly draws it: one definition for pages, notebooks and images.

What plotly is given holds colours of the light palette and every series; a page leaves out the
series that a reader hides (`meta.s` of a trace is its place), and shows dark colours where they are
wanted. Texts are escaped, since plotly reads `<b>`, `<a href>` and the like in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .figure import Axis, Figure, View, rate_text
from .palette import LIGHT, colour, darkened, dash, symbol

Plot = dict[str, Any]
"""`data` and `layout` of plotly; and `names` of the curves where they are no series of the page."""

ROW_PX = 40
_FRAME_PX = 46  # beside the rows
_TITLE_PX = 90  # with what is said below it, and the label of the y axis
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_NUMBER = ",.4~r"
_BAR = 0.35  # of a row
_SIDES = ("middle right", "middle left", "top right", "bottom left")  # of points' numbers
_LATE = 5.0  # times the median: a longer bar is cut
_SHORT_S = 0.5  # the middle of an axis of latencies below which they are shown in ms
_LABEL_SHARE = 0.3  # of a figure's width, for the label of a line
_LABEL_HIGH = 0.15  # of a low figure's height, for the same
_FEW_DECADES, _MANY_DECADES = 0.85, 2.0  # between them 1, 2 and 5 are labelled


@dataclass(frozen=True)
class _Unit:
    """What values are multiplied by, and what stands before and after them."""

    factor: float = 1.0
    before: str = ""
    after: str = ""

    def shown(self, value: float | None) -> float | None:
        """With four significant digits; of a share one decimal of its percents, cut off rather
        than rounded, so that 89.99 % never reads as 90 %. None where it is not finite.
        """
        if value is None or not math.isfinite(value):
            return None
        if self.after == " %":
            return math.floor(value * 1000 + 1e-6) / 10
        return float(f"{value * self.factor:.4g}")

    def all(self, values: Iterable[float | None]) -> list[float | None]:
        return [self.shown(value) for value in values]

    def text(self, value: float | None) -> str:
        """`1,234 ms` and `1.23 s`: with three significant digits, and whole numbers whole."""
        return "–" if value is None else f"{self.before}{rate_text(value)}{self.after}"

    def template(self, variable: str) -> str:
        """The same of a variable of plotly, in a text that a pointer shows."""
        return f"{self.before}%{{{variable}:{_NUMBER}}}{self.after}"


def plots(figure: Figure, names: Sequence[str], origin: str) -> dict[str, Plot]:
    """What plotly draws for every view of the figure.

    Args:
        figure: the figure.
        names: the series; curves speak of them by their place.
        origin: where the numbers come from, said below the title.
    """
    units = _units(figure)
    return {
        key: _Drawing(figure, view, names, units, origin).plot()
        for key, view in figure.views.items()
    }


def _units(figure: Figure) -> tuple[_Unit, _Unit]:
    """Of both axes over all views; the same where both show the same kind of number."""
    xs: list[float] = []
    ys: list[float] = []
    for view in figure.views.values():
        for curve in view["series"]:
            xs += curve.get("x", [sum(_known(curve.get("parts", [])))])
            ys += curve.get("y", [])
    if figure.x.format == figure.y.format:
        xs = ys = xs + ys
    return _unit(figure.x, xs), _unit(figure.y, ys)


def _unit(axis: Axis, values: Sequence[float | None]) -> _Unit:
    numbers = _known(values)
    largest = max(numbers, default=1.0)
    if axis.format == "percent":
        return _Unit(100.0, after=" %")
    if axis.format == "dollars":
        return _Unit(before="$")
    if axis.format == "seconds":
        middle_s = largest / 2
        if axis.scale == "log":
            least = min((value for value in numbers if value > 0), default=largest)
            middle_s = math.sqrt(least * largest)
        return _Unit(1000.0, after=" ms") if middle_s < _SHORT_S else _Unit(after=" s")
    if axis.format == "duration":
        for most_s, span_s, word in ((300, 1, "s"), (10800, 60, "min"), (math.inf, 3600, "h")):
            if largest < most_s:
                return _Unit(1 / span_s, after=f" {word}")
    return _Unit()


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


class _Drawing:
    """One view of one figure on its way to plotly."""

    def __init__(
        self,
        figure: Figure,
        view: View,
        names: Sequence[str],
        units: tuple[_Unit, _Unit],
        origin: str,
    ) -> None:
        self.figure, self.view, self.origin = figure, view, origin
        self.own_names = "names" in view
        self.names = [escape(name, quote=False) for name in view.get("names", names)]
        self.x, self.y = units
        self.data: list[Plot] = []
        self.shapes: list[Plot] = []
        self.above: list[Plot] = []  # labels of lines, above the plot's right end
        self.in_legend: dict[int, Plot] = {}  # of each series one curve

    def plot(self) -> Plot:
        """The figure's data and layout for Plotly."""
        rows = self.figure.kind != "lines"
        {"lines": self._lines, "bars": self._bars, "spread": self._spread}[self.figure.kind]()
        plotted = {"data": self.data, "layout": self._row_layout() if rows else self._line_layout()}
        return {**plotted, "names": list(self.view["names"])} if self.own_names else plotted

    def _series(self, place: int, part: int | None = None, **more: Any) -> Plot:
        """What every trace of a series has."""
        meta = {"s": place} if part is None else {"s": place, "part": part}
        return {"name": self.names[place], "legendgroup": f"s{place}", "meta": meta, **more}

    def _points(
        self, place: int, mode: str, x: Sequence[Any], y: Sequence[Any], **more: Any
    ) -> Plot:
        """Add lines, marks or a text that a pointer does not find and no legend has."""
        silent: Plot = {**more, "hoverinfo": "skip", "showlegend": False}
        self.data.append(self._series(place, type="scatter", mode=mode, x=x, y=y, **silent))
        return self.data[-1]

    def _in_row(self, place: int, part: int | None, **more: Any) -> Plot:
        """Add a mark in a row, of which a pointer shows the value."""
        shown: Plot = {**more, "hovertemplate": self.x.template("x"), "showlegend": False}
        self.data.append(self._series(place, part, **shown))
        return self.data[-1]

    # ---- lines ------------------------------------------------------------------------------
    def _lines(self) -> None:
        for curve in self.view["series"]:
            if "lo" in curve and len(curve["x"]) > 1:
                self._band(curve)
        if self.view.get("scatter"):
            self._scatter_diagonal()
        for curve in self.view["series"]:
            self._curve(curve)
        if self.view.get("frontier"):
            self._frontier()
        self._references()

    def _band(self, curve: View) -> None:
        points = [
            (x, middle, low, high)
            for x, middle, low, high in zip(
                *(unit.all(curve[key]) for key, unit in self._keys("x", "y", "lo", "hi")),
                strict=True,
            )
            if x is not None and middle is not None
        ]
        log = self.figure.y.scale == "log"
        upper = [middle if high is None else high for _, middle, _, high in points]
        lower = [
            middle if low is None or (log and low <= 0) else low for _, middle, low, _ in points
        ]
        xs = [x for x, *_ in points]
        place = curve["s"]
        around = [*xs, *reversed(xs)], [*upper, *reversed(lower)]
        fill: Plot = {"fill": "toself", "fillcolor": colour(place), "opacity": 0.14}
        self._points(place, "lines", *around, **fill, line={"width": 0})

    def _keys(self, *keys: str) -> list[tuple[str, _Unit]]:
        return [(key, self.x if key == "x" else self.y) for key in keys]

    def _curve(self, curve: View) -> None:
        place, figure = curve["s"], self.figure
        hollow = curve.get("hollow")
        scatter = self.view.get("scatter")
        sign = symbol(place)
        signs = [f"{sign}-open" if is_hollow else sign for is_hollow in hollow or []]
        marker: Plot = {"symbol": signs or sign, "size": 8, "color": colour(place)}
        if not hollow:
            marker["line"] = {"width": 1, "color": LIGHT["card"]}
        if not figure.markers:
            marker["maxdisplayed"] = 6  # shapes tell curves apart without colour
        trace = self._series(
            place,
            type="scatter",
            mode="markers" if scatter else "lines+markers",
            x=self.x.all(curve["x"]),
            y=self.y.all(curve["y"]),
            marker=marker,
            hovertemplate=self.x.template("x") if self._cumulative else self.y.template("y"),
            connectgaps=True,
            cliponaxis=False,
        )
        if not scatter:
            trace["line"] = {"color": colour(place), "dash": dash(place), "width": 2}
            if "opacity" in curve:
                trace |= {"mode": "lines", "opacity": curve["opacity"]}
        if place in self.in_legend:  # the last one is drawn on top
            self.in_legend[place]["showlegend"] = False
        self.in_legend[place] = trace
        low, high = (self.y.all(curve.get(key, ())) for key in ("lo", "hi"))
        if low != high:
            trace["customdata"] = [list(ends) for ends in zip(low, high, strict=True)]
            ends = " – ".join(self.y.template(f"customdata[{end}]") for end in (0, 1))
            trace["hovertemplate"] += f" ({ends})"
        if figure.hover == "point":
            labels = [escape(label, quote=False) for label in curve.get("labels", ())]
            trace |= {"text": labels} if labels else {}
            values = [
                f"{_plain(axis.label)}: {unit.template(variable)}"
                for axis, unit, variable in ((figure.x, self.x, "x"), (figure.y, self.y, "y"))
                if not figure.x.names
            ]
            lines = ["<b>%{fullData.name}</b>", *(["%{text}"] if labels else []), *values]
            trace["hovertemplate"] = "<br>".join(lines) + "<extra></extra>"
        self.data.append(trace)
        if marks := curve.get("marks"):
            sides = [_SIDES[(int(mark) - 1) % len(_SIDES)] for mark in marks]
            beside = [f"\u00a0\u00a0{mark}\u00a0\u00a0" for mark in marks]
            texts = self._points(place, "text", trace["x"], trace["y"], text=beside)
            texts |= {"textposition": sides, "textfont": {"color": LIGHT["ink"]}}
            texts["cliponaxis"] = False

    def _scatter_diagonal(self) -> None:
        """A trace, so that both axes end alike."""
        values = [
            value
            for curve in self.view["series"]
            for unit, key in ((self.x, "x"), (self.y, "y"))
            for value in _known(unit.all(curve[key]))
        ]
        lines = [line for line in self.view.get("lines", ()) if line["axis"] == "diagonal"]
        for line in lines:
            top = self.x.shown(line["value"])
            low = min((v for v in values if v > 0), default=0.0) if self._log_x else 0.0
            dots = {"color": LIGHT["soft"], "width": 1, "dash": "dot"}
            drawn = {"type": "scatter", "mode": "lines", "x": [low, top], "y": [low, top]}
            named = {"name": escape(line["label"], quote=False), "showlegend": True}
            self.data.append({**drawn, "line": dots, "hoverinfo": "skip", **named})

    @property
    def _cumulative(self) -> bool:
        """Whether systems are compared along y: the times within which a share was served."""
        return self.figure.hover == "interpolate" and self.figure.x.format == "seconds"

    @property
    def _log_x(self) -> bool:
        return self.figure.x.scale == "log"

    def _frontier(self) -> None:
        """Rings around points that no other point beats in both."""
        points = [
            (curve["s"], x, y)
            for curve in self.view["series"]
            for x, y in zip(curve["x"], curve["y"], strict=True)
        ]
        for place, x, y in points:
            if not any(a >= x and b >= y and (a > x or b > y) for _, a, b in points):
                ring = {"symbol": "circle-open", "size": 17, "color": colour(place)}
                coordinates = [self.x.shown(x)], [self.y.shown(y)]
                rings = self._points(
                    place, "markers", *coordinates, marker={**ring, "opacity": 0.75}
                )
                rings["cliponaxis"] = False

    def _references(self) -> None:
        line = {"color": LIGHT["soft"], "width": 1, "dash": "dot"}
        upright = [
            self.x.shown(reference["value"])
            for reference in self.view.get("lines", ())
            if reference["axis"] == "x" and not reference["label"]
        ]
        if upright:  # one shape, however many acts they mark
            path = "".join(f"M{value},0V1" for value in upright)
            axis_refs = {"xref": "x", "yref": "paper"}
            self.shapes.append({"type": "path", "path": path, **axis_refs, "line": line})
        for reference in self.view.get("lines", ()):
            if reference["axis"] == "diagonal" and not self.view.get("scatter"):
                ends = [x for curve in self.view["series"] for x in _known(self.x.all(curve["x"]))]
                low = min(ends, default=0.0) if self._log_x else 0.0
                highest = [
                    y for curve in self.view["series"] for y in _known(self.y.all(curve["y"]))
                ]
                top = min(self.x.shown(reference["value"]) or low, max(highest, default=low))
                where: Plot = {"x0": low, "y0": low, "x1": top, "y1": top}
                self._shape(reference["label"], line, where, "middle", "right", "bottom")
            elif reference["axis"] == "y":
                value = self.y.shown(reference["value"])
                where = {"xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
                if self._crowded_below(value):  # above the plot, where shapes have no label
                    self._shape("", line, where, "end", "right", "bottom")
                    self.above.append({"text": escape(reference["label"], quote=False), "y": value})
                else:
                    end, side = self._free_end(value)
                    height = "bottom" if self._is_lowest(value) else "top"
                    self._shape(reference["label"], line, where, end, side, height)
            elif reference["axis"] == "x" and reference["label"]:
                value = self.x.shown(reference["value"])
                where = {"yref": "paper", "x0": value, "x1": value, "y0": 0, "y1": 1}
                side = "right" if self._late(value) else "left"
                self._shape(reference["label"], line, where, "start", side, "bottom")

    def _crowded_below(self, level: float | None) -> bool:
        """Whether another line would run through a label below the line at `level`."""
        values = [
            self.y.shown(line["value"])
            for line in self.view.get("lines", ())
            if line["axis"] == "y"
        ]
        numbers = _known(values)
        if level is None or self.figure.y.scale == "log":
            return False
        span = self.y.factor * self.figure.y.top if self.figure.y.top else max(numbers)
        return any(0 < level - other < _LABEL_HIGH * span for other in numbers)

    def _is_lowest(self, level: float | None) -> bool:
        """Whether no curve or band goes below the line at `level`."""
        lowest = [
            y
            for curve in self.view["series"]
            for y in _known(self.y.all([*curve.get("y", ()), *curve.get("lo", ())]))
        ]
        return level is not None and min(lowest, default=level - 1) >= level

    def _free_end(self, level: float | None) -> tuple[str, str]:
        """`textposition` and `xanchor` of the label at the end of a horizontal line from which the
        points of the curves are farther; the right end if both are as far.
        """
        x_of, y_of = (
            math.log if axis.scale == "log" else float for axis in (self.figure.x, self.figure.y)
        )
        points = [
            (x_of(x), y_of(y))
            for curve in self.view["series"]
            for x, y in zip(self.x.all(curve["x"]), self.y.all(curve["y"]), strict=True)
            if x is not None and y is not None and math.isfinite(y)
            if (x > 0 or x_of is float) and (y > 0 or y_of is float)
        ]
        if not points or level is None or (level <= 0 and y_of is math.log):
            return "end", "right"
        low, high = min(x for x, _ in points), max(x for x, _ in points)
        if low == high:
            return "start", "left"
        wide = _LABEL_SHARE * (high - low)
        left = min(abs(y - y_of(level)) for x, y in points if x <= low + wide)
        right = min(abs(y - y_of(level)) for x, y in points if x >= high - wide)
        return ("start", "left") if left > right else ("end", "right")

    def _late(self, value: float | None) -> bool:
        """Whether a place on the x axis lies beyond its middle."""
        xs = [
            x
            for series in self.view["series"]
            for x in _known(self.x.all(series.get("x", series.get("parts"))))
        ]
        if not xs or value is None:
            return False
        low, high = (min(xs), max(xs)) if self._log_x else (0.0, max(xs))
        if self._log_x and low > 0:
            return value > math.sqrt(low * high)
        return value > (low + high) / 2

    def _shape(self, label: str, line: Plot, where: Plot, end: str, side: str, height: str) -> None:
        text = {"text": escape(label, quote=False), "textposition": end, "textangle": 0}
        text |= {"xanchor": side, "yanchor": height, "font": {"size": 11}}
        self.shapes.append({"type": "line", **where, "line": line, "label": {**text, "padding": 3}})

    # ---- rows -------------------------------------------------------------------------------
    def _bars(self) -> None:
        kind, view = self.figure.palette, self.view
        totals = [self.x.shown(sum(_known(bar["parts"]))) or 0.0 for bar in view["series"]]
        limit = max(totals, default=0.0)
        if kind == "phase" and totals:
            # A time many times as long as the others is cut, so that theirs can be read.
            middle = sorted(totals)[len(totals) // 2]
            limit = min(limit, _LATE * middle) if middle > 0 else limit
        self.limit = limit if kind else None
        for bar, total in zip(view["series"], totals, strict=True):
            if kind:
                self._stack(bar, total, limit)
            else:
                self._bar(bar, total)
        if kind:
            self._keys_of_parts([f"{kind}{part}" for part in range(len(self.figure.categories))])
        self._references()

    def _stack(self, bar: View, total: float, limit: float) -> None:
        place, kind = bar["s"], self.figure.palette
        for part, value in enumerate(self.x.all(bar["parts"])):
            if value:
                name = escape(self.figure.categories[part], quote=False)
                fill = {"color": LIGHT[f"{kind}{part}"]}
                self._in_row(place, part, name=name, **self._bar_at(place, value), marker=fill)
        cut = "\u00a0≫ " if total > limit * 1.0001 else ""
        self._end(place, min(total, limit), f"{cut}{self.x.text(total)}")

    def _bar(self, bar: View, total: float) -> None:
        place = bar["s"]
        low, high = self.x.shown(bar["lo"]), self.x.shown(bar["hi"])
        fill = {"color": colour(place)}
        trace = self._in_row(place, None, **self._bar_at(place, total), marker=fill)
        trace["customdata"] = [[low, high]]
        spread = low is not None and high is not None and high > low
        if spread:
            trace["error_x"] = {
                **{"type": "data", "symmetric": False, "color": LIGHT["ink"]},
                **{"thickness": 1.2, "width": 3},
                "array": [_four((high or total) - total)],
                "arrayminus": [_four(total - (low or 0.0))],
            }
            ends = " – ".join(self.x.template(f"customdata[{end}]") for end in (0, 1))
            trace["hovertemplate"] += f" ({ends})"
        self._end(place, high if spread and high is not None else total, self.x.text(total))

    def _bar_at(self, place: int, value: float) -> Plot:
        row = {"x": [value], "y": [self.names[place]], "width": _BAR}
        return {"type": "bar", "orientation": "h", **row}

    def _end(self, place: int, x: float, text: str) -> None:
        """A text at the end of a row."""
        shown: Plot = {"text": [f"\u00a0{text}"], "textposition": "middle right"}
        ink = {"color": LIGHT["ink"]}
        label = self._points(place, "text", [x], [self.names[place]], **shown, textfont=ink)
        label["cliponaxis"] = False

    def _spread(self) -> None:
        for row in self.view["series"]:
            place, values = row["s"], self.x.all(row["x"])
            numbers = _known(values)
            low, high = min(numbers), max(numbers)
            line = {"width": 6, "color": colour(place)}
            self._points(
                place, "lines", [low, high], [self.names[place]] * 2, line=line, opacity=0.25
            )
            for part, value in enumerate(values):
                if value is not None:
                    marker = {"symbol": symbol(part), "size": 9, "color": colour(place)}
                    marker |= {"line": {"width": 1, "color": LIGHT["card"]}}
                    name = escape(self.figure.categories[part], quote=False)
                    drawn: Plot = {"type": "scatter", "mode": "markers"}
                    drawn |= {"x": [value], "y": [self.names[place]], "marker": marker}
                    self._in_row(place, part, name=name, **drawn)["cliponaxis"] = False
            span = _four(high - low)
            text = f"{span:g} pts" if self.x.after == " %" else self.x.text(span)
            self._end(place, high, f"\u00a0{text}")
        self._keys_of_parts(["soft"] * len(self.figure.categories), signs=True)

    def _keys_of_parts(self, colours: Sequence[str], *, signs: bool = False) -> None:
        """Traces without points, for the legend of an image."""
        occurring = {trace["meta"].get("part") for trace in self.data}
        for part, name in enumerate(self.figure.categories):
            if part in occurring:
                marker = {"symbol": symbol(part) if signs else "square", "size": 9}
                marker |= {"color": LIGHT[colours[part]]}
                named = {"name": escape(name, quote=False), "marker": marker, "hoverinfo": "skip"}
                points = {"type": "scatter", "mode": "markers", "x": [None], "y": [None]}
                self.data.append({**points, **named})

    # ---- layout -----------------------------------------------------------------------------
    def _line_layout(self) -> Plot:
        figure = self.figure
        hover = {"x": "x unified", "point": "closest", "interpolate": "x unified"}[figure.hover]
        label = {"text": escape(figure.y.label, quote=False), "showarrow": False, "x": 0, "y": 1}
        label |= {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        return {
            **self._layout(),
            "hovermode": "y unified" if self._cumulative else hover,
            "hoversort": "value ascending" if self._cumulative else "value descending",
            "margin": {"l": 12, "r": 16, "t": _TITLE_PX, "b": 46},
            "annotations": [
                {**label, "yshift": 6},
                *(
                    {**label, **text, "x": 1, "yref": "y", "xanchor": "right", "font": {"size": 11}}
                    for text in self.above
                ),
            ],
            "xaxis": {
                **self._axis(figure.x, self.x) | self._log_ticks("x"),
                **{"title": self._title(figure.x.label), "showgrid": bool(figure.x.names)},
                **{"showline": True, "linecolor": LIGHT["line"], "automargin": "height"},
                **self._named_ticks(),
            },
            "yaxis": self._axis(figure.y, self.y) | self._log_ticks("y") | {"automargin": True},
        }

    def _named_ticks(self) -> Plot:
        names = self.figure.x.names
        if not names:
            return {}
        lines = [[escape(line, quote=False) for line in name] for name in names]
        return {
            **{"tickmode": "array", "tickvals": list(range(len(names)))},
            **{"ticktext": ["<br>".join(name) for name in lines], "tickangle": 0},
            **{"range": [-0.4, len(names) - 0.6], "gridcolor": LIGHT["line"]},
        }

    def _log_ticks(self, axis: str) -> Plot:
        """The most ticks of a logarithmic axis with which plotly labels 1, 2 and 5 of each decade,
        or powers of ten alone where there are many: it does so by the decades of a tick, from 0.3
        and from 0.7 on, and evenly within a decade (`autoTicks`).
        """
        if getattr(self.figure, axis).scale != "log":
            return {}
        numbers = [
            value for trace in self.data for value in _known(trace.get(axis, ())) if value > 0
        ]
        decades = math.log10(max(numbers) / min(numbers)) if numbers else 0.0
        if decades > _MANY_DECADES:
            return {"nticks": int(decades / 0.71)}
        return {"nticks": 5 if decades < _FEW_DECADES else math.ceil(decades / 0.7)}

    def _row_layout(self) -> Plot:
        """Rows with their names above them."""
        rows = [row["s"] for row in self.view["series"]]
        anchor = {"xref": "paper", "x": 0, "xanchor": "left", "yshift": 15, "showarrow": False}
        named = [
            {"name": f"s{row}", "text": self.names[row], "y": self.names[row], **anchor}
            for row in rows
        ]
        axis = self._axis(self.figure.x, self.x) | {"title": self._title(self.figure.x.label)}
        if self.figure.kind == "bars" and self.limit:
            axis["range"] = [0, _four(1.02 * self.limit)]
        return {
            **self._layout(),
            "hovermode": "y unified",
            "hoverdistance": ROW_PX // 2,
            "barmode": "stack",
            "height": len(rows) * ROW_PX + _FRAME_PX + _TITLE_PX,
            "annotations": [{**name, "font": {"color": LIGHT["ink"]}} for name in named],
            "margin": {"l": 14, "r": 72, "t": _TITLE_PX, "b": 46},
            "xaxis": axis,
            "yaxis": {
                **{"spikecolor": LIGHT["card"], "spikethickness": 0},
                **{"type": "category", "autorange": "reversed", "fixedrange": True},
                **{"showgrid": False, "showticklabels": False},
            },
        }

    def _layout(self) -> Plot:
        figure = self.figure
        return {
            "title": {
                "text": escape(figure.title, quote=False),
                "subtitle": {"text": self.origin},
                **{"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top"},
                **{"pad": {"t": 14}, "font": {"size": 16, "color": LIGHT["ink"]}},
            },
            "font": {"family": _FONT, "size": 12, "color": LIGHT["soft"]},
            "paper_bgcolor": LIGHT["card"],
            "plot_bgcolor": LIGHT["card"],
            "hoverdistance": -1,
            "hoverlabel": {
                **{"bgcolor": LIGHT["card"], "bordercolor": LIGHT["line"], "namelength": 40},
                "font": {"color": LIGHT["ink"], "size": 12},
            },
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"},
            "shapes": self.shapes,
        }

    def _title(self, label: str) -> Plot:
        return {"text": escape(label, quote=False), "standoff": 6, "font": {"size": 12}}

    def _axis(self, axis: Axis, unit: _Unit) -> Plot:
        options: Plot = {
            "type": axis.scale,
            **{"tickprefix": unit.before, "ticksuffix": unit.after},
            **{"tickformat": ",~r", "hoverformat": _NUMBER},
            **{"gridcolor": LIGHT["grid"], "zeroline": False},
            **{"ticks": "outside", "ticklen": 4, "tickcolor": LIGHT["card"]},
            **{"spikecolor": LIGHT["soft"], "spikethickness": 1, "spikedash": "solid"},
        }
        if axis.format == "rate":
            options["unifiedhovertitle"] = {"text": f"{_plain(axis.label)}: %{{x}}"}
        if axis.scale == "linear":
            options["rangemode"] = "tozero"
            if axis.top is not None:
                options["range"] = [0, axis.top * unit.factor]
        return options


def _plain(label: str) -> str:
    """A text of ours within one that a pointer shows."""
    return escape(label, quote=False).replace("%{", "% {")


def _four(value: float) -> float:
    return float(f"{value:.4g}")


def page_data(
    names: Sequence[str],
    origin: str,
    *facets: Iterable[Figure],
    always: Iterable[Figure] = (),
) -> dict[str, Any]:
    """What a page's script draws, as plain JSON values.

    Args:
        names: the series, in the order of their colours.
        origin: where the numbers come from.
        facets: the figures of each facet of the page; a figure's `views` become a list, with its
            plots in each facet ({} in one that has no such figure).
        always: figures that are the same in every facet; their list has one place.

    Returns:
        `figures` by id. Lists and mappings of their plots stand once in `shared`, and as
        `{"$": place}` where they are used: hundreds of views repeat layouts, markers and times.
    """
    stored = _Stored()
    figures: dict[str, dict[str, Any]] = {}
    for place, drawn in enumerate(facets):
        for figure in drawn:
            frame = figures.setdefault(figure.id, _frame(figure, [{} for _ in facets]))
            frame["views"][place] = _stored_plots(stored, figure, names, origin)
    for figure in always:
        figures[figure.id] = _frame(figure, [_stored_plots(stored, figure, names, origin)])
    return {
        "series": list(names),
        "origin": origin,
        "dark": darkened(),
        "row_px": ROW_PX,
        "figures": figures,
        "shared": stored.values,
    }


def _stored_plots(
    stored: _Stored, figure: Figure, names: Sequence[str], origin: str
) -> dict[str, Any]:
    return {key: stored.keep(plot) for key, plot in plots(figure, names, origin).items()}


def _frame(figure: Figure, views: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{"id": figure.id, "kind": figure.kind, "title": figure.title},
        **{"x": figure.x.label, "y": figure.y.label, "palette": figure.palette},
        **{"picker": figure.picker, "options": figure.options, "categories": figure.categories},
        "views": views,
    }


class _Stored:
    """Lists and mappings, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def keep(self, value: Any) -> Any:
        """The value with a reference in the place of each list and mapping that is not short."""
        if isinstance(value, Mapping):
            plain: Any = {key: self.keep(inner) for key, inner in value.items()}
        elif isinstance(value, list | tuple):
            plain = [self.keep(inner) for inner in value]
        else:
            return value
        text = repr(plain)
        if len(text) < _SHORT:
            return plain
        if text not in self._places:
            self._places[text] = len(self.values)
            self.values.append(plain)
        return {"$": self._places[text]}


_SHORT = 24  # characters, of which a reference would save none
