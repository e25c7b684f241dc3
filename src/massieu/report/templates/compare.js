// The page of a comparison: a map of each of two models, one of their difference, and lines over many models.

const report = JSON.parse(document.getElementById("report-data").textContent);
const CELL = 19;
const HEIGHT_AROUND = 58;

const chosen = () => report.statistics.find(({ name }) => name === byId("statistic").value);
const chosenModel = () => report.models[Number(byId("model").value)];
const mostHeads = Math.max(...report.sites.map(({ heads }) => heads));

// A list of heads as rows of the map; sites with fewer heads have gaps at the end.
function asRows(cells) {
  return report.sites.map(({ first, heads }) =>
    Array.from({ length: mostHeads }, (_, head) => (head < heads ? cells[first + head] : null)),
  );
}

const written = (value) => (value === null || value === undefined ? "undefined" : Number(value.toPrecision(3)).toString().replace("-", "−"));

function hoverOf(pair, first, cell, site, head) {
  const lines = [`layer ${plotText(site.label)}, head ${head}`];
  lines.push(`${written(first[cell])} → ${written(pair.second[cell])}`);
  const error = pair.standard_error[cell];
  lines.push(`difference ${written(pair.difference[cell])}${error ? ` ± ${written(error)}` : ""}`);
  lines.push(pair.q_value[cell] === null ? "no test" : `q = ${written(pair.q_value[cell])}`);
  return lines.join("<br>");
}

function heatmap(rows, hovers, range, colours) {
  return {
    type: "heatmap",
    x: Array.from({ length: mostHeads }, (_, head) => head),
    y: report.sites.map((_, place) => place),
    z: rows,
    text: hovers,
    zmin: range[0],
    zmax: range[1],
    colorscale: scaleOf(colours),
    colorbar: { thickness: 9, outlinewidth: 0, tickfont: { size: 11 }, exponentformat: "power" },
    hovertemplate: "%{text}<extra></extra>",
    hoverongaps: false,
    xgap: 1,
    ygap: 1,
  };
}

function layout() {
  const every = Math.ceil(report.sites.length / 30);
  const shown = report.sites.map((_, place) => place).filter((place) => place % every === 0);
  const longest = Math.max(...report.sites.map(({ label }) => label.length));
  const headsEvery = Math.ceil(mostHeads / 12);
  return {
    height: Math.min(720, HEIGHT_AROUND + CELL * Math.max(4, report.sites.length)),
    margin: { l: 34 + 6.5 * longest, r: 6, t: 6, b: 46 },
    xaxis: { title: { text: "head", standoff: 6 }, tick0: 0, dtick: headsEvery, showgrid: false, zeroline: false },
    yaxis: {
      title: { text: "layer", standoff: 6 },
      range: [report.sites.length - 0.5, -0.5],
      tickvals: shown,
      ticktext: shown.map((place) => plotText(report.sites[place].label)),
      showgrid: false,
      zeroline: false,
    },
  };
}

// The least and largest of finite numbers; of none or of one alone, a range around it.
function rangeOf(values) {
  const known = values.filter((value) => value !== null);
  const low = known.reduce((least, value) => Math.min(least, value), Infinity);
  const high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  if (!known.length) return [0, 1];
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

function drawMaps() {
  const { name, title, unit, question, gauge_dependent: gauge } = chosen();
  const model = chosenModel();
  const pair = report.pairs[model][name];
  const first = report.first[name];
  byId("first-title").textContent = report.models[0];
  byId("second-title").textContent = model;
  const note = `${title}${unit ? `, ${unit}` : ""}. ${question || ""} Both maps have one scale.`;
  if (!pair) {
    byId("map-note").textContent = `${note} It was not measured in ${model}.`;
    ["map-first", "map-second", "map-difference"].forEach((id) => Plotly.purge(byId(id)));
    return;
  }
  const named = first.map((_, cell) => pair.named[cell] === 1);
  const count = named.filter(Boolean).length;
  const untested = gauge ? " It depends on the key origin and has no test." : " It has no test.";
  const tested = pair.q_value.some((q) => q !== null);
  byId("map-note").textContent = `${note}${tested ? ` ○ marks the heads that differ by an effect that matters: ${count}.` : untested}`;
  const hovers = report.sites.map((site) =>
    Array.from({ length: mostHeads }, (_, head) =>
      head < site.heads ? hoverOf(pair, first, site.first + head, site, head) : "",
    ),
  );
  const both = rangeOf([...first, ...pair.second]);
  draw(byId("map-first"), [heatmap(asRows(first), hovers, both, report.scales.sequential)], layout());
  draw(byId("map-second"), [heatmap(asRows(pair.second), hovers, both, report.scales.sequential)], layout());
  const reach = Math.max(...pair.difference.map((value) => Math.abs(value || 0))) || 1;
  const diverging = report.scales.diverging[isDark() ? "dark" : "light"];
  const marks = report.sites.flatMap((site, row) =>
    Array.from({ length: site.heads }, (_, head) => [head, row, named[site.first + head]]).filter(([, , is]) => is),
  );
  const circles = {
    x: marks.map(([head]) => head),
    y: marks.map(([, row]) => row),
    mode: "markers",
    marker: { symbol: "circle-open", size: 7, color: tone("ink"), line: { width: 1.2 } },
    hoverinfo: "skip",
  };
  draw(byId("map-difference"), [heatmap(asRows(pair.difference), hovers, [-reach, reach], diverging), circles], layout());
}

// One line for each layer; the colour says how deep it is.
function drawCourse() {
  if (!report.course) return;
  const { name, title, unit } = chosen();
  const { steps, models, lines, logarithmic } = report.course;
  byId("course-name").textContent = `${title}, mean over the heads of a layer`;
  const ramp = report.scales.sequential.slice(isDark() ? 2 : 0, isDark() ? 9 : 8);
  const colour = (place) => ramp[Math.round((place / Math.max(1, report.sites.length - 1)) * (ramp.length - 1))];
  const traces = lines[name].map((values, place) => ({
    x: steps,
    y: values,
    mode: "lines+markers",
    line: { color: colour(place), width: 1.8 },
    marker: { size: 5 },
    text: models.map((model) => plotText(model)),
    hovertemplate: `layer ${plotText(report.sites[place].label)}, %{text}: %{y:.4~g}<extra></extra>`,
  }));
  const ends = lines[name].map((values, place) => [values[values.length - 1], place]).filter(([value]) => value !== null);
  draw(byId("course-drawing"), traces, {
    height: 380,
    margin: { l: 64, r: 44, t: 10, b: 48 },
    xaxis: { title: { text: "step", standoff: 8 }, type: logarithmic ? "log" : "linear", nticks: isNarrow() ? 4 : 8, exponentformat: "none" },
    yaxis: { title: { text: axisText(unit), standoff: 8 }, exponentformat: "power" },
    annotations: [ends[0], ends[ends.length - 1]].filter(Boolean).map(([value, place]) => ({
      x: 1,
      xref: "paper",
      xanchor: "left",
      y: value,
      text: ` L${plotText(report.sites[place].label)}`,
      showarrow: false,
      font: { size: 11, color: colour(place) },
    })),
  });
}

function drawEverything() {
  drawMaps();
  drawCourse();
}

function start() {
  byId("statistic").replaceChildren(...report.statistics.map(({ name, title }) => make("option", { value: name }, title)));
  if (report.lead) byId("statistic").value = report.lead;
  const options = report.drawn.map((place) => make("option", { value: place }, report.models[place]));
  byId("model").replaceChildren(...options);
  byId("model").value = report.drawn[report.drawn.length - 1];
  byId("model").hidden = byId("model-label").hidden = report.drawn.length < 2;
  listenToTheme(drawEverything);
  drawEverything();
  byId("statistic").addEventListener("change", drawEverything);
  byId("model").addEventListener("change", drawMaps);
  onResize(drawEverything);
  document.documentElement.dataset.ready = "yes";
}

try {
  start();
} catch (error) {
  byId("failure").textContent = `The drawings could not be made: ${error.message}.`;
  byId("failure").hidden = false;
  throw error;
}
