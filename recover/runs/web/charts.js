// The charts of one or several runs, drawn by uPlot: for the live page and for the report.
// A run is {name, colour, series, heldout, marks, global_batch}; series are columns as `CurveTable.series` gives them.
"use strict";
const Charts = (() => {
const LIST = [
  {id: "loss", title: "Loss", column: "loss", extremes: ["low", "high"], heldout: true, log: true, smooth: true, labels: true},
  {id: "batch", title: "Microbatches per step", column: "microbatches", zero: true, stepped: true, whole: true, level: true},
  {id: "replicas", title: "Replicas", column: "replicas", zero: true, stepped: true, whole: true, labels: true},
  {id: "speed", title: "Tokens per second", column: "tokens_per_second", zero: true, smooth: true},
  {id: "pace", title: "Microbatches per second", column: "pace", zero: true, smooth: true},
  {id: "grad", title: "Gradient norm", column: "grad_norm", extremes: ["grad_low", "grad_high"], log: true, smooth: true},
  {id: "lr", title: "Learning rate", column: "lr", zero: true},
  {id: "memory", title: "GPU memory, peak GiB", column: "memory", zero: true},
];
const MARKS = {lost: ["--red", [3, 4], "replica lost"], joined: ["--violet", [7, 4], "replica joined"], left: ["--grey", [2, 6], "replica left on notice"], resumed: ["--sky", [], "run resumed"]};
const FONT = "12px system-ui, sans-serif";
const LEFT = 62, RIGHT = 22, ROW = 14, ROWS = 3;  // pixels beside the plot; rows of labels above it

const RULER = document.createElement("canvas").getContext("2d");
const tint = name => name.startsWith("--") ? getComputedStyle(document.documentElement).getPropertyValue(name).trim() : name;
const faded = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
function shown(value) {  // five significant digits
  if (value == null) return "\u2013";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size < 1e-4) return (+value.toPrecision(5)).toExponential();
  return size >= 1e5 ? Math.round(value).toLocaleString("en") : value.toLocaleString("en", {maximumSignificantDigits: size >= 1e4 ? 6 : 5});
}
function derive(series) {  // columns that are made of others
  const some = name => (series[name] || []).some(v => v != null);
  return {
    ...series,
    pace: some("tokens_per_second") ? [] : (series.microbatches || []).map((v, i) => series.seconds[i] ? v / series.seconds[i] : null),
    memory: (series.gpu_peak_mib || []).map(v => v == null ? null : v / 1024),
  };
}
function smoothed(values, width) {  // the mean over as many neighbours on both sides: it does not lag
  const sums = [0], counts = [0];
  for (const v of values) { sums.push(sums.at(-1) + (v ?? 0)); counts.push(counts.at(-1) + (v != null)); }
  return values.map((v, i) => {
    if (v == null) return null;
    const reach = Math.min(i, values.length - 1 - i, width >> 1), from = i - reach, to = i + reach + 1;
    return (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}
function marksOf(incidents, resumed) {
  const marks = [];
  for (const one of incidents) {
    if (one.step == null) continue;
    if ((one.dead_replicas || []).length) marks.push({step: one.step, kind: "lost", label: `lost ${one.dead_replicas.join(", ")}`});
    if ((one.left_replicas || []).length) marks.push({step: one.step, kind: "left", label: `left ${one.left_replicas.join(", ")}`});
    if ((one.joined_replicas || []).length) marks.push({step: one.step, kind: "joined", label: `joined ${one.joined_replicas.join(", ")}`});
  }
  for (const one of resumed) marks.push({step: one.step, kind: "resumed", label: one.replicas ? `resumed on ${one.replicas}` : "resumed"});
  return marks.sort((a, b) => a.step - b.step);
}

class Chart {
  constructor(what, place, first) {
    this.what = what;
    this.figure = document.createElement("figure");
    this.figure.id = what.id;
    this.figure.className = first ? "chart first" : "chart";
    this.figure.tabIndex = 0;
    this.caption = document.createElement("figcaption");
    this.caption.textContent = what.title;
    this.plot = document.createElement("div");
    this.figure.append(this.caption, this.plot);
    this.figure.hidden = true;
    this.height = first ? 250 : 170;
    place.append(this.figure);
    new ResizeObserver(() => this.u && this.plot.clientWidth && this.u.setSize({width: this.plot.clientWidth, height: this.height})).observe(this.plot);
    this.figure.addEventListener("keydown", event => this.move(event));
  }

  update(runs, options) {
    const what = this.what, log = what.log && options.log, width = what.smooth ? options.smooth : 0;
    const tables = [], entries = [], several = runs.length > 1;
    let points = 0;
    this.level = what.level && new Set(runs.map(run => run.global_batch)).size === 1 ? runs[0].global_batch : null;
    runs.forEach((run, index) => {
      const values = run.columns[what.column] || [], known = values.filter(v => v != null).length;
      points += known;
      if (known) {
        const name = several ? run.name : what.title.toLowerCase().split(",")[0], colour = tint(run.colour);
        const table = [run.columns.step, values];
        // Of runs that coincide all are seen: the first is a wide band, the last a thin line over it.
        const wide = several ? 1.7 + 4 * (runs.length - 1 - index) / (runs.length - 1) : 1.8;
        const band = !several && what.extremes ? what.extremes.map(column => run.columns[column]) : null;
        entries.push({label: name, colour: width ? faded(colour, .35) : wide > 1.8 ? faded(colour, .5) : colour, wide: width ? 1 : wide, band, of: "value"});
        if (width) { table.push(smoothed(values, width)); entries.push({label: `${several ? name + ", " : ""}smoothed`, colour, wide: 2, of: "smoothed"}); }
        if (band) for (const column of [band[1], band[0]]) { table.push(column); entries.push({label: "", colour: "#0000", of: "extreme"}); }
        tables.push(table);
      }
      if (what.heldout && run.heldout.step.length) {
        tables.push([run.heldout.step, run.heldout.loss]);
        entries.push({label: several ? `${run.name}, held-out` : "held-out", colour: tint(several ? run.colour : "--orange"), dash: several ? [5, 4] : [], wide: 2, points: true, of: "heldout"});
      }
    });
    this.figure.hidden = !tables.length;
    this.figure.dataset.points = points;
    this.marks = runs.flatMap(run => run.marks.map(mark => several ? {...mark, colour: run.colour} : mark));
    this.figure.dataset.marks = JSON.stringify(this.marks.map(mark => [mark.step, mark.kind, mark.label]));
    if (!tables.length) return;
    this.caption.textContent = what.title + (this.level ? ` (B = ${shown(this.level)})` : "") + (log ? ", logarithmic" : "");
    const data = uPlot.join(tables);
    if (log) for (let i = 1; i < data.length; i++) data[i] = data[i].map(v => v != null && v <= 0 ? null : v);
    const key = JSON.stringify([entries.map(e => [e.label, e.colour, e.wide]), log, tint("--ink")]);
    if (this.key !== key) {
      this.key = key;
      if (this.u) this.u.destroy();
      this.zoomed = false;
      this.entries = entries;
      this.u = new uPlot(this.options(entries, log), data, this.plot);
    } else {
      entries.forEach((entry, i) => this.entries[i].band = entry.band);
      this.u.setData(data, !this.zoomed);
      if (this.zoomed) this.u.setScale("x", {min: this.u.scales.x.min, max: this.u.scales.x.max});
      else this.u.redraw(true, true);  // marks may need another number of rows
    }
    this.tell(entries, data);
  }

  tell(entries, data) {
    const said = entries.map((entry, i) => {
      if (entry.of === "extreme") return "";
      const at = data[i + 1].findLastIndex(v => v != null), from = data[i + 1].findIndex(v => v != null);
      return at < 0 ? "" : `${entry.label}: ${shown(data[i + 1][from])} at step ${data[0][from]}, ${shown(data[i + 1][at])} at step ${data[0][at]}`;
    });
    this.figure.setAttribute("aria-label", `${this.what.title}. ${said.filter(Boolean).join("; ")}`);
  }

  value(entry, u, index, at) {  // under the pointer; without one, the last
    const values = u.data[index];
    at ??= values.findLastIndex(v => v != null);
    if (entry.of === "heldout") {
      while (at >= 0 && values[at] == null) at--;
      return at < 0 ? "\u2013" : `${shown(values[at])} (step ${u.data[0][at]})`;
    }
    while (at > 0 && values[at] === undefined) at--;  // a step of another curve alone
    const value = values[at];
    if (!entry.band || value == null) return shown(value);
    const low = u.data[this.entries.findIndex(e => e.of === "extreme") + 2][at], high = u.data[this.entries.findIndex(e => e.of === "extreme") + 1][at];
    return low === high || low == null ? shown(value) : `${shown(value)} (${shown(low)} to ${shown(high)})`;
  }

  options(entries, log) {
    const what = this.what, soft = tint("--soft"), line = tint("--line");
    const axis = {stroke: soft, font: FONT, grid: {stroke: line, width: 1}, ticks: {stroke: line, width: 1, size: 4}};
    const extreme = entries.findIndex(entry => entry.of === "extreme") + 1;
    const y = {...axis, size: LEFT, gap: 4, values: (u, splits) => splits.map(v => v == null ? "" : shown(+v.toPrecision(6)))};
    if (what.whole) y.incrs = [1, 2, 5].flatMap(n => [...Array(10).keys()].map(p => n * 10 ** p)).sort((a, b) => a - b);
    if (log) { y.splits = (u, i, low, high) => logSplits(low, high); y.filter = (u, splits) => splits; }
    return {
      width: this.plot.clientWidth || 300, height: this.height, padding: [u => this.room(u), RIGHT, 0, 0],
      cursor: {sync: {key: "run"}, drag: {x: true, y: false}, points: {size: 7}, y: false},
      legend: {live: true},
      scales: {
        x: {time: false, range: (u, low, high) => low == null ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high]},
        y: {distr: log ? 3 : 1, range: (u, low, high) => this.range(low, high, log)},
      },
      axes: [{...axis, size: 34, incrs: [1, 2, 5].flatMap(n => [...Array(8).keys()].map(p => n * 10 ** p)).sort((a, b) => a - b), values: (u, splits) => splits.map(v => v.toLocaleString("en"))}, y],
      series: [
        {label: "step", value: (u, v) => shown(v ?? u.data[0].at(-1))},
        ...entries.map((entry, i) => ({
          label: entry.label, stroke: entry.colour, width: entry.wide, dash: entry.dash,
          class: entry.of === "extreme" ? "extremes" : entry.of,
          spanGaps: entry.of === "heldout",
          paths: what.stepped ? uPlot.paths.stepped({align: 1}) : undefined,
          points: entry.points ? {show: u => u.data[i + 1].filter(v => v != null).length <= 60, size: 6, fill: entry.colour} : {show: u => u.data[i + 1].filter(v => v != null).length === 1 && entry.of !== "extreme", size: 6, fill: entry.colour},
          value: (u, v, index, at) => this.value(entry, u, index, at),
        })),
      ],
      bands: extreme ? [{series: [extreme, extreme + 1], fill: faded(tint(entries[0].colour.slice(0, 7)), .2)}] : [],
      hooks: {
        draw: [u => this.draw(u)],
        setSelect: [u => { if (u.select.width > 0) this.zoomed = true; }],
        ready: [u => u.over.addEventListener("dblclick", () => this.zoomed = false)],
      },
    };
  }

  range(low, high, log) {
    if (low == null) return [log ? 1 : 0, log ? 10 : 1];
    if (this.what.zero) return [0, Math.max(high, this.level || 0) * 1.1 || 1];
    if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** .05, high * (high / low) ** .05];
    const room = (high - low) * .06 || Math.abs(high) * .1 || 1;
    return [low - room, high + room];
  }

  draw(u) {
    const {ctx, bbox} = u, ratio = uPlot.pxRatio;
    ctx.save();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.lineWidth = 1.3 * ratio;
    if (this.level) {
      const at = Math.round(u.valToPos(this.level, "y", true));
      ctx.strokeStyle = tint("--orange");
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      ctx.beginPath(); ctx.moveTo(bbox.left, at); ctx.lineTo(bbox.left + bbox.width, at); ctx.stroke();
    }
    for (const mark of this.marks) {
      const {min, max} = u.scales.x;
      if (mark.step < min || mark.step > max) continue;
      const [colour, dash] = MARKS[mark.kind], at = u.valToPos(mark.step, "x", true);
      ctx.strokeStyle = ctx.fillStyle = tint(mark.colour || colour);
      ctx.setLineDash(dash.map(n => n * ratio));
      ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
    }
    const placed = this.place(u);
    for (const {mark, middle, row} of placed) {
      ctx.fillStyle = tint(mark.colour || MARKS[mark.kind][0]);
      ctx.fillText(mark.label, middle * ratio, bbox.top - (5 + ROW * row) * ratio);
    }
    this.figure.dataset.labels = JSON.stringify(placed.map(({mark}) => mark.label));
    ctx.restore();
  }

  place(u) {  // where labels stand above the plot; joins and resumptions come first where there is no room for all
    const {min, max} = u.scales.x, width = this.plot.clientWidth || 300, rows = Array.from({length: ROWS}, () => []), placed = [];
    if (!this.what.labels || min == null) return placed;
    const seen = this.marks.filter(mark => mark.step >= min && mark.step <= max);
    RULER.font = FONT;
    for (const mark of [...seen.filter(mark => mark.kind !== "lost"), ...seen.filter(mark => mark.kind === "lost")]) {
      const half = RULER.measureText(mark.label).width / 2 + 3, at = LEFT + (width - LEFT - RIGHT) * (max > min ? (mark.step - min) / (max - min) : .5);
      const middle = Math.max(half, Math.min(at, width - half));
      const row = rows.findIndex(taken => taken.every(([from, to]) => middle + half <= from || middle - half >= to));
      if (row < 0) continue;
      rows[row].push([middle - half, middle + half]);
      placed.push({mark, middle, row});
    }
    return placed;
  }

  room(u) {  // above the plot
    return this.what.labels ? 16 + ROW * Math.max(0, ...this.place(u).map(label => label.row)) : 8;
  }

  move(event) {  // values by keyboard
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by || !this.u) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(this.u.data[0].length - 1, (this.u.cursor.idx ?? (by > 0 ? -1 : this.u.data[0].length)) + by));
    this.u.setCursor({left: this.u.valToPos(this.u.data[0][at], "x"), top: this.height / 3});
  }
}
function logSplits(low, high) {
  const found = [];
  if (high / low < 8) {
    const step = [1, 2, 5].flatMap(n => [...Array(24).keys()].map(p => n * 10 ** (p - 12))).sort((a, b) => a - b).find(s => (high - low) / s <= 5);
    for (let v = Math.ceil(low / step) * step; v <= high; v += step) found.push(v);
    return found;
  }
  const factors = high / low < 1e3 ? [1, 2, 5] : [1];
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++)
    for (const f of factors) if (f * 10 ** p >= low && f * 10 ** p <= high) found.push(f * 10 ** p);
  return found;
}

function make(place) {  // the toolbar and the charts
  const options = {log: false, smooth: 0}, bar = document.createElement("div"), charts = document.createElement("div");
  bar.className = "toolbar";
  bar.innerHTML = `<label>Smoothing <select id="chart-smooth"><option value="0">none</option><option value="5">5 points</option>
    <option value="15">15 points</option><option value="51">51 points</option></select></label>
    <label><input type="checkbox" id="chart-log"> Logarithmic loss and gradient norm</label><span class="marks"></span>`;
  charts.className = "charts";
  place.append(bar, charts);
  const all = LIST.map((what, i) => new Chart(what, charts, i === 0));
  let runs = [], due = false;
  const draw = () => { due = false; for (const chart of all) chart.update(runs, options); };
  const soon = () => { if (!due) { due = true; requestAnimationFrame(draw); } };
  bar.querySelector("#chart-smooth").addEventListener("change", event => { options.smooth = +event.target.value; soon(); });
  bar.querySelector("#chart-log").addEventListener("change", event => { options.log = event.target.checked; soon(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  function update(found) {
    runs = found.map(run => ({...run, columns: derive(run.series)}));
    const kinds = new Set(runs.flatMap(run => run.marks.map(mark => mark.kind)));
    bar.querySelector(".marks").replaceChildren(...Object.entries(MARKS).filter(([kind]) => kinds.has(kind)).map(([kind, [colour, dash, name]]) => {
      const entry = document.createElement("span"), sign = document.createElement("i");
      entry.dataset.kind = kind;
      sign.style.borderColor = `var(${runs.length > 1 ? "--soft" : colour})`;  // several runs: marks have their colours
      sign.style.borderLeftStyle = dash.length ? "dashed" : "solid";
      entry.append(sign, name);
      return entry;
    }));
    soon();
  }
  return {update, all: Object.fromEntries(all.map(chart => [chart.what.id, chart])), options};
}
return {make, marksOf};
})();
