// Expansion and contraction through the depth: one drawing per quantity, level above, change per sublayer below.

const QUANTITIES = [
  {
    base: "pairwise_distance",
    change: "pairwise_distance_log_ratio",
    title: "Mean pairwise distance",
    grows: "tokens move apart",
    shrinks: "tokens move together",
  },
  {
    base: "log_determinant",
    change: "log_determinant_change",
    title: "Log-determinant of the token covariance, per direction",
    grows: "volume grows",
    shrinks: "volume shrinks",
  },
  {
    base: "effective_rank",
    change: "effective_rank_change",
    title: "Effective rank of the token covariance",
    grows: "directions are gained",
    shrinks: "directions are lost",
  },
];
const KIND_WORDS = { feed_forward: "feed-forward", attention_and_feed_forward: "attention and feed-forward" };
const kindOf = (sublayer) => (sublayer.kind in report.kinds ? sublayer.kind : "other");
const kindWords = (kind) => KIND_WORDS[kind] || words(kind);

function drawSublayers() {
  const { sublayers, columns } = report.layers;
  const present = QUANTITIES.filter(({ base, change }) => columns[change] || columns[`${base}/after`]);
  byId("sublayers-empty").hidden = present.length > 0;
  byId("sublayers-body").hidden = !present.length;
  if (!present.length) return;
  const used = Object.keys(report.kinds).filter((kind) => sublayers.some((sublayer) => kindOf(sublayer) === kind));
  byId("kinds").replaceChildren(
    ...used.map((kind) => {
      const sign = make("span", { "aria-hidden": "true" }, `${report.kinds[kind].sign} `);
      sign.style.color = kindColour(kind);
      return make("span", {}, sign, kindWords(kind));
    }),
    make("span", { className: "note" }, "Grey ×: the same in a re-initialised copy of the model. Bars: one standard error."),
  );
  const container = byId("sublayers");
  if (!container.childElementCount) container.append(...present.map(depthFrame));
  present.forEach((quantity, place) => {
    draw(container.children[place].querySelector(".drawing"), depthTraces(quantity, used), depthLayout(quantity));
  });
}

const kindColour = (kind) => report.kinds[kind][isDark() ? "dark" : "light"];

function depthFrame(quantity) {
  const formulas = [quantity.base, quantity.change].map(layerStatistic).filter((item) => item?.formula);
  const formula = formulas.map((item) => `${item.title}: ${item.formula}${item.unit ? ` (${item.unit})` : ""}`).join(". ");
  return make(
    "div", { className: "depth" },
    make("h3", {}, quantity.title),
    make("p", {}, depthSummary(quantity)),
    make("div", { className: "drawing", role: "img", "aria-label": quantity.title }),
    depthTable(quantity),
    ...(formula ? [make("details", {}, make("summary", {}, "The formula"), make("p", { className: "note" }, formula))] : []),
  );
}

const layerStatistic = (name) => report.layers.statistics.find((item) => item.name === name);

const layerNumbers = (name, place) => {
  const found = report.layers.columns[name];
  return { value: found?.value[place] ?? NaN, error: found?.error[place] ?? NaN, count: found?.count[place] ?? 0 };
};

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// "Attention: tokens move apart in 6 of 6, mean change 0.2, re-initialised 0.07."
function depthSummary({ change, grows, shrinks }) {
  const byKind = new Map();
  report.layers.sublayers.forEach((sublayer, place) => {
    const moved = layerNumbers(change, place);
    if (!Number.isFinite(moved.value)) return;
    const kind = kindOf(sublayer);
    byKind.set(kind, [...(byKind.get(kind) || []), { ...moved, control: layerNumbers(`${change}/reinitialised`, place).value }]);
  });
  const sentences = [...byKind].map(([kind, moves]) => {
    const up = moves.filter(({ value, error }) => value > 2 * (error || 0)).length;
    const down = moves.filter(({ value, error }) => value < -2 * (error || 0)).length;
    const unclear = moves.length - up - down;
    const said = [up && `${grows} in ${up}`, down && `${shrinks} in ${down}`, unclear && `no clear change in ${unclear}`].filter(Boolean);
    const controls = moves.map(({ control }) => control).filter(Number.isFinite);
    const change = `mean change ${write(mean(moves.map(({ value }) => value)))}`;
    const against = controls.length ? `re-initialised ${write(mean(controls))}` : "no control";
    return `${capital(kindWords(kind))}: ${said.join(", ")} of ${moves.length} (${change}, ${against}).`;
  });
  if (!sentences.length) return "The change per sublayer was not measured.";
  return `${sentences.join(" ")} A change counts when it is more than two standard errors from zero.`;
}

function depthHover(sublayer, place, { base, change }) {
  const lines = [`<b>${plotText(sublayer.name)}</b>`];
  const before = layerNumbers(`${base}/before`, place);
  const after = layerNumbers(`${base}/after`, place);
  const moved = layerNumbers(change, place);
  const control = layerNumbers(`${change}/reinitialised`, place);
  if (Number.isFinite(after.value)) lines.push(`${writeWithError(before.value, before.error)} → ${writeWithError(after.value, after.error)}`);
  if (Number.isFinite(moved.value)) lines.push(`change: ${writeWithError(moved.value, moved.error)}, n = ${writeCount(moved.count)}`);
  if (Number.isFinite(control.value)) lines.push(`re-initialised: ${writeWithError(control.value, control.error)}`);
  return lines.join("<br>");
}

function depthTraces(quantity, used) {
  const { sublayers } = report.layers;
  const finite = (value) => (Number.isFinite(value) ? value : null);
  const text = sublayers.map((sublayer, place) => depthHover(sublayer, place, quantity));
  const levels = (name, places) => places.map((place) => finite(layerNumbers(name, place).value));
  const errors = (name, places) => places.map((place) => finite(layerNumbers(name, place).error));
  const bars = (name, places) => ({ type: "data", array: errors(name, places), thickness: 1, width: 2 });
  const traces = [];
  const dense = sublayers.length > 60;
  for (const kind of used) {
    const places = sublayers.map((_, place) => place).filter((place) => kindOf(sublayers[place]) === kind);
    const color = kindColour(kind);
    const marker = { symbol: report.kinds[kind].symbol, size: dense ? 6 : 9, color };
    // One segment per sublayer, from before to after: a norm beside the residual stream shows as a side branch.
    const segment = (pick) => places.flatMap((place) => [...pick(place), null]);
    traces.push({
      type: "scatter", mode: "lines", hoverinfo: "skip", line: { color, width: 1.5, dash: kind === "norm" ? "dot" : "solid" },
      x: segment((place) => [place - 0.5, place + 0.5]),
      y: segment((place) => [...levels(`${quantity.base}/before`, [place]), ...levels(`${quantity.base}/after`, [place])]),
    });
    const points = (name, extra) => ({
      type: "scatter", mode: "markers", y: levels(name, places), error_y: { ...bars(name, places), color },
      text: places.map((place) => text[place]), hoverinfo: "text", marker, ...extra,
    });
    traces.push(points(`${quantity.base}/after`, { x: places.map((place) => place + 0.5) }));
    traces.push(points(quantity.change, { x: places, yaxis: "y2" }));
  }
  const control = `${quantity.change}/reinitialised`;
  const all = sublayers.map((_, place) => place);
  traces.push({
    type: "scatter", mode: "markers", x: all.map((place) => place + 0.25), y: levels(control, all), yaxis: "y2", text, hoverinfo: "text",
    error_y: { ...bars(control, all), color: tone("muted") },
    marker: { symbol: "x-thin", size: dense ? 5 : 8, line: { width: 1.6, color: tone("muted") } },
  });
  return traces;
}

function depthLayout(quantity) {
  const { sublayers } = report.layers;
  const isStart = (place) => place === 0 || sublayers[place].layer !== sublayers[place - 1].layer;
  const starts = sublayers.map((_, place) => place).filter(isStart);
  const endOf = (start) => starts[starts.indexOf(start) + 1] ?? sublayers.length;
  const narrow = isNarrow();
  const step = Math.ceil(starts.length / (narrow ? 8 : 32));
  const shown = starts.filter((_, place) => place % step === 0);
  const bands = starts.filter((_, place) => place % 2 === 1).map((start) => ({
    type: "rect", xref: "x", yref: "paper", x0: start - 0.5, x1: endOf(start) - 0.5, y0: 0, y1: 1,
    fillcolor: tone("soft"), line: { width: 0 }, layer: "below",
  }));
  return {
    height: 400, margin: { l: narrow ? 46 : 64, r: 12, t: 8, b: 42 }, hovermode: "closest", shapes: bands,
    xaxis: {
      title: { text: "layer" }, range: [-1, sublayers.length], showgrid: false, zeroline: false, anchor: "y2",
      tickvals: shown, ticktext: shown.map((start) => String(sublayers[start].layer)),
    },
    yaxis: { domain: [0.5, 1], title: { text: "level" }, zeroline: false },
    yaxis2: { domain: [0, 0.42], title: { text: "change" }, zeroline: true },
  };
}

function depthTable({ base, change }) {
  const heading = ["Sublayer", "Before", "After", "Change", "Re-initialised", "n"];
  const rows = report.layers.sublayers.map((sublayer, place) => {
    const numbers = [`${base}/before`, `${base}/after`, change, `${change}/reinitialised`].map((name) => layerNumbers(name, place));
    const written = numbers.map(({ value, error }) => (Number.isFinite(value) ? writeWithError(value, error) : "–"));
    const cells = [...written, writeCount(numbers[2].count)].map((text, at) => make("td", { "data-label": heading[at + 1] }, text));
    return make("tr", {}, make("th", { scope: "row" }, sublayer.name), ...cells);
  });
  const head = make("thead", {}, make("tr", {}, ...heading.map((title) => make("th", { scope: "col" }, title))));
  const table = make("table", { className: "numbers" }, head, make("tbody", {}, ...rows));
  return make("details", {}, make("summary", {}, "The numbers as a table"), scrolling("The numbers of every sublayer", table));
}
