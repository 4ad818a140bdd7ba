// The page: it draws the curves from the data inside the file, and filters the completions. Every text of the run goes
// into the page as text, never as markup.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function number(value, percent = false) {
  if (value === null || value === undefined) return "–";
  if (percent) return `${(100 * value).toFixed(1)}%`;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

// --- light and dark ---------------------------------------------------------------------------------------------------

const views = []; // of the curves, which are painted on canvases and so do not hear of new colours
function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  for (const view of views) view.request_paint();
}

const darkness = matchMedia("(prefers-color-scheme: dark)");
setTheme(darkness.matches);
darkness.addEventListener("change", () => setTheme(darkness.matches));
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "light"));

// --- curves -----------------------------------------------------------------------------------------------------------

function smooth(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function columns(chart, index, chosen) {
  const weight = chart.smooth ? chosen : 0;
  const series = chart.series[index];
  let low = series.low ?? series.values;
  let high = series.high ?? series.values;
  if (chart.kind === "stack") {
    const stacked = (end) =>
      series.values.map((_, i) => {
        let sum = 0;
        for (let j = 0; j < end; j++) sum += smoothedOf(chart.series[j], weight)[i];
        return sum;
      });
    low = stacked(index);
    high = stacked(index + 1);
  }
  return {
    step: series.steps,
    raw: series.values,
    shown: smoothedOf(series, weight),
    low,
    high,
    name: series.values.map(() => series.name),
  };
}

const cache = new Map();
function smoothedOf(series, weight) {
  if (cache.get(series)?.weight !== weight) cache.set(series, { weight, values: smooth(series.values, weight) });
  return cache.get(series).values;
}

const smoothing = () => Number(byId("smoothing").value);
function fillSources() {
  for (const { source, chart, index } of sources) source.data = columns(chart, index, smoothing());
}

const sources = [];
function frame(figure, chart) {
  const last = chart.series.map((series) => number(series.values.at(-1), chart.percent)).join(" / ");
  const legend = element("div", { class: "legend", "aria-hidden": "true" });
  if (chart.series.length > 1) {
    for (const series of chart.series) {
      const line = element("i");
      line.style.borderColor = series.color;
      legend.append(element("span", {}, line, series.name));
    }
  }
  const table = element("div", { class: "table", tabindex: "0" });
  const details = element("details", {}, element("summary", {}, "Numbers"), table);
  details.addEventListener("toggle", () => table.childElementCount || fillTable(table, chart), { once: true });
  const plot = element("div", { class: "plot" });
  const caption = element("figcaption", {}, chart.title);
  if (chart.series.length < 4 && chart.kind !== "stack") {
    caption.append(element("span", { class: "last", title: "last" }, last));
  }
  figure.append(caption, element("p", { class: "about" }, chart.about || "\u00a0"), plot, legend, details);
  const words = chart.series
    .map((s) => `${s.name}: ${number(s.values[0], chart.percent)} at step ${s.steps[0]}, ` +
      `${number(s.values.at(-1), chart.percent)} at step ${s.steps.at(-1)}`)
    .join("; ");
  plot.setAttribute("aria-label", `${chart.title}. ${words}`);
  plot.setAttribute("role", "img");
  return plot;
}

function fillTable(table, chart) {
  const steps = [...new Set(chart.series.flatMap((series) => series.steps))].sort((a, b) => a - b);
  const head = element("tr", {}, element("th", { scope: "col" }, "step"));
  const values = chart.series.map((series) => new Map(series.steps.map((step, i) => [step, series.values[i]])));
  for (const series of chart.series) head.append(element("th", { scope: "col" }, series.name));
  const body = element("tbody");
  for (const step of steps) {
    const row = element("tr", {}, element("th", { scope: "row" }, number(step)));
    for (const of of values) row.append(element("td", {}, number(of.get(step), chart.percent)));
    body.append(row);
  }
  table.append(element("table", {}, element("thead", {}, head), body));
}

// Values of a metric are never markup: Bokeh puts them into a tooltip as text.
function bokehPlot(chart, shared) {
  const plot = Bokeh.Plotting.figure({
    height: 190,
    sizing_mode: "stretch_width",
    toolbar_location: null,
    tools: [new Bokeh.BoxZoomTool({ dimensions: "width" })],
    min_border_right: 12,
    ...(shared.plot ? { x_range: shared.plot.x_range } : {}),
  });
  shared.plot ??= plot;
  plot.xaxes[0].formatter = new Bokeh.BasicTickFormatter({ use_scientific: false });
  plot.xaxes[0].ticker = new Bokeh.BasicTicker({ min_interval: 1, num_minor_ticks: 0 }); // there is no step 1.5
  // A curve that stays at one value has it in the middle; a share that does is shown between 0 and 100%.
  const values = chart.series.flatMap((series) => series.values);
  plot.y_range.default_span = Math.max(...values.map(Math.abs)) || 1;
  if (chart.percent) {
    plot.yaxes[0].formatter = new Bokeh.NumeralTickFormatter({ format: "0.[0]%" });
    if (values.every((value) => value === values[0])) plot.y_range = new Bokeh.Range1d({ start: 0, end: 1 });
  }
  chart.series.forEach((series, index) => {
    const source = new Bokeh.ColumnDataSource({ data: columns(chart, index, smoothing()) });
    sources.push({ source, chart, index });
    const [x, color] = [{ field: "step" }, series.color];
    const isStack = chart.kind === "stack";
    if (isStack || series.low) {
      plot.varea(x, { field: "low" }, { field: "high" }, { source, fill_color: color, fill_alpha: isStack ? 0.8 : 0.15 });
    }
    const y = { field: isStack ? "high" : "shown" };
    const line = plot.line(x, y, { source, color, line_width: isStack ? 0.5 : 2 });
    if (!isStack) {
      plot.line(x, { field: "raw" }, { source, color, line_width: 1, line_alpha: 0.3 });
      plot.scatter(x, { field: "raw" }, { source, color, size: 4, fill_alpha: 0.6, line_alpha: 0 });
    }
    const value = chart.percent ? "@raw{0.0%}" : "@raw{0.[0000]}";
    const tooltips = [["", `step @step{0,0}: @name ${value}`]];
    plot.add_tools(new Bokeh.HoverTool({ renderers: [line], mode: "vline", tooltips }));
  });
  plot.add_tools(new Bokeh.CrosshairTool({ dimensions: "height", overlay: shared.crosshair }));
  return plot;
}

// All curves share their steps and one crosshair. Those of closed details are drawn when these are opened.
async function draw(figures) {
  const charts = figures.map((figure) => data.charts[Number(figure.dataset.chart)]);
  const targets = figures.map((figure, i) => frame(figure, charts[i]));
  const crosshair = new Bokeh.Span({ dimension: "height", line_dash: "dotted", line_color: "#888888" });
  const shared = { crosshair };
  const page = new Bokeh.Document();
  for (const chart of charts) {
    const plot = bokehPlot(chart, shared);
    plots.push(plot);
    page.add_root(plot);
  }
  const manager = await Bokeh.embed.add_document_standalone(page, document.body, targets);
  views.push(...manager.roots.filter((view) => view.model.type === "Figure"));
  for (const target of targets) target.addEventListener("click", () => showStepNear(crosshair.location));
}

const plots = [];
const chartsIn = (id) => [...document.querySelectorAll(`${id} > .charts > .chart`)];
draw(chartsIn("#curves"));
byId("further")?.addEventListener("toggle", () => draw(chartsIn("#further")), { once: true });
byId("smoothing")?.addEventListener("input", fillSources);
byId("reset")?.addEventListener("click", () => {
  for (const plot of plots) plot.reset.emit();
});

// --- completions ------------------------------------------------------------------------------------------------------

const GROUPS_AT_ONCE = 8;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;
const state = { step: "", prompt: null, shown: GROUPS_AT_ONCE };
const filters = byId("filters");

// What a group's rows look like to the filters.
function indexed(completions) {
  const { rows } = completions;
  completions.lower = [];
  const plain = (text) =>
    typeof text === "string"
      ? text
      : text.map((m) => [m.text, ...(m.calls ?? [])].join("\n")).join("\n");
  completions.plain = rows.text.map(plain);
  completions.plainPrompts = completions.prompts.map(plain);
  completions.lower = completions.plain.map((text) => text.toLowerCase());
  completions.lowerPrompts = completions.plainPrompts.map((text) => text.toLowerCase());
  completions.steps = [...new Set(completions.groups.map((group) => group[0]))];
  completions.visits = new Map();
  for (const group of completions.groups) {
    completions.visits.set(group[1], (completions.visits.get(group[1]) ?? new Set()).add(group[0]));
  }
  return completions;
}

const current = () => data.completions;
const total = (row) => current().rows.total?.[row] ?? null;
const range = (first, count) => Array.from({ length: count }, (_, i) => first + i);
const ORDERS = {
  best: (rows) => -Math.max(...rows.map((row) => total(row) ?? -Infinity)),
  worst: (rows) => Math.min(...rows.map((row) => total(row) ?? Infinity)),
  spread: (rows) => {
    const values = rows.map((row) => total(row) ?? 0);
    return Math.min(...values) - Math.max(...values);
  },
  longest: (rows) => -Math.max(...rows.map((row) => current().plain[row].length)),
};

function matches() {
  const of = current();
  const text = byId("text").value.toLowerCase();
  const low = byId("low").value === "" ? -Infinity : Number(byId("low").value);
  const high = byId("high").value === "" ? Infinity : Number(byId("high").value);
  const isBounded = low > -Infinity || high < Infinity;
  const onlyCut = byId("cut").checked;
  const found = [];
  for (const [step, prompt, first, count, images] of of.groups) {
    if (state.step !== "" && step !== state.step) continue;
    if (state.prompt !== null && prompt !== state.prompt) continue;
    const inPrompt = text === "" || of.lowerPrompts[prompt].includes(text);
    const rows = range(first, count).filter((row) => {
      if (!inPrompt && !of.lower[row].includes(text)) return false;
      if (onlyCut && !of.rows.cut?.[row]) return false;
      const value = total(row);
      return !isBounded || (value !== null && value >= low && value <= high);
    });
    if (rows.length) found.push({ step, prompt, count, rows, images });
  }
  const key = ORDERS[byId("order").value];
  if (!key) return found;
  for (const group of found) group.key = key(group.rows);
  return found.sort((a, b) => a.key - b.key);
}

// Text with characters that do not show, or that turn the direction, as their numbers; what was searched for is marked.
function textNodes(text) {
  const nodes = [];
  const needle = byId("text").value.toLowerCase();
  const odd = (part) => {
    let from = 0;
    for (const match of part.matchAll(CONTROLS)) {
      nodes.push(part.slice(from, match.index));
      const code = match[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
      nodes.push(element("span", { class: "odd" }, `U+${code}`));
      from = match.index + 1;
    }
    nodes.push(part.slice(from));
  };
  if (needle === "") odd(text);
  else {
    const lower = text.toLowerCase();
    let from = 0;
    // Lower case is sometimes of another length; then nothing is marked.
    for (let at = lower.length === text.length ? lower.indexOf(needle) : -1; at >= 0; at = lower.indexOf(needle, from)) {
      odd(text.slice(from, at));
      nodes.push(element("mark", {}, text.slice(at, at + needle.length)));
      from = at + needle.length;
    }
    odd(text.slice(from));
  }
  return nodes;
}

function textBlock(text, extra = "") {
  const block = element("div", { class: `text ${extra} ${text === "" ? "empty" : ""}`, dir: "auto" }, ...textNodes(text));
  if (text.length < 900 && text.split("\n").length < 14) return [block];
  block.classList.add("long");
  const button = element("button", { type: "button", class: "whole", "aria-expanded": "false" }, "Show all");
  button.addEventListener("click", () => {
    const isLong = block.classList.toggle("long");
    button.textContent = isLong ? "Show all" : "Show less";
    button.setAttribute("aria-expanded", String(!isLong));
  });
  return [block, button];
}

// A text, or the messages of a dialogue with the calls of tools.
function dialogue(content) {
  if (typeof content === "string") return textBlock(content);
  return content.flatMap((message) => {
    const isAlone = content.length === 1 && !message.calls;
    const shown = [];
    if (message.text !== "" || !message.calls) shown.push(...textBlock(message.text));
    for (const call of message.calls ?? []) shown.push(...textBlock(`→ ${call}`, "call"));
    if (isAlone) return shown;
    const role = message.name ? `${message.role} ${message.name}` : message.role;
    const kind = message.role === "tool" ? "message tool" : "message";
    return [element("div", { class: kind }, element("div", { class: "role" }, role), ...shown)];
  });
}

function completionCard(row, place) {
  const { rows, rewards } = current();
  const facts = [element("span", { class: "reward" }, `reward ${number(total(row))}`)];
  if (rewards.length > 1) {
    rewards.forEach((name, i) => facts.push(element("span", {}, `${name} ${number(rows.rewards[i][row])}`)));
  }
  if (rows.advantage) facts.push(element("span", {}, `advantage ${number(rows.advantage[row])}`));
  const tokens = rows.tokens?.[row];
  const length = current().plain[row].length;
  const isWhole = tokens === null || tokens === undefined;
  facts.push(element("span", {}, isWhole ? `${number(length)} characters` : `${number(tokens)} tokens`));
  if (rows.cut?.[row]) facts.push(element("span", { class: "badge" }, "cut"));
  for (const [name, value] of Object.entries(rows.others?.[row] ?? {})) {
    facts.push(element("span", {}, ...textNodes(`${name}: ${value.length > 120 ? `${value.slice(0, 120)}…` : value}`)));
  }
  return element(
    "article",
    { class: `completion ${place}` },
    element("div", { class: "heading" }, ...facts),
    ...dialogue(rows.text[row]),
  );
}

function groupCard({ step, prompt, count, rows, images }) {
  const of = current();
  const values = rows.map(total).filter((value) => value !== null);
  const best = Math.max(...values);
  const worst = Math.min(...values);
  const heading = element("div", { class: "heading" }, element("span", {}, `step ${number(step)}`));
  const part = rows.length < count ? `${rows.length} of ${count} completions` : `${count} completions`;
  heading.append(element("span", {}, count === 1 ? "1 completion" : part));
  if (values.length > 1) {
    const mean = values.reduce((a, b) => a + b) / values.length;
    heading.append(element("span", {}, `mean reward ${number(mean)}`));
    if (best === worst) heading.append(element("span", {}, "all equal"));
  }
  const visits = of.visits.get(prompt).size;
  if (visits > 1 && state.prompt === null) {
    const follow = () => {
      state.prompt = prompt;
      state.step = "";
      byId("step").value = "";
      byId("order").value = "drawn";
      update();
    };
    heading.append(element("button", { type: "button", onclick: follow }, `this prompt in ${visits} steps`));
  }
  const thumbnails = element("div", { class: "thumbnails" });
  images.forEach((url, i) => thumbnails.append(element("img", { src: url, alt: `image ${i + 1} of the prompt` })));
  const question = element("div", { class: "prompt" }, heading, ...dialogue(of.prompts[prompt]));
  if (images.length) question.append(thumbnails);
  const place = (row) => (best === worst ? "" : total(row) === best ? "best" : total(row) === worst ? "worst" : "");
  const byOrder = { best: (a, b) => total(b) - total(a), worst: (a, b) => total(a) - total(b) }[byId("order").value];
  const ordered = byOrder ? [...rows].sort(byOrder) : rows;
  const isAnswer = (content) => typeof content === "string" || (content.length === 1 && !content[0].calls);
  const isShort = rows.every((row) => isAnswer(of.rows.text[row]) && of.plain[row].length < 40);
  const cards = ordered.map((row) => completionCard(row, place(row)));
  const list = element("div", { class: isShort ? "answers short" : "answers" }, ...cards);
  return element("section", { class: "group" }, question, list);
}

let found = [];
function update() {
  state.shown = GROUPS_AT_ONCE;
  found = matches();
  const rows = found.reduce((sum, group) => sum + group.rows.length, 0);
  const where = state.step === "" ? "all steps" : `step ${number(state.step)}`;
  const status = byId("status");
  const words = `${number(rows)} completion${rows === 1 ? "" : "s"} of ${number(found.length)} prompt${found.length === 1 ? "" : "s"}, ${where}`;
  status.replaceChildren(state.prompt === null ? words : `${words}, one prompt over time `);
  if (state.prompt !== null) {
    const back = () => {
      state.prompt = null;
      update();
    };
    status.append(element("button", { type: "button", onclick: back }, "all prompts"));
  }
  const { steps } = current();
  byId("earlier").disabled = state.step === "" || steps.indexOf(state.step) === 0;
  byId("later").disabled = state.step === "" || steps.indexOf(state.step) === steps.length - 1;
  byId("groups").replaceChildren();
  showMore();
}

function showMore() {
  const groups = byId("groups");
  for (const group of found.slice(groups.childElementCount, state.shown)) groups.append(groupCard(group));
  byId("more").hidden = found.length <= state.shown;
}

function setStep(step) {
  state.step = step;
  byId("step").value = step;
  update();
}

// A click on a curve shows the completions of the nearest step that has any.
function showStepNear(step) {
  if (!filters || !Number.isFinite(step)) return;
  const { steps } = current();
  state.prompt = null;
  setStep(steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a)));
}

if (filters) {
  const { steps, rows } = indexed(current());
  byId("step").append(
    element("option", { value: "" }, "all"),
    ...steps.map((step) => element("option", { value: step }, number(step))),
  );
  byId("of-cut").hidden = !rows.cut;
  byId("step").addEventListener("change", () => setStep(byId("step").value === "" ? "" : Number(byId("step").value)));
  byId("earlier").addEventListener("click", () => setStep(steps[steps.indexOf(state.step) - 1]));
  byId("later").addEventListener("click", () => setStep(steps[steps.indexOf(state.step) + 1]));
  let waiting = 0;
  for (const id of ["order", "low", "high", "text", "cut"]) {
    byId(id).addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(update, 120);
    });
  }
  filters.addEventListener("submit", (event) => event.preventDefault());
  byId("clear").addEventListener("click", () => {
    state.prompt = null;
    filters.reset();
    setStep(steps.at(-1));
  });
  byId("more").addEventListener("click", () => {
    state.shown += GROUPS_AT_ONCE;
    showMore();
  });
  setStep(steps.at(-1));
}
