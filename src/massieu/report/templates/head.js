// The panel of one head: example text, distributions, binned means, and every statistic.

const BIN = /^([^/]+)\/([a-z_]+)_(\d+)_(\d+)$/;
const BIN_AXES = { visible_keys: "number of visible keys", position: "position in the window" };

function chosenSite() {
  return sites.get(state.site);
}

function openHead(siteIndex, head, scroll) {
  const site = sites.get(siteIndex);
  state.site = siteIndex;
  state.head = Math.min(head, site.heads - 1);
  pinned = null;
  byId("site").value = siteIndex;
  const heads = Array.from({ length: site.heads }, (_, place) => make("option", { value: place }, String(place)));
  byId("head").replaceChildren(...heads);
  byId("head").value = state.head;
  byId("head-title").textContent = `Layer ${site.label}, head ${state.head}`;
  byId("head-site").textContent = `${site.name}${site.kind ? `, ${site.kind} attention` : ""}, ${plural(site.heads, "head")}`;
  showHead();
  drawMap();
  if (scroll) {
    byId("head-title").focus({ preventScroll: true });
    byId("head-section").scrollIntoView();
  }
}

function showHead() {
  showExample();
  drawHeadPlots();
  fillHeadTable();
}

function binnedSeries() {
  const series = new Map();
  const cell = chosenSite().first + state.head;
  for (const name of Object.keys(report.columns)) {
    const match = name.match(BIN);
    if (!match) continue;
    const [, base, axis, low, high] = match;
    const bins = series.get(`${base}/${axis}`) || [];
    const { value, error, count } = column(name);
    bins.push({ base, axis, low: Number(low), high: Number(high), value: value(cell), error: error(cell), count: count(cell) });
    series.set(`${base}/${axis}`, bins);
  }
  // One number is no series: it says no more than the mean over all tokens.
  const known = [...series.values()].filter((bins) => bins.filter(({ value }) => Number.isFinite(value)).length > 1);
  return known.map((bins) => bins.sort((a, b) => a.low - b.low));
}

function drawHeadPlots() {
  const container = byId("plots");
  container.replaceChildren();
  for (const [name, { edges, sites: perSite }] of Object.entries(report.histograms)) {
    const histogram = perSite[state.site];
    const bins = edges.length - 1;
    const filled = histogram ? slice(histogram.shares, state.head * bins, bins).filter((share) => share > 0).length : 0;
    if (filled > 1) container.append(histogramPlot(name, edges, histogram));
  }
  for (const bins of binnedSeries()) container.append(binnedPlot(bins));
  const empty = byId("plots-empty");
  empty.hidden = container.childElementCount > 0;
  empty.textContent = "No distribution and no binned mean was kept for this head.";
  // Plotly measures its element, which must be in the page by now.
  for (const frame of container.children) draw(frame.lastElementChild, frame.traces, frame.layout);
}

function plotFrame(title, traces, layout, note = "") {
  const head = [make("h4", {}, title), ...(note ? [make("p", { className: "note" }, note)] : [])];
  const frame = make("div", { className: "plot" }, ...head, make("div", { role: "img", "aria-label": title }));
  frame.traces = traces;
  frame.layout = { height: 220, margin: { l: 48, r: 10, t: 10, b: 44 }, ...layout };
  return frame;
}

function titleOf(name) {
  return statistics.get(name)?.title || capital(words(name));
}

function histogramPlot(name, edges, { shares, totals }) {
  const bins = edges.length - 1;
  const values = slice(shares, state.head * bins, bins);
  const middles = values.map((_, place) => (edges[place] + edges[place + 1]) / 2);
  // The bins at both ends are open: they hold all that lies beyond them too.
  const range = (place) => {
    if (place === bins - 1) return `${write(edges[place])} or more`;
    return place === 0 ? `${write(edges[1])} or less` : `${write(edges[place])} to ${write(edges[place + 1])}`;
  };
  const bars = {
    type: "bar", x: middles, y: values.map((share) => 100 * share), width: values.map((_, place) => edges[place + 1] - edges[place]),
    text: values.map((share, place) => `${range(place)}: ${(100 * share).toFixed(1)} % of tokens`), hoverinfo: "text",
    textposition: "none", marker: { color: tone("accent") },
  };
  const title = `${titleOf(name)}: distribution over ${writeCount(totals[state.head])} tokens`;
  const last = values[bins - 1];
  const note = last >= 0.01 ? `The last bar: ${range(bins - 1)}, ${writeShare(last)} of tokens.` : "";
  return plotFrame(title, [bars], {
    bargap: 0.08,
    xaxis: { title: { text: axisText(statistics.get(name)?.unit) }, showgrid: false },
    yaxis: { title: { text: "% of tokens" }, rangemode: "tozero" },
  }, note);
}

function binnedPlot(bins) {
  const [{ base, axis }] = bins;
  const places = bins.map((_, place) => place);
  const finite = (value) => (Number.isFinite(value) ? value : null);
  const line = {
    type: "scatter", mode: "lines+markers", x: places, y: bins.map(({ value }) => finite(value)),
    error_y: { type: "data", array: bins.map(({ error }) => finite(error)), thickness: 1, width: 3 },
    text: bins.map(({ low, high, value, error, count }) => `${low} to ${high}: ${writeWithError(value, error)}, n = ${writeCount(count)}`),
    hoverinfo: "text", line: { color: tone("accent") }, marker: { size: 6 },
  };
  const named = places.filter((place) => place % Math.ceil(places.length / 7) === 0);
  const where = BIN_AXES[axis] || words(axis);
  return plotFrame(`${titleOf(base)} by ${where}`, [line], {
    xaxis: {
      title: { text: plotText(`${where} (from)`) }, tickvals: named, ticktext: named.map((place) => String(bins[place].low)), tickangle: 0,
      showgrid: false, zeroline: false,
    },
    yaxis: { title: { text: axisText(statistics.get(base)?.unit) } },
  });
}

function controlTexts(name, cell) {
  return CONTROLS.filter((control) => column(`${name}/${control}`)).map((control) => {
    const { value, error } = column(`${name}/${control}`);
    return make("div", {}, `${writeWithError(value(cell), error(cell))} `, make("span", { className: "note" }, CONTROL_WORDS[control]));
  });
}

function verdictText(name, cell) {
  const { text, inside, q } = verdict(name, cell);
  if (inside === null) return text;
  const { difference } = cellNumbers(name, "difference", cell);
  const side = difference.value > 0 ? "▲ above" : "▼ below";
  return inside ? `○ not significant (${q})` : `${side} (${q})`;
}

function statisticRow(item, cell) {
  const { value, error, count } = column(item.name);
  const site = chosenSite();
  const name = make("th", { scope: "row" }, item.title);
  if (item.gauge_dependent) name.append(" ", make("span", { className: "badge" }, "depends on the key origin"));
  const known = Number.isFinite(value(cell));
  const unit = item.unit ? ` ${item.unit}` : "";
  const reason = site.unavailable[item.name] || site.unavailable[item.group];
  const shown = known ? `${writeWithError(value(cell), error(cell))}${unit}` : reason ? `no value: ${reason}` : "no value";
  const halves = ["first_half", "second_half"].map((half) => column(`${item.name}/${half}`)?.value(cell));
  const both = `halves: ${halves.map((half) => write(half, error(cell))).join(" and ")}`;
  const stability = known && halves.every(Number.isFinite) ? [make("div", { className: "note" }, both)] : [];
  const spread = column(`${item.name}/spread`)?.value(cell);
  const part = (label, ...children) => make("td", { "data-label": label, className: children.length ? "" : "void" }, ...children);
  const controls = controlTexts(item.name, cell);
  return make(
    "tr", {}, name, make("td", {}, shown, ...stability), part("Spread", ...(Number.isFinite(spread) ? [write(spread)] : [])),
    part("Controls", ...controls),
    part("Verdict", ...(known && controls.length ? [verdictText(item.name, cell)] : [])),
    part("n", ...(known ? [writeCount(count(cell))] : [])),
  );
}

function outsideNull(items, cell) {
  const tested = items.map(({ name }) => verdict(name, cell).inside).filter((inside) => inside !== null);
  return { tested: tested.length, outside: tested.filter((inside) => !inside).length };
}

// A table in a box of its own, which scrolls where the page is narrower than the table.
function scrolling(label, table) {
  return make("div", { className: "scroll", role: "region", "aria-label": label, tabIndex: 0 }, table);
}

const HEADINGS = ["Statistic", "Value ± standard error", "Spread over tokens", "Controls", "Against its control", "n"];
const openGroups = new Set(); // groups that the reader opened stay open for the next head

function groupTable(group, items, cell) {
  const { tested, outside } = outsideNull(items, cell);
  const told = tested ? `${outside} of ${tested} tested differ from their control` : "not tested";
  const heading = make("thead", {}, make("tr", {}, ...HEADINGS.map((title) => make("th", { scope: "col" }, title))));
  const body = make("tbody", {}, ...items.map((item) => statisticRow(item, cell)));
  const summary = make("summary", {}, `${group} `, make("span", { className: "note" }, `${plural(items.length, "statistic")}; ${told}`));
  const details = make("details", { open: openGroups.has(group) }, summary, scrolling(`${group}: every statistic`, make("table", { className: "numbers" }, heading, body)));
  details.addEventListener("toggle", () => (details.open ? openGroups.add(group) : openGroups.delete(group)));
  return details;
}

function fillHeadTable() {
  const cell = chosenSite().first + state.head;
  const groups = [...groupedStatistics()];
  if (!openGroups.size) openGroups.add(groups[0][0]);
  byId("head-table").replaceChildren(...groups.map(([group, items]) => groupTable(group, items, cell)));
  const { tested, outside } = outsideNull(report.statistics, cell);
  byId("table-note").textContent = tested
    ? `Of ${plural(tested, "tested statistic")} of this head, ${outside} ${outside === 1 ? "differs" : "differ"} from the control (q < 0.05). ` +
      "The tests are adjusted over heads, not over statistics: look at one statistic at a time."
    : "No statistic of this head was tested against a control.";
}

// The statistics by group, in order of appearance.
function groupedStatistics() {
  const groups = new Map();
  for (const item of report.statistics) groups.set(item.group_title, [...(groups.get(item.group_title) || []), item]);
  return groups;
}
