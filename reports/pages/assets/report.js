"use strict";
// Shows the report's figures: plotly draws what `report-data` holds of them; here are the legend of all
// figures, the selectors, the tables of numbers and the text for screen readers. Text only ever enters
// as text nodes, or escaped.
const page = JSON.parse(document.getElementById("report-data").textContent);
const SHOWN_AT_FIRST = 10;
const facets = page.facets || [{ rates: [], rate: "", series: page.series.map((_, s) => s) }];
const hidden = new Set(page.series.keys());
for (const { series } of facets) for (const s of series.slice(0, SHOWN_AT_FIRST)) hidden.delete(s);
const hiddenFirst = new Set(hidden);
let facet = 0, rate = facets[0].rate, printing = false;
const scheme = matchMedia("(prefers-color-scheme: dark)"), touch = matchMedia("(pointer: coarse)").matches;

// What was stored once, as plotly wants it: with the colours of the scheme.
function opened(value, key = "") {
  if (typeof value === "string") return scheme.matches && !printing && key.endsWith("color") ? page.dark[value] ?? value : value;
  if (value === null || typeof value !== "object") return value;
  if ("$" in value) return opened(page.shared[value.$], key);
  if (Array.isArray(value)) return typeof value.at(-1) === "number" ? value : value.map((inner) => opened(inner, key));
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, opened(inner, name)]));
}

// ---- small makers --------------------------------------------------------------------------
function svg(tag, attributes = {}, parent = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
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
const colour = (s) => `s${s % 8}`;
const dash = (s) => ["", "7 4", "2 4"][Math.floor(s / 8) % 3];
// As plotly's circle, square, triangle-up, diamond, triangle-down, cross, hourglass and star.
const SHAPES = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z", "M-3.6-3.6H3.6V3.6H-3.6Z", "M0-4.8L4.6 3.6H-4.6Z", "M0-5L5 0L0 5L-5 0Z",
  "M0 4.8L4.6-3.6H-4.6Z", "M-1.5-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z", "M-4.2-4.4H4.2L-4.2 4.4H4.2Z",
  "M0-5.6L1.3-1.8H5.3L2.1.7L3.3 4.5L0 2.2L-3.3 4.5L-2.1.7L-5.3-1.8H-1.3Z",
];
const SQUARE = "M-5-5H5V5H-5Z";
const shape = (i) => SHAPES[i % SHAPES.length];
function sign(box, variable, path, dashes = null) {
  const image = svg("svg", { viewBox: "-7 -7 14 14", width: 14, height: 14, "aria-hidden": "true" }, box);
  image.style.setProperty("--c", `var(--${variable})`);
  if (dashes !== null) svg("line", { x1: -7, x2: 7, stroke: "var(--c)", "stroke-width": 2, "stroke-dasharray": dashes }, image);
  svg("path", { d: path, fill: "var(--c)" }, image);
}
const swatch = (parent, ...of) => sign(html("span", "swatch", parent), ...of);
const seriesSwatch = (parent, s) => swatch(parent, colour(s), shape(s), dash(s));
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// A table that is wider than its room says so.
const beside = (box) => box.toggleAttribute("data-more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
const room = new ResizeObserver((entries) => entries.forEach(({ target }) => beside(target.closest(".scroll"))));
function hinted(box) {
  beside(box); room.observe(box);
  box.addEventListener("scroll", () => beside(box), { passive: true });
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
// Figures come one a task, so that the first is seen before the others are drawn.
const coming = [];
function drawNext() {
  const chart = coming.shift();
  if (!chart) return;
  if (coming.length) setTimeout(drawNext);
  if (chart.seen && chart.stale) chart.draw();
}
const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.chart.seen = isIntersecting;
    if (isIntersecting && coming.push(target.chart) === 1) setTimeout(drawNext);
  }
}, { rootMargin: "200px 0px" });

class Chart {
  constructor(host, figure) {
    this.host = host; this.figure = figure;
    this.first = figure.picker === "local" ? (figure.options.find(([k]) => k === "p99") || figure.options[0])[0] : "only";
    this.view = this.first;
    this.choices = host.querySelector(".choices"); this.legend = host.querySelector(".legend");
    this.plot = host.querySelector(".plot"); this.numbers = host.querySelector("details");
    this.voice = host.querySelector("[role=status]");
    this.own = host.dataset.facet === undefined ? null : Number(host.dataset.facet);
    this.seen = false; this.stale = true; this.width = 0; this.stops = null;
    // The same object every time: of another one plotly makes the figure anew.
    this.config = {
      displaylogo: false, displayModeBar: this.own === null && !touch,
      modeBarButtons: [this.savers(), ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    };
    if (figure.picker === "local") this.offerChoices();
    this.numbers?.addEventListener("toggle", () => this.fillNumbers());
    this.listen();
    host.chart = this;
    near.observe(host);
    new ResizeObserver(() => { if (Math.abs(this.plot.clientWidth - this.width) >= 1) this.draw(); }).observe(this.plot);
  }
  offerChoices() {
    for (const [key, label] of this.figure.options) {
      const button = html("button", "", this.choices, label);
      button.type = "button"; button.dataset.key = key; button.setAttribute("aria-pressed", String(key === this.view));
      button.addEventListener("click", () => { this.choose(key); this.draw(); });
    }
  }
  choose(key) {
    this.view = key;
    for (const button of this.choices.children) button.setAttribute("aria-pressed", String(button.dataset.key === key));
  }
  // The plots of the facet that is shown, or of its own; those of some figures are the same in all.
  views() {
    const { views } = this.figure;
    return views.length === 1 ? views[0] : views[this.own ?? facet];
  }
  // The plot that is chosen; `traces` without those of systems that are switched off.
  current() {
    const plot = this.views()[this.figure.picker === "rate" ? rate : this.view];
    const { data, layout, names } = plot ? opened(plot) : { data: [], layout: {} };
    const traces = data.filter(({ meta }) => !meta || names || !hidden.has(meta.s));
    return { names, layout, traces, known: traces.filter((t) => t.meta && t.hoverinfo !== "skip") };
  }
  name(s, names) { return (names || page.series)[s]; }
  // What is out of sight is drawn when it comes into view.
  draw() {
    this.drawLegend(); this.reserve(); this.fillNumbers();
    this.stale = !this.seen && !printing;
    if (this.stale) return;
    this.width = this.plot.clientWidth;
    const width = printing ? Math.min(this.width, 640) : this.width;
    if (!width) { this.stale = true; return; }
    const found = this.current(), { layout } = found;
    this.stops = null; this.stop = -1; this.found = found;
    if (!found.known.length) { this.say(); return; }
    this.plot.querySelector(".empty")?.remove();
    const rows = this.figure.kind !== "lines";
    if (rows) this.rowNames(found, width);
    const names = layout.xaxis.ticktext;
    if (names) layout.xaxis.tickangle = width / names.length < 6.5 * Math.max(...names.flatMap((name) => name.split("<br>").map((line) => line.length))) ? 90 : 0;
    Plotly.react(this.plot, found.traces, {
      ...layout, width, height: this.height(), title: { text: "" }, showlegend: false,
      margin: { ...layout.margin, t: rows ? 12 : 28 }, dragmode: touch ? false : "zoom",
    }, this.config);
  }
  height() {
    if (this.figure.kind !== "lines") return this.rows() * page.row_px + 58;
    return this.own === null ? Math.round(Math.min(330, Math.max(240, this.plot.clientWidth * 0.56))) : 190;
  }
  // Systems that are shown.
  rows() {
    const plot = this.views()[this.figure.picker === "rate" ? rate : this.view];
    const data = plot ? opened(opened(plot).data) : [];
    return new Set(data.filter((t) => t.meta && !hidden.has(t.meta.s)).map((t) => t.meta.s)).size;
  }
  // Room for what is not drawn yet, so that nothing below it moves.
  reserve() { this.plot.style.minHeight = `${Math.max(60, this.height())}px`; }
  say() {
    Plotly.purge(this.plot);
    this.plot.replaceChildren(); this.plot.style.minHeight = "";
    html("p", "empty", this.plot, this.emptiness());
  }
  emptiness() {
    const all = Object.values(this.views()).map((plot) => opened(plot));
    if (!all.some(({ data }) => data.some((t) => t.meta))) return "Nothing is known here.";
    if (this.figure.palette && this.found.traces.some((t) => t.meta)) return "No request missed its SLO at this rate.";
    return this.figure.picker === "rate" ? "No shown system has data at this rate." : "All systems are switched off.";
  }
  // Names above rows end where the figure does; those of rows that are switched off are left out.
  rowNames({ known, layout, names }, width) {
    const fits = Math.max(8, Math.floor((width - 30) / 7.2)), shown = new Map(known.map((t) => [`s${t.meta.s}`, this.name(t.meta.s, names)]));
    layout.annotations = layout.annotations.filter(({ name }) => shown.has(name)).map((note) => {
      const text = shown.get(note.name);
      return { ...note, text: escaped(text.length <= fits ? text : `${text.slice(0, fits - 1)}…`) };
    });
  }
  // The whole figure as an image: with its title, where its numbers come from, and a legend.
  savers() {
    return [["png", "camera"], ["svg", "disk"]].map(([format, icon]) => ({
      name: `save-${format}`, title: `Download as ${format.toUpperCase()}`, icon: Plotly.Icons[icon],
      click: () => this.save(format),
    }));
  }
  async save(format) {
    const found = this.current(), { traces, layout } = found, known = new Set(traces.filter((t) => t.showlegend !== false).map((t) => t.name));
    const rows = Math.ceil(known.size / 3), height = this.height() + 60 + 24 * rows;
    if (this.figure.kind !== "lines") this.rowNames(found, 800);
    await Plotly.downloadImage({ data: traces, layout: { ...layout, width: 800, height } }, { format, width: 800, height, scale: 2, filename: this.figure.id });
  }
  drawLegend() {
    if (!this.legend) return;
    this.legend.replaceChildren();
    const views = Object.values(this.views()), { names } = this.current(), { figure } = this;
    if (names) {
      names.forEach((name, s) => { const key = html("span", "key", this.legend); seriesSwatch(key, s); html("span", "", key, name); });
      return;
    }
    const traces = views.flatMap((plot) => opened(plot).data.filter((t) => t.meta));
    if (figure.categories.length) {
      const occurring = new Set(traces.map((t) => t.meta.part));
      figure.categories.forEach((name, i) => {
        if (!occurring.has(i)) return;
        const key = html("span", "key", this.legend);
        if (figure.palette) swatch(key, `${figure.palette}${i}`, SQUARE); else swatch(key, "soft", shape(i));
        html("span", "", key, name);
      });
      return;
    }
    if (figure.kind === "bars" && !hidden.size) return; // rows bear names
    const drawn = new Set(traces.map((t) => t.meta.s));
    if (traces.every((t) => t.mode === "markers") && drawn.size < 2) return;
    seriesLegend(this.legend, [...drawn].sort((a, b) => a - b));
  }
  number(axis, value) {
    if (value === null || value === undefined) return "–";
    const { tickprefix = "", ticksuffix = "", ticktext } = axis;
    if (ticktext) return plain(ticktext[value]).replaceAll("<br>", " ");
    return `${tickprefix}${value.toLocaleString("en", { maximumSignificantDigits: 4 })}${ticksuffix}`;
  }
  fillNumbers() {
    if (!this.numbers) return;
    this.numbers.querySelector(".scroll")?.remove();
    if (!this.numbers.open) return;
    const box = html("div", "scroll", this.numbers);
    box.tabIndex = 0;
    const table = html("table", "", box); hinted(box); room.observe(table);
    const head = html("tr", "", html("thead", "", table)), body = html("tbody", "", table);
    const { x, y, categories, kind } = this.figure, { known, layout, names } = this.current();
    const spread = kind === "bars" ? !categories.length : known.some((t) => t.customdata);
    for (const name of ["system", ...(categories.length ? categories : kind === "lines" ? [x, y] : [x]), ...(spread ? ["lowest", "highest"] : [])]) html("th", "", head, name).scope = "col";
    const add = (s, cells) => {
      const row = html("tr", "", body);
      html("th", "", row, this.name(s, names)).scope = "row";
      for (const cell of cells) html("td", "", row, cell);
    };
    const ends = (t, i, axis) => (spread ? (t.customdata?.[i] ?? [t.y[i], t.y[i]]).map((v) => this.number(axis, v)) : []);
    if (categories.length) {
      for (const s of new Set(known.map((t) => t.meta.s)))
        add(s, categories.map((_, part) => this.number(layout.xaxis, known.find((t) => t.meta.s === s && t.meta.part === part)?.x[0] ?? (kind === "bars" ? 0 : null))));
      return;
    }
    for (const t of known) {
      if (kind === "bars") add(t.meta.s, [this.number(layout.xaxis, t.x[0]), ...ends(t, 0, layout.xaxis)]);
      else t.x.forEach((at, i) => {
        const where = this.number(layout.xaxis, at);
        add(t.meta.s, [t.text ? `${where} (${plain(t.text[i])})` : where, this.number(layout.yaxis, t.y[i]), ...ends(t, i, layout.yaxis)]);
      });
    }
  }

  // ---- reading by keys: what a pointer would find, also said -------------------------------
  listen() {
    this.plot.tabIndex = 0; this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", `${this.figure.title}, ${page.origin}. Arrow keys read the values; the numbers are in a table below.`);
    this.plot.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") this.hush();
      if (!way || this.stale || !this.found?.known.length) return;
      event.preventDefault();
      this.stops ??= this.places();
      this.stop = Math.min(this.stops.length - 1, Math.max(0, this.stop + way));
      const { points, text } = this.stops[this.stop]();
      Plotly.Fx.hover(this.plot, points);
      this.voice.textContent = text;
    });
    this.plot.addEventListener("blur", () => this.hush());
  }
  hush() { if (this.found?.known.length && !this.stale) Plotly.Fx.unhover(this.plot); }
  // Where the keys stop: every point, or every place on the axis along which all systems are compared.
  places() {
    const { known, traces, layout, names } = this.found, along = layout.hovermode[0] === "y" ? "y" : "x", across = along === "y" ? "x" : "y";
    const point = (t, i) => ({ curveNumber: traces.indexOf(t), pointNumber: i });
    const value = (t, i, axis) => {
      const number = (v) => this.number(layout[`${axis}axis`], v), [low, high] = t.customdata?.[i] ?? [];
      return number(t[axis][i]) + (low !== high ? ` (${number(low)} – ${number(high)})` : "");
    };
    const label = (t) => (t.meta.part === undefined ? this.name(t.meta.s, names) : this.figure.categories[t.meta.part]);
    if (layout.hovermode === "closest")
      return known.flatMap((t) => t.x.map((_, i) => () => ({
        points: [point(t, i)],
        text: `${t.text ? plain(t.text[i]) : ""} ${label(t)}: ${this.figure.x} ${value(t, i, "x")}, ${this.figure.y} ${value(t, i, "y")}`.trim(),
      })));
    if (this.figure.kind !== "lines")
      return [...new Set(known.map((t) => t.meta.s))].map((s) => () => {
        const of = known.filter((t) => t.meta.s === s);
        return { points: of.map((t) => point(t, 0)), text: `${this.name(s, names)}, ${this.figure.x}: ${of.map((t) => `${t.meta.part === undefined ? "" : `${label(t)} `}${value(t, 0, "x")}`).join("; ")}` };
      });
    const all = [...new Set(known.flatMap((t) => t[along]))].filter((v) => v !== null).sort((a, b) => a - b);
    const stops = all.length <= 60 ? all : Array.from({ length: 41 }, (_, i) => all[Math.round((i / 40) * (all.length - 1))]);
    return stops.map((at) => () => {
      const found = known.map((t) => [t, nearest(t[along], at)]).filter(([t, i]) => t[across][i] !== null);
      const said = found.sort(([a, i], [b, j]) => b[across][j] - a[across][i]).map(([t, i]) => `${label(t)} ${value(t, i, across)}`);
      return { points: found.map(([t, i]) => point(t, i)), text: `${this.figure[along]} ${this.number(layout[`${along}axis`], at)}: ${said.join("; ")}` };
    });
  }
}
// Labels come escaped for plotly; here they are text.
const plain = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
const nearest = (values, at) => values.reduce((best, v, i) => (Math.abs(v - at) < Math.abs(values[best] - at) ? i : best), 0);

// ---- the page ------------------------------------------------------------------------------
const charts = [...document.querySelectorAll("figure[data-figure]")].map((host) => new Chart(host, page.figures[host.dataset.figure]));
const redraw = () => {
  charts.forEach((chart) => chart.draw());
  for (const box of document.querySelectorAll("[data-legend]")) seriesLegend(box, page.series.map((_, s) => s));
};
for (const box of document.querySelectorAll("[data-series]")) {
  const s = Number(box.dataset.series);
  sign(box, colour(s), shape(s), dash(s));
}
for (const box of document.querySelectorAll("[data-bar]")) {
  const image = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, box);
  svg("rect", { width: Number(box.dataset.bar), height: 6, fill: `var(--${colour(Number(box.dataset.of))})` }, image);
  if (box.dataset.range) {
    const [low, high] = box.dataset.range.split(" ").map(Number);
    svg("rect", { x: low, y: 2, width: high - low, height: 2, fill: "var(--ink)" }, image);
  }
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
// ---- the address keeps what is chosen and hidden -------------------------------------------
const choiceOf = (chart) => chart.own === null && chart.figure.picker === "local" && chart.view !== chart.first;
function keep() {
  const kept = new URLSearchParams();
  const anchor = location.hash.includes("=") ? new URLSearchParams(location.hash.slice(1)).get("at") : location.hash.slice(1);
  if (facet) kept.set("facet", facet);
  if (rate !== facets[facet].rate) kept.set("rate", rate);
  for (const [s, name] of page.series.entries())
    if (hidden.has(s) !== hiddenFirst.has(s)) kept.append(hidden.has(s) ? "hide" : "show", name);
  for (const chart of charts.filter(choiceOf)) kept.append("view", `${chart.figure.id}:${chart.view}`);
  if (String(kept) && anchor) kept.set("at", anchor);
  const fragment = String(kept) || anchor || "";
  if (fragment !== location.hash.slice(1)) history.replaceState(null, "", `#${fragment}`);
}
function restore() {
  const kept = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  hidden.clear();
  for (const [s, name] of page.series.entries())
    if (kept.getAll("hide").includes(name) || (hiddenFirst.has(s) && !kept.getAll("show").includes(name))) hidden.add(s);
  for (const chart of charts) if (chart.own === null && chart.figure.picker === "local") chart.choose(chart.first);
  for (const view of kept.getAll("view")) {
    const [id, key] = view.split(":"), chart = charts.find((c) => c.own === null && c.figure.id === id);
    if (chart?.figure.picker === "local" && chart.figure.options.some(([k]) => k === key)) chart.choose(key);
  }
  if (facets.length > 1) chooseFacet(Math.min(facets.length - 1, Math.max(0, Number(kept.get("facet")) || 0)));
  const select = document.getElementById("rate");
  const place = select ? [...select.options].findIndex((option) => option.value === (kept.get("rate") ?? facets[facet].rate)) : -1;
  if (place >= 0) chooseRate(place);
  redraw();
  document.getElementById(kept.get("at") ?? "")?.scrollIntoView();
}
if (location.hash.includes("=")) restore(); else redraw();
addEventListener("hashchange", () => { if (location.hash.includes("=")) restore(); else keep(); });
document.addEventListener("click", () => keep());
document.addEventListener("change", () => keep());
document.querySelectorAll(".scroll").forEach(hinted);
scheme.addEventListener("change", redraw);
addEventListener("beforeprint", () => {
  printing = true;
  for (const fold of document.querySelectorAll("details.fold")) fold.open = true;
  redraw();
});
addEventListener("afterprint", () => { printing = false; redraw(); });
