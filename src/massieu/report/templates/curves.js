// The page of a training run: a drawing for each quantity, and one map of layers and steps.

const report = JSON.parse(document.getElementById("report-data").textContent);
const DASHES = { "": "solid", mean: "solid", max: "dot", min: "dash" };
const PART_WORDS = { "": "", mean: "mean", max: "largest", min: "least" };
const tint = (entry) => entry[isDark() ? "dark" : "light"];

function colourOf(run) {
  if (report.runs[run].reference) return tone("muted");
  return tint(report.palette[run % report.palette.length]);
}

function showRuns() {
  const shown = report.runs.map(({ name, reference }, place) => {
    const line = make("i", { "aria-hidden": "true" });
    line.style.borderColor = colourOf(place);
    return make("span", {}, line, reference ? `${name} (reference)` : name);
  });
  byId("runs").replaceChildren(...shown);
  byId("runs").hidden = report.runs.length < 2;
}

const nameOf = (line) => plotText([report.runs[line.run].name, PART_WORDS[line.part]].filter(Boolean).join(", "));

// Numbers that are none have no place on the axis: a cross at its foot stands for them, beside the gap in the line.
function panelTraces(panel) {
  const behindFirst = [...panel.lines].sort((one, other) => other.run - one.run); // what is drawn last lies above
  const lines = behindFirst.map((line) => ({
    x: line.steps,
    y: line.values,
    mode: line.steps.length > 1 ? "lines" : "markers",
    connectgaps: false,
    line: { color: colourOf(line.run), width: DASHES[line.part] === "solid" ? 2 : 1.4, dash: DASHES[line.part] },
    marker: { color: colourOf(line.run), size: 7 },
    text: (line.where || []).map((place) => (place ? `, ${place}` : "")),
    hovertemplate: `${nameOf(line)}: %{y:.4~g}%{text}<extra></extra>`,
  }));
  const lost = panel.lost.map((entry) => ({
    x: entry.steps,
    y: entry.steps.map(() => 0.04),
    yaxis: "y2",
    mode: "markers",
    marker: { symbol: "x", size: 8, color: tone("mark") },
    text: entry.values,
    hovertemplate: `${nameOf(entry)}: %{text}<extra></extra>`,
  }));
  const alarms = panel.alarms.map(({ part, steps, values }) => ({
    x: steps,
    y: values,
    mode: "markers",
    marker: { symbol: "triangle-up", size: 8, color: tone("mark"), line: { width: 1, color: tone("surface") } },
    hovertemplate: `in alarm${part ? `, ${PART_WORDS[part]}` : ""}: %{y:.4~g}<extra></extra>`,
  }));
  return [...lines, ...lost, ...alarms];
}

function panelLayout(panel) {
  const overlay = { overlaying: "y", range: [0, 1], visible: false };
  return {
    height: 260,
    margin: { l: 58, r: 14, t: 8, b: 40 },
    hovermode: "x unified",
    xaxis: { title: { text: "step", standoff: 4 }, rangemode: "normal", nticks: isNarrow() ? 4 : 6 },
    yaxis: { title: { text: axisText(panel.unit) }, type: panel.logarithmic ? "log" : "linear", exponentformat: "power" },
    ...(panel.lost.length ? { yaxis2: overlay } : {}),
  };
}

function panelFrame(panel) {
  const chart = make("div", { className: "chart", role: "img", "aria-label": panel.title });
  const note = [panel.note, panel.logarithmic && "Logarithmic axis."].filter(Boolean).join(" ");
  const frame = make("div", { className: "plot" }, make("h4", {}, panel.title), make("p", { className: "note" }, note), chart);
  byId(panel.first ? "first" : "curves").append(frame);
  return chart;
}

const charts = report.panels.map(panelFrame);

function drawPanels() {
  report.panels.forEach((panel, place) => draw(charts[place], panelTraces(panel), panelLayout(panel)));
}

const mapsOf = (run) => report.maps.filter((map) => map.run === run);
const chosenMap = () => mapsOf(Number(byId("run").value)).find(({ quantity }) => quantity === byId("quantity").value);

function fillQuantities() {
  const before = byId("quantity").value;
  const maps = mapsOf(Number(byId("run").value));
  byId("quantity").replaceChildren(...maps.map(({ quantity, title }) => make("option", { value: quantity }, title)));
  const wished = [before, "selective_log_partition_max", "largest_logit_max"].find((name) =>
    maps.some(({ quantity }) => quantity === name),
  );
  if (wished) byId("quantity").value = wished;
}

function fillRuns() {
  const having = report.runs.map((run, place) => place).filter((place) => mapsOf(place).length);
  byId("run").replaceChildren(...having.map((place) => make("option", { value: place }, report.runs[place].name)));
  byId("run").hidden = byId("run-label").hidden = having.length < 2;
  byId("map-section").hidden = !having.length;
  if (having.length) fillQuantities();
}

// Ticks of a colour bar over logarithms.
function powersOf(map) {
  const known = map.values.flat().filter((value) => value !== null);
  const low = Math.ceil(Math.log10(known.reduce((least, value) => Math.min(least, value))));
  const high = Math.floor(Math.log10(known.reduce((most, value) => Math.max(most, value))));
  const every = Math.ceil((high - low + 1) / 6);
  const powers = Array.from({ length: high - low + 1 }, (_, place) => low + place).filter((_, place) => place % every === 0);
  return { tickvals: powers, ticktext: powers.map((power) => `10<sup>${power}</sup>`) };
}

function drawMap() {
  const map = chosenMap();
  if (!map) return;
  const scale = map.logarithmic ? " Logarithmic colours." : "";
  const interval = map.interval ? " A column is an interval of steps: it shows the mean of means, and the extreme of extremes." : "";
  byId("map-note").textContent = `${map.title}${map.unit ? `, ${map.unit}` : ""}. ✕: NaN or infinite.${scale}${interval}`;
  const labels = map.rows.map((row) => plotText(row));
  const cells = {
    type: "heatmap",
    x: map.steps,
    y: map.rows.map((row, place) => place),
    z: map.logarithmic ? map.values.map((row) => row.map((value) => (value === null ? null : Math.log10(value)))) : map.values,
    customdata: map.values.map((row, place) => row.map((value) => [labels[place], value])),
    colorscale: scaleOf(report.scales.sequential),
    colorbar: { thickness: isNarrow() ? 8 : 12, ...(map.logarithmic ? powersOf(map) : {}) },
    hovertemplate: "step %{x}, %{customdata[0]}: %{customdata[1]:.4~g}<extra></extra>",
    hoverongaps: false,
  };
  const lost = {
    x: map.lost.map(([, column]) => map.steps[column]),
    y: map.lost.map(([row]) => row),
    text: map.lost.map(([row, , what]) => `${labels[row]}: ${what}`),
    mode: "markers",
    marker: { symbol: "x", size: 7, color: tone("mark") },
    hovertemplate: "step %{x}, %{text}<extra></extra>",
  };
  const every = Math.ceil(map.rows.length / 30);
  const shown = map.rows.map((row, place) => place).filter((place) => place % every === 0);
  const longest = Math.min(22, Math.max(...map.rows.map((row) => row.length)));
  draw(byId("map"), [cells, lost], {
    height: Math.min(760, 90 + 22 * Math.max(4, map.rows.length)),
    margin: { l: 18 + 6.6 * longest, r: 10, t: 10, b: 44 },
    xaxis: { title: { text: "step" }, showgrid: false, zeroline: false, nticks: isNarrow() ? 4 : 10 },
    yaxis: {
      range: [map.rows.length - 0.5, -0.5],
      tickvals: shown,
      ticktext: shown.map((place) => (map.rows[place].length > 22 ? `…${labels[place].slice(-21)}` : labels[place])),
      showgrid: false,
      zeroline: false,
    },
  });
}

function drawEverything() {
  showRuns();
  drawPanels();
  drawMap();
}

async function start() {
  listenToTheme(drawEverything);
  await loadPlotly();
  fillRuns();
  drawEverything();
  byId("quantity").addEventListener("change", drawMap);
  byId("run").addEventListener("change", () => {
    fillQuantities();
    drawMap();
  });
  onResize(drawEverything);
  document.documentElement.dataset.ready = "yes";
}

begin(start, "Alarms can be read without them.");
