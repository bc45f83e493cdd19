"use strict";
// Draws the figures of the report from the JSON beside it. Text only ever enters as text nodes.
const page = JSON.parse(document.getElementById("report-data").textContent);
const SHOWN_AT_FIRST = 10;
const facets = page.facets || [{ rates: [], rate: "", series: page.series.map((_, s) => s) }];
const hidden = new Set(page.series.keys());
for (const { series } of facets) for (const s of series.slice(0, SHOWN_AT_FIRST)) hidden.delete(s);
let facet = 0, rate = facets[0].rate;
// Long lists of numbers stand once in `page.arrays`; the curves of figures hold their places there.
for (const figure of Object.values(page.figures).filter((f) => f.kind === "lines"))
  for (const views of figure.views) for (const view of Object.values(views)) for (const c of view.series)
    for (const key of ["x", "y", "lo", "hi"]) if (typeof c[key] === "number") c[key] = page.arrays[c[key]];

// ---- small makers --------------------------------------------------------------------------
function svg(tag, attributes = {}, parent = null, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function html(tag, className = "", parent = null, text = null) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function paint(node, variable) { node.style.setProperty("--c", `var(--${variable})`); return node; }
const colour = (s) => `s${s % 8}`;
const dash = (s) => ["", "7 4", "2 4"][Math.floor(s / 8) % 3];

const SHAPES = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "M-3.6-3.6H3.6V3.6H-3.6Z", "M0-4.8L4.6 3.6H-4.6Z", "M0-5L5 0L0 5L-5 0Z",
  "M0 4.8L4.6-3.6H-4.6Z", "M-1.5-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z", "M-4.2-4.4H4.2L-4.2 4.4H4.2Z", "M-5-2.5H5V2.5H-5Z",
];
const shape = (i) => SHAPES[i % SHAPES.length];

function swatch(parent, variable, path, dashes = null) {
  const box = html("span", "swatch", parent);
  const image = svg("svg", { viewBox: "-7 -7 14 14", width: 14, height: 14, "aria-hidden": "true" }, box);
  paint(image, variable);
  if (dashes !== null) svg("line", { x1: -7, x2: 7, stroke: "var(--c)", "stroke-width": 2, "stroke-dasharray": dashes }, image);
  svg("path", { d: path, fill: "var(--c)" }, image);
}
const SQUARE = "M-5-5H5V5H-5Z";
const seriesSwatch = (parent, s) => swatch(parent, colour(s), shape(s), dash(s));

// ---- numbers -------------------------------------------------------------------------------
function digits(value, significant = 3) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, significant - 1 - size) });
}
const FORMATS = {
  number: (v) => digits(v), rate: (v) => digits(v), dollars: (v) => `$${digits(v)}`,
  percent: (v) => `${Math.floor(v * 1000 + 1e-6) / 10} %`,
  seconds: (v) => (Math.abs(v) < 0.9995 && v !== 0 ? `${digits(v * 1000)} ms` : `${digits(v)} s`),
  duration: (v) => (v < 60 ? `${digits(v)} s` : v < 3600 ? `${digits(v / 60)} min` : `${digits(v / 3600)} h`),
};
const DURATIONS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const say = (axis, value) => (value === null || value === undefined ? "–" : FORMATS[axis.format](value));

function linearTicks(low, high, count, format) {
  const rough = (high - low) / count;
  if (format === "duration" && rough > 1 && rough <= 86400) return stepTicks(low, high, DURATIONS_S.find((s) => s >= rough));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999) * power;
  return stepTicks(low, high, step);
}
function stepTicks(low, high, step) {
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return { ticks, step };
}
function logTicks(low, high, count) {
  for (const mantissas of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const m of mantissas) { const v = m * 10 ** e; if (v >= low * 0.9999 && v <= high * 1.0001) ticks.push(+v.toPrecision(6)); }
    if (ticks.length >= Math.min(4, count)) return ticks.length > count ? ticks.filter((_, i) => i % Math.ceil(ticks.length / count) === 0) : ticks;
  }
  return linearTicks(low, high, count).ticks;
}
function scale(axis, values, pixels, count) {
  const useful = values.filter((v) => v !== null && v !== undefined && (axis.scale !== "log" || v > 0));
  let low = Math.min(...useful), high = Math.max(...useful), ticks;
  if (!useful.length) { low = 0; high = 1; }
  if (axis.scale === "log" && useful.length) {
    if (high / low < 2) { low /= 1.5; high *= 1.5; }
    low *= 0.92; high *= 1.08;
    ticks = logTicks(low, high, count);
    const [a, b] = [Math.log(low), Math.log(high)];
    const at = (v) => pixels[0] + ((Math.log(Math.max(v, low)) - a) / (b - a)) * (pixels[1] - pixels[0]);
    const back = (p) => Math.exp(a + ((p - pixels[0]) / (pixels[1] - pixels[0])) * (b - a));
    return { at, back, ticks, low, high };
  }
  low = Math.min(0, low);
  if (axis.top) high = axis.top; else { high = high > low ? high : low + 1; const { step } = linearTicks(low, high, count); if (axis.round) high = Math.ceil(high / step - 1e-9) * step; }
  ticks = linearTicks(low, high, count, axis.format).ticks;
  const at = (v) => pixels[0] + ((v - low) / (high - low)) * (pixels[1] - pixels[0]);
  const back = (p) => low + ((p - pixels[0]) / (pixels[1] - pixels[0])) * (high - low);
  return { at, back, ticks, low, high };
}
function clipped(text, pixels) {
  const fits = Math.max(4, Math.floor(pixels / 6.6));
  return text.length <= fits ? text : `${text.slice(0, fits - 1)}…`;
}

// Buttons that hide and show series in all figures; of many, those shown at first and what hides the others.
function seriesLegend(box, known) {
  box.replaceChildren();
  const all = box.dataset.all === "yes" || known.length <= SHOWN_AT_FIRST + 2;
  for (const [place, s] of known.entries()) {
    if (!all && place >= SHOWN_AT_FIRST && hidden.has(s)) continue;
    const button = html("button", "", box);
    button.type = "button"; button.setAttribute("aria-pressed", String(!hidden.has(s)));
    button.title = hidden.has(s) ? "show in all figures" : "hide in all figures";
    seriesSwatch(button, s); html("span", "", button, page.series[s]);
    const own = box.children.length - 1;
    button.addEventListener("click", () => {
      if (hidden.has(s)) hidden.delete(s); else hidden.add(s);
      redraw();
      box.querySelectorAll("button")[own]?.focus();
    });
  }
  const more = known.length - box.children.length;
  if (more > 0) {
    const button = html("button", "more", box, `${more} more …`);
    button.type = "button";
    button.addEventListener("click", () => { box.dataset.all = "yes"; seriesLegend(box, known); });
  }
}

// ---- a figure on the page ------------------------------------------------------------------
class Chart {
  constructor(host, figure) {
    this.host = host; this.figure = figure;
    this.view = figure.picker === "local" ? (figure.options.find(([k]) => k === "p99") || figure.options[0])[0] : "only";
    this.choices = host.querySelector(".choices"); this.legend = host.querySelector(".legend");
    this.plot = host.querySelector(".plot"); this.numbers = host.querySelector("details");
    this.voice = host.querySelector("[role=status]");
    this.own = host.dataset.facet === undefined ? null : Number(host.dataset.facet);
    this.tip = html("div", "tip"); this.tip.hidden = true;
    if (figure.picker === "local") this.offerChoices();
    this.numbers?.addEventListener("toggle", () => this.fillNumbers());
    this.width = 0;
    new ResizeObserver(() => { if (Math.abs(this.plot.clientWidth - this.width) >= 1) this.draw(); }).observe(this.plot);
  }
  offerChoices() {
    for (const [key, label] of this.figure.options) {
      const button = html("button", "", this.choices, label);
      button.type = "button"; button.setAttribute("aria-pressed", String(key === this.view));
      button.addEventListener("click", () => {
        this.view = key;
        for (const other of this.choices.children) other.setAttribute("aria-pressed", String(other === button));
        this.draw();
      });
    }
  }
  // The views of the facet that is shown, or of its own; those of some figures are the same in all.
  views() {
    const { views } = this.figure;
    return views.length === 1 ? views[0] : views[this.own ?? facet];
  }
  current() {
    const view = this.views()[this.figure.picker === "rate" ? rate : this.view] || { series: [] };
    return { ...view, lines: view.lines || [], series: view.series.filter((c) => view.names || !hidden.has(c.s)) };
  }
  // Curves of a view that has names of its own are no series of the page.
  name(s) { return (this.current().names || page.series)[s]; }
  draw() {
    this.width = this.plot.clientWidth;
    if (!this.width) return;
    const view = this.current();
    this.plot.replaceChildren(); this.tip.hidden = true; this.stops = []; this.stop = -1;
    this.drawLegend();
    if (!view.series.length) html("p", "empty", this.plot, this.emptiness());
    else ({ lines: drawLines, bars: drawBars, spread: drawSpread })[this.figure.kind](this, view);
    this.plot.append(this.tip);
    this.fillNumbers();
  }
  emptiness() {
    const all = Object.values(this.views());
    if (!all.some((view) => view.series.length)) return "Nothing is known here.";
    return this.figure.picker === "rate" ? "No shown system has data at this rate." : "All systems are switched off.";
  }
  canvas(height) {
    const image = svg("svg", { viewBox: `0 0 ${this.width} ${height}`, height, role: "img", tabindex: 0 }, this.plot);
    image.setAttribute("aria-label", `${this.figure.title}, ${page.origin}. Arrow keys read the values; the numbers are in a table below.`);
    image.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") { this.hush(); return; }
      if (!way || !this.stops.length) return;
      event.preventDefault();
      this.stop = Math.min(this.stops.length - 1, Math.max(0, this.stop + way));
      this.stops[this.stop]();
      this.voice.textContent = this.tip.innerText;
    });
    image.addEventListener("pointerleave", () => this.hush());
    image.addEventListener("blur", () => this.hush());
    return image;
  }
  hush() { this.tip.hidden = true; if (this.clear) this.clear(); }
  show(x, y, title, rows) {
    this.tip.replaceChildren();
    html("b", "", this.tip, title);
    for (const row of rows) {
      const line = html("div", "", this.tip);
      row.swatch(line);
      html("span", "", line, row.label); html("span", "value", line, row.value);
    }
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth, high = this.tip.offsetHeight;
    const left = x + 14 + wide <= this.width ? x + 14 : Math.max(0, x - 14 - wide);
    this.tip.style.left = `${Math.min(left, Math.max(0, this.width - wide))}px`;
    this.tip.style.top = `${Math.max(-30, y - high / 2)}px`;
  }
  drawLegend() {
    if (!this.legend) return;
    this.legend.replaceChildren();
    const views = Object.values(this.views()), own = this.current().names;
    if (own) {
      own.forEach((name, s) => { const key = html("span", "key", this.legend); seriesSwatch(key, s); html("span", "", key, name); });
      return;
    }
    if (this.figure.categories.length) {
      const kind = this.figure.palette;
      const occurs = (i) => views.some((v) => v.series.some((c) => c.parts[i] > 0));
      this.figure.categories.forEach((name, i) => {
        if (kind && !occurs(i)) return;
        const key = html("span", "key", this.legend);
        if (kind) swatch(key, `${kind}${i}`, SQUARE); else swatch(key, "soft", shape(i));
        html("span", "", key, name);
      });
      return;
    }
    if (this.figure.kind === "bars" && !hidden.size) return; // rows bear names
    const drawn = new Set(views.flatMap((v) => v.series.map((c) => c.s)));
    if (views.every((v) => v.scatter) && drawn.size < 2) return;
    seriesLegend(this.legend, [...drawn].sort((a, b) => a - b));
  }
  fillNumbers() {
    if (!this.numbers) return;
    this.numbers.querySelector(".scroll")?.remove();
    if (!this.numbers.open) return;
    const box = html("div", "scroll", this.numbers);
    box.tabIndex = 0;
    const table = html("table", "", box), head = html("tr", "", html("thead", "", table)), body = html("tbody", "", table);
    const { x, y, categories, kind } = this.figure;
    const heads = kind === "lines" ? ["system", x.label, y.label, ...(this.current().series.some((c) => c.lo) ? ["lowest", "highest"] : [])] : ["system", ...(categories.length ? categories : [x.label, "lowest", "highest"])];
    for (const name of heads) html("th", "", head, name).scope = "col";
    const add = (s, cells) => {
      const row = html("tr", "", body);
      html("th", "", row, this.name(s)).scope = "row";
      for (const cell of cells) html("td", "", row, cell);
    };
    for (const c of this.current().series) {
      if (kind === "bars") add(c.s, [...c.parts, ...(categories.length ? [] : [c.lo, c.hi])].map((v) => say(x, v)));
      else if (kind === "spread") add(c.s, c.x.map((v) => say(x, v)));
      else c.x.forEach((at, i) => add(c.s, [c.labels ? `${say(x, at)} (${c.labels[i]})` : say(x, at), say(y, c.y[i]), ...(c.lo ? [say(y, c.lo[i]), say(y, c.hi[i])] : [])]));
    }
  }
}

// ---- lines ---------------------------------------------------------------------------------
function drawLines(chart, view) {
  const { figure, width } = chart, { x: xAxis, y: yAxis } = figure;
  const height = chart.own === null ? Math.round(Math.min(330, Math.max(240, width * 0.56))) : 190;
  const image = chart.canvas(height), top = 26, bottom = height - 40;
  // Where points are held against the diagonal, both axes end alike.
  const ends = (axis) => view.lines.filter((l) => l.axis === axis || (view.scatter && l.axis === "diagonal")).map((l) => l.value);
  const ys = view.series.flatMap((c) => [...c.y, ...(c.lo || []), ...(c.hi || [])]).concat(ends("y"));
  const xs = view.series.flatMap((c) => c.x).concat(ends("x"));
  const y = scale({ ...yAxis, round: true }, ys, [bottom, top], 6);
  const left = Math.max(...y.ticks.map((t) => say(yAxis, t).length)) * 6.7 + 12, right = width - 12;
  const x = scale(xAxis, xs, [left, right], Math.max(3, Math.floor((right - left) / 75)));
  svg("text", { x: 0, y: 12 }, image, yAxis.label);
  svg("text", { x: right, y: height - 4, "text-anchor": "end" }, image, xAxis.label);
  for (const t of y.ticks) {
    svg("line", { class: "gridline", x1: left, x2: right, y1: y.at(t), y2: y.at(t) }, image);
    svg("text", { x: left - 8, y: y.at(t) + 4, "text-anchor": "end" }, image, say(yAxis, t));
  }
  svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }, image);
  for (const t of x.ticks) {
    svg("line", { class: "axis", x1: x.at(t), x2: x.at(t), y1: bottom, y2: bottom + 4 }, image);
    svg("text", { x: Math.min(x.at(t), width - say(xAxis, t).length * 3.2), y: bottom + 18, "text-anchor": "middle" }, image, say(xAxis, t));
  }
  drawReferences(image, chart.own === null ? view.lines : view.lines.map((l) => ({ ...l, label: "" })), x, y, { left, right, top, bottom });
  for (const c of view.series) {
    const group = paint(svg("g", {}, image), colour(c.s));
    const points = c.x.map((v, i) => [v, c.y[i], i]).filter(([a, b]) => a !== null && b !== null && (xAxis.scale !== "log" || a > 0) && (yAxis.scale !== "log" || b > 0));
    if (c.lo) {
      const upper = points.map(([v, , i]) => `${x.at(v).toFixed(1)} ${y.at(c.hi[i] ?? c.y[i]).toFixed(1)}`);
      const lower = points.map(([v, , i]) => `${x.at(v).toFixed(1)} ${y.at(c.lo[i] ?? c.y[i]).toFixed(1)}`).reverse();
      if (points.length > 1) svg("path", { class: "band", d: `M${upper.concat(lower).join("L")}Z` }, group);
    }
    if (points.length && !view.scatter) svg("path", { class: "curve", "stroke-dasharray": dash(c.s), d: `M${points.map(([a, b]) => `${x.at(a).toFixed(1)} ${y.at(b).toFixed(1)}`).join("L")}` }, group);
    const marked = figure.markers || points.length === 1 ? points : spacedOut(points, c.s, x, left);
    for (const [a, b, i] of marked) svg("path", { class: c.hollow?.[i] ? "mark hollow" : "mark", d: shape(c.s), transform: `translate(${x.at(a).toFixed(1)} ${y.at(b).toFixed(1)})` }, group);
  }
  if (view.frontier) ringFrontier(image, view.series, x, y);
  ({ x: hoverX, interpolate: hoverBetween, point: hoverPoint })[figure.hover](chart, image, view, x, y, { left, right, top, bottom });
}
// Of a curve of many points, one every 90 pixels, so that shapes tell curves apart without colour.
function spacedOut(points, s, x, left) {
  const chosen = [];
  let next = left + 20 + ((s * 29) % 90);
  for (const point of points) if (x.at(point[0]) >= next) { chosen.push(point); while (next <= x.at(point[0])) next += 90; }
  return chosen;
}
function drawReferences(image, lines, x, y, box) {
  for (const line of lines) {
    if (line.axis === "diagonal") {
      const begin = Math.max(x.low, y.low), end = Math.min(line.value, x.high, y.high);
      svg("line", { class: "reference", x1: x.at(begin), y1: y.at(begin), x2: x.at(end), y2: y.at(end) }, image);
      svg("text", { class: "halo", x: x.at(end * 0.86) - 8, y: y.at(end * 0.9), "text-anchor": "end" }, image, line.label);
    } else if (line.axis === "y") {
      svg("line", { class: "reference", x1: box.left, x2: box.right, y1: y.at(line.value), y2: y.at(line.value) }, image);
      svg("text", { class: "halo", x: box.right, y: y.at(line.value) + 13, "text-anchor": "end" }, image, line.label);
    } else {
      svg("line", { class: "reference", x1: x.at(line.value), x2: x.at(line.value), y1: box.top, y2: box.bottom }, image);
      const before = x.at(line.value) > (box.left + box.right) / 2;
      svg("text", { class: "halo", x: x.at(line.value) + (before ? -6 : 6), y: box.bottom - 8, "text-anchor": before ? "end" : "start" }, image, line.label);
    }
  }
}
function ringFrontier(image, series, x, y) {
  const all = series.flatMap((c) => c.x.map((v, i) => ({ s: c.s, x: v, y: c.y[i] })));
  for (const p of all) {
    const beaten = all.some((q) => q.x >= p.x && q.y >= p.y && (q.x > p.x || q.y > p.y));
    if (!beaten) paint(svg("circle", { class: "ring", r: 8, cx: x.at(p.x), cy: y.at(p.y) }, image), colour(p.s));
  }
}
function pointerX(image, event) { const r = image.getBoundingClientRect(); return ((event.clientX - r.left) / r.width) * image.viewBox.baseVal.width; }
function pointerY(image, event) { const r = image.getBoundingClientRect(); return ((event.clientY - r.top) / r.height) * image.viewBox.baseVal.height; }
function nearest(values, target) { return values.reduce((best, v) => (Math.abs(v - target) < Math.abs(best - target) ? v : best), values[0]); }

function cursorLine(chart, image, box) {
  const line = svg("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" }, image);
  chart.clear = () => line.setAttribute("visibility", "hidden");
  return (at) => { line.setAttribute("x1", at); line.setAttribute("x2", at); line.setAttribute("visibility", "visible"); };
}
function seriesRows(chart, found) {
  return found.sort((a, b) => b.y - a.y).slice(0, 14).map((f) => ({
    swatch: (to) => seriesSwatch(to, f.s), label: chart.name(f.s),
    value: say(chart.figure.y, f.y) + (f.lo !== undefined && f.lo !== null && f.hi > f.lo ? ` (${say(chart.figure.y, f.lo)} – ${say(chart.figure.y, f.hi)})` : ""),
  }));
}
function hoverX(chart, image, view, x, y, box) {
  const stops = [...new Set(view.series.flatMap((c) => c.x))].sort((a, b) => a - b), mark = cursorLine(chart, image, box);
  const visit = (value) => {
    const found = view.series.flatMap((c) => { const i = c.x.indexOf(value); return i < 0 || c.y[i] === null ? [] : [{ s: c.s, y: c.y[i], lo: c.lo?.[i], hi: c.hi?.[i] }]; });
    mark(x.at(value));
    chart.show(x.at(value), (box.top + box.bottom) / 2, `${say(chart.figure.x, value)} ${chart.figure.x.label.includes("req/s") ? "req/s offered" : ""}`, seriesRows(chart, found));
  };
  chart.stops = stops.map((value) => () => visit(value));
  image.addEventListener("pointermove", (event) => visit(nearest(stops, x.back(pointerX(image, event)))));
}
function between(c, at) {
  let high = c.x.findIndex((v) => v >= at);
  if (high < 0 || (high === 0 && c.x[0] > at)) return null;
  if (high === 0) return c.y[0];
  const part = (at - c.x[high - 1]) / (c.x[high] - c.x[high - 1] || 1);
  return c.y[high - 1] + part * (c.y[high] - c.y[high - 1]);
}
function hoverBetween(chart, image, view, x, y, box) {
  const mark = cursorLine(chart, image, box), cumulative = chart.figure.x.scale === "log";
  const visit = (pixel) => {
    const at = Math.min(x.high, Math.max(x.low, x.back(pixel)));
    const found = view.series.flatMap((c) => {
      const value = between(c, at);
      if (value !== null) return [{ s: c.s, y: value }];
      return cumulative ? [{ s: c.s, y: at < c.x[0] ? 0 : c.y[c.y.length - 1] }] : [];
    });
    mark(x.at(at));
    chart.show(x.at(at), (box.top + box.bottom) / 2, `${cumulative ? "within" : "at"} ${say(chart.figure.x, at)}`, seriesRows(chart, found));
  };
  chart.stops = Array.from({ length: 41 }, (_, i) => () => visit(box.left + (i / 40) * (box.right - box.left)));
  image.addEventListener("pointermove", (event) => visit(Math.min(box.right, Math.max(box.left, pointerX(image, event)))));
}
function hoverPoint(chart, image, view, x, y) {
  const points = view.series.flatMap((c) => c.x.map((v, i) => ({ s: c.s, x: v, y: c.y[i], label: c.labels?.[i] ?? "" })));
  const halo = svg("circle", { class: "cursor", r: 11, fill: "none", visibility: "hidden" }, image);
  chart.clear = () => halo.setAttribute("visibility", "hidden");
  const visit = (p) => {
    halo.setAttribute("cx", x.at(p.x)); halo.setAttribute("cy", y.at(p.y)); halo.setAttribute("visibility", "visible");
    const plain = (to) => html("span", "swatch", to);
    chart.show(x.at(p.x), y.at(p.y), p.label, [
      { swatch: (to) => seriesSwatch(to, p.s), label: chart.name(p.s), value: "" },
      { swatch: plain, label: chart.figure.x.label, value: say(chart.figure.x, p.x) },
      { swatch: plain, label: chart.figure.y.label, value: say(chart.figure.y, p.y) },
    ]);
  };
  chart.stops = points.map((p) => () => visit(p));
  image.addEventListener("pointermove", (event) => {
    const px = pointerX(image, event), py = pointerY(image, event), far = (p) => Math.hypot(x.at(p.x) - px, y.at(p.y) - py);
    visit(points.reduce((best, p) => (far(p) < far(best) ? p : best)));
  });
}

// ---- rows: stacked bars and spreads --------------------------------------------------------
const ROW = 40;
function rowFrame(chart, view, values) {
  const { width, figure } = chart, height = view.series.length * ROW + 46, image = chart.canvas(height), bottom = height - 40;
  const right = width - 64;
  const x = scale({ ...figure.x, round: true }, values, [2, right], Math.max(3, Math.floor(width / 110)));
  for (const t of x.ticks) {
    svg("line", { class: "gridline", x1: x.at(t), x2: x.at(t), y1: 0, y2: bottom }, image);
    svg("text", { x: x.at(t), y: bottom + 16, "text-anchor": t === 0 ? "start" : "middle" }, image, say(figure.x, t));
  }
  svg("text", { x: right, y: height - 4, "text-anchor": "end" }, image, figure.x.label);
  view.series.forEach((c, i) => svg("text", { class: "strong halo", x: 2, y: i * ROW + 14 }, image, clipped(page.series[c.s], width - 8)));
  return { image, x };
}
function drawBars(chart, view) {
  const { figure } = chart, totals = view.series.map((c) => c.parts.reduce((a, b) => a + b, 0));
  const kind = figure.palette;
  if (kind && !Math.max(...totals)) { html("p", "empty", chart.plot, "No request missed its SLO at this rate."); return; }
  // A time many times as long as the others is cut, so that theirs can be read.
  const middle = [...totals].sort((a, b) => a - b)[Math.floor(totals.length / 2)];
  const limit = kind === "phase" && middle > 0 ? Math.min(Math.max(...totals), 5 * middle) : Math.max(...totals);
  const { image, x } = rowFrame(chart, view, kind ? [limit] : [limit, ...view.series.flatMap((c) => [c.hi]), ...view.lines.map((l) => l.value)]);
  view.series.forEach((c, row) => {
    let start = 0;
    const parts = figure.categories.map((name, i) => ({ swatch: (to) => swatch(to, `${kind}${i}`, SQUARE), label: name, value: say(figure.x, c.parts[i]) })).filter((_, i) => c.parts[i] > 0);
    const whole = [{ swatch: (to) => seriesSwatch(to, c.s), label: figure.x.label, value: say(figure.x, totals[row]) + (c.hi > c.lo ? ` (${say(figure.x, c.lo)} – ${say(figure.x, c.hi)})` : "") }];
    const visit = () => chart.show(x.at(Math.min(totals[row], limit)), row * ROW + 28, page.series[c.s], kind ? parts : whole);
    c.parts.forEach((value, i) => {
      if (!value || start >= limit) return;
      const wide = x.at(Math.min(start + value, limit)) - x.at(start);
      paint(svg("rect", { class: "part", x: x.at(start), y: row * ROW + 20, width: Math.max(0.6, wide - (wide > 3 ? 1 : 0)), height: 14 }, image), kind ? `${kind}${i}` : colour(c.s));
      start += value;
    });
    const spread = !kind && c.hi > c.lo;
    if (spread) svg("path", { class: "whisker", d: `M${x.at(c.lo)} ${row * ROW + 27}H${x.at(c.hi)}M${x.at(c.lo)} ${row * ROW + 24}v6M${x.at(c.hi)} ${row * ROW + 24}v6` }, image);
    const end = x.at(Math.min(start, limit)), cut = start > limit * 1.0001;
    if (cut) svg("path", { class: "cut", d: `M${end - 9} ${row * ROW + 36}l4-18M${end - 4} ${row * ROW + 36}l4-18` }, image);
    svg("text", { x: (spread ? x.at(c.hi) : end) + 6, y: row * ROW + 31, class: "strong halo" }, image, say(figure.x, totals[row]));
    svg("rect", { x: 0, y: row * ROW, width: chart.width, height: ROW, fill: "transparent" }, image).addEventListener("pointermove", visit);
    chart.stops.push(visit);
  });
  if (!kind) drawReferences(image, view.lines, x, null, { left: 2, right: chart.width - 64, top: 0, bottom: view.series.length * ROW + 6 });
}
function drawSpread(chart, view) {
  const { figure } = chart, { image, x } = rowFrame(chart, view, [1]);
  view.series.forEach((c, row) => {
    const known = c.x.filter((v) => v !== null), low = Math.min(...known), high = Math.max(...known), y = row * ROW + 27;
    const group = paint(svg("g", {}, image), colour(c.s));
    svg("line", { class: "span", x1: x.at(low), x2: x.at(high), y1: y, y2: y }, group);
    c.x.forEach((v, i) => { if (v !== null) svg("path", { class: "mark", d: shape(i), transform: `translate(${x.at(v)} ${y})` }, group); });
    svg("text", { x: chart.width, y: y + 4, "text-anchor": "end", class: "strong" }, image, `${digits((high - low) * 100, 2)} pts`);
    const visit = () => chart.show(x.at(high), y, page.series[c.s], figure.categories.map((name, i) => ({ swatch: (to) => swatch(to, "soft", shape(i)), label: name, value: say(figure.x, c.x[i]) })));
    svg("rect", { x: 0, y: row * ROW, width: chart.width, height: ROW, fill: "transparent" }, image).addEventListener("pointermove", visit);
    chart.stops.push(visit);
  });
}

// ---- the page ------------------------------------------------------------------------------
const charts = [...document.querySelectorAll("figure[data-figure]")].map((host) => new Chart(host, page.figures[host.dataset.figure]));
const redraw = () => {
  charts.forEach((chart) => chart.draw());
  for (const box of document.querySelectorAll("[data-legend]")) seriesLegend(box, page.series.map((_, s) => s));
};

for (const box of document.querySelectorAll("[data-series]")) {
  const s = Number(box.dataset.series), image = svg("svg", { viewBox: "-7 -7 14 14", "aria-hidden": "true" }, box);
  paint(image, colour(s));
  svg("line", { x1: -7, x2: 7, stroke: "var(--c)", "stroke-width": 2, "stroke-dasharray": dash(s) }, image);
  svg("path", { d: shape(s), fill: "var(--c)" }, image);
}
for (const box of document.querySelectorAll("[data-bar]")) {
  const image = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, box);
  paint(image, colour(Number(box.dataset.of)));
  svg("rect", { width: Number(box.dataset.bar), height: 6, fill: "var(--c)" }, image);
}
// A selector with a step to both sides; what it returns chooses by place.
function selector(id, chosen) {
  const select = document.getElementById(id);
  if (!select) return () => {};
  const [back, on] = select.parentElement.querySelectorAll("button");
  const choose = (index) => {
    select.selectedIndex = index;
    back.disabled = index <= 0; on.disabled = index >= select.options.length - 1;
    chosen(select);
  };
  select.addEventListener("change", () => choose(select.selectedIndex));
  back.addEventListener("click", () => choose(select.selectedIndex - 1));
  on.addEventListener("click", () => choose(select.selectedIndex + 1));
  choose(select.selectedIndex);
  return choose;
}
const drawShown = (which) => charts.filter((c) => c.own === null && which(c)).forEach((c) => c.draw());
const chooseRate = selector("rate", (select) => { rate = select.value; drawShown((c) => c.figure.picker === "rate"); });
const panels = [...document.querySelectorAll("figure.panel")];
const chooseFacet = selector("facet", (select) => {
  facet = select.selectedIndex;
  for (const panel of panels) panel.querySelector("button").setAttribute("aria-pressed", String(Number(panel.dataset.facet) === facet));
  offerRates(facets[facet]);
  drawShown((c) => c.figure.picker !== "rate");
});
panels.forEach((panel, place) => panel.querySelector("button").addEventListener("click", () => chooseFacet(place)));
// The facet's own rates; the place on the ladder is kept where the ladders are as long.
function offerRates({ rates, rate: knee }) {
  const select = document.getElementById("rate");
  if (!select) { rate = knee; drawShown((c) => c.figure.picker === "rate"); return; }
  const place = select.options.length === rates.length ? select.selectedIndex : -1;
  select.replaceChildren(...rates.map(([value, label]) => new Option(label, value)));
  const first = rates.findIndex(([value]) => value === knee);
  chooseRate(place < 0 ? first : place);
}
redraw();
addEventListener("beforeprint", () => { for (const fold of document.querySelectorAll("details.fold")) fold.open = true; redraw(); });
