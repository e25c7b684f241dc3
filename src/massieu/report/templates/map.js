// One layer × head map of a statistic, or of its difference from the control.

const MANY_CELLS = 200;

// What a cell shows: the statistic itself, or statistic minus control with the errors added in quadrature.
function cellNumbers(name, mode, cell) {
  const base = column(name);
  const control = controlOf(name) ? column(`${name}/${controlOf(name)}`) : null;
  const value = base.value(cell);
  const error = base.error(cell);
  const against = control ? { value: control.value(cell), error: control.error(cell), count: control.count(cell) } : null;
  const difference = against ? { value: value - against.value, error: Math.hypot(error, against.error) } : null;
  const shown = mode === "difference" && difference ? difference.value : value;
  return { value, error, count: base.count(cell), against, difference, shown };
}

function hoverText(name, site, head) {
  const item = statistics.get(name);
  const cell = site.first + head;
  const { value, error, count, against, difference } = cellNumbers(name, "value", cell);
  const lines = [`<b>layer ${plotText(site.label)}, head ${head}</b>`, plotText(site.name)];
  if (!Number.isFinite(value)) {
    const reason = site.unavailable[name] || site.unavailable[item.group];
    lines.push(`no value${reason ? `: ${plotText(reason)}` : ""}`);
    return lines.join("<br>");
  }
  lines.push(`${writeWithError(value, error)} ${plotText(item.unit || "")}`);
  if (against) {
    lines.push(`control (${CONTROL_WORDS[controlOf(name)]}): ${writeWithError(against.value, against.error)}`);
    lines.push(`difference: ${writeWithError(difference.value, difference.error)}`);
  } else lines.push("no control");
  lines.push(`n = ${writeCount(count)}${against ? `, control ${writeCount(against.count)}` : ""}`);
  if (against) lines.push(verdict(name, cell).inside ? `${verdict(name, cell).text}: hatched` : verdict(name, cell).text);
  return lines.join("<br>");
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

// Colours of the map: diverging and centred for signed numbers, sequential otherwise.
function mapColours(name, mode, cells) {
  const shown = cells.map((cell) => cell.shown).filter(Number.isFinite).sort((a, b) => a - b);
  const cut = shown.length > MANY_CELLS ? Math.floor(shown.length / 100) : 0;
  const low = shown[cut] ?? 0;
  const high = shown[shown.length - 1 - cut] ?? 1;
  const notes = cut ? ["Colours end at the 1st and 99th percentile."] : [];
  if (mode === "value" && !statistics.get(name).signed) {
    return { scale: report.scales.sequential, low, high: high > low ? high : low + 1, notes };
  }
  const controls = cells.map((cell) => cell.against?.value).filter(Number.isFinite);
  const centre = mode === "value" && controls.length ? median(controls) : 0;
  const reach = Math.max(high - centre, centre - low) || 1;
  notes.unshift(
    mode === "difference"
      ? "Blue: below the control. Orange: above it."
      : `Blue: below ${write(centre)}. Orange: above it.${controls.length ? ` ${write(centre)} is the median of the control.` : ""}`,
  );
  return { scale: report.scales.diverging[isDark() ? "dark" : "light"], low: centre - reach, high: centre + reach, notes };
}

// Diagonal strokes in each hatched cell, as one broken line; where a number stands in the cell they keep to its corners.
function hatching(cells, numbered) {
  const x = [];
  const y = [];
  for (const { row, head } of cells) {
    for (const shift of numbered ? [-0.75, -0.52, 0.52, 0.75] : [-0.6, 0, 0.6]) {
      const reach = 0.5 - Math.abs(shift) / 2;
      x.push(head + shift / 2 - reach, head + shift / 2 + reach, null);
      y.push(row + shift / 2 + reach, row + shift / 2 - reach, null);
    }
  }
  const line = (color, width) => ({ type: "scatter", mode: "lines", x, y, hoverinfo: "skip", line: { color, width }, cliponaxis: true });
  return [line("rgba(0,0,0,0.55)", 2.6), line("rgba(255,255,255,0.9)", 1.1)];
}

function selectedOutline() {
  const row = report.sites.findIndex((site) => site.index === state.site);
  const outline = (color, width) => ({
    type: "rect", x0: state.head - 0.5, x1: state.head + 0.5, y0: row - 0.5, y1: row + 0.5, line: { color, width },
  });
  return row < 0 ? [] : [outline("#000000", 5), outline("#ffffff", 2.5)];
}

function drawMap() {
  const name = state.statistic;
  const item = statistics.get(name);
  const heads = Math.max(...report.sites.map((site) => site.heads));
  const cells = report.sites.flatMap((site, row) =>
    Array.from({ length: site.heads }, (_, head) => ({
      row, head, site, cell: site.first + head, ...cellNumbers(name, state.mode, site.first + head),
    })),
  );
  const grid = () => report.sites.map(() => Array(heads).fill(null));
  const z = grid();
  const text = grid();
  const written = grid();
  const colours = mapColours(name, state.mode, cells);
  const decimals = Math.min(Math.max(2 - Math.ceil(Math.log10(colours.high - colours.low)), 0), 6);
  const narrow = isNarrow();
  const numbered = heads <= 16 && report.sites.length <= 16 && !narrow;
  for (const { row, head, site, shown } of cells) {
    z[row][head] = Number.isFinite(shown) ? shown : null;
    text[row][head] = hoverText(name, site, head);
    written[row][head] = Number.isFinite(shown) ? shown.toFixed(decimals).replace("-", "−") : "–";
  }
  report.sites.forEach((site, row) => text[row].fill(`layer ${plotText(site.label)} has ${plural(site.heads, "head")}`, site.heads));
  const hatched = cells.filter(({ cell, shown }) => Number.isFinite(shown) && verdict(name, cell).inside);
  const rowHeight = Math.max(18, Math.min(44, 560 / report.sites.length));
  const unit = axisText([state.mode === "difference" ? "difference" : "", item.unit].filter(Boolean).join(", "));
  const colorbar = narrow
    ? { orientation: "h", thickness: 10, len: 1, x: 0.5, y: -0.14 - 8 / (rowHeight * report.sites.length), yanchor: "top" }
    : { thickness: 12, outlinewidth: 0 };
  const traces = [
    {
      type: "heatmap", z, text, hoverinfo: "text", hoverongaps: true, xgap: 1.5, ygap: 1.5,
      colorscale: scaleOf(colours.scale), zmin: colours.low, zmax: colours.high,
      colorbar: { ...colorbar, title: { text: unit, side: narrow ? "top" : "right" }, outlinewidth: 0 },
    },
    ...hatching(hatched, numbered),
  ];
  if (numbered) traces.push(numbersInCells(cells, written, colours));
  const layout = {
    height: Math.round(rowHeight * report.sites.length) + (narrow ? 130 : 70),
    margin: { l: 12, r: 8, t: 8, b: narrow ? 90 : 44 },
    xaxis: { title: { text: "head" }, range: [-0.5, heads - 0.5], showgrid: false, zeroline: false, ...ticks(heads, narrow ? 8 : 32) },
    yaxis: {
      title: { text: narrow ? "" : "layer", standoff: 8 }, range: [report.sites.length - 0.5, -0.5], showgrid: false, zeroline: false,
      automargin: true, tickvals: rowTicks(), ticktext: rowTicks().map((row) => plotText(report.sites[row].label)),
    },
    shapes: selectedOutline(),
  };
  byId("map").style.minHeight = `${layout.height}px`;
  draw(byId("map"), traces, layout);
  describeMap(item, cells, hatched, colours);
}

function ticks(count, most) {
  const step = [1, 2, 4, 8, 16, 32].find((size) => count / size <= most) || 64;
  return { tickvals: Array.from({ length: Math.ceil(count / step) }, (_, place) => place * step) };
}

function rowTicks() {
  return ticks(report.sites.length, 34).tickvals;
}

// The number in each cell, in black or white, whichever reads better on the cell's colour.
function numbersInCells(cells, written, colours) {
  const luminous = (value) => {
    const place = Math.min(Math.max((value - colours.low) / (colours.high - colours.low), 0), 1);
    const hex = colours.scale[Math.round(place * (colours.scale.length - 1))];
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return 0.299 * red + 0.587 * green + 0.114 * blue > 130;
  };
  return {
    type: "scatter", mode: "text", hoverinfo: "skip", x: cells.map(({ head }) => head), y: cells.map(({ row }) => row),
    text: cells.map(({ row, head }) => written[row][head]),
    textfont: { size: 11, color: cells.map(({ shown }) => (!Number.isFinite(shown) ? tone("muted") : luminous(shown) ? "#000" : "#fff")) },
  };
}

function describeMap(item, cells, hatched, colours) {
  const known = cells.filter(({ shown }) => Number.isFinite(shown)).sort((a, b) => a.shown - b.shown);
  const place = ({ site, head, shown }) => `${write(shown)} in layer ${site.label}, head ${head}`;
  const parts = [];
  if (!known.length) parts.push("This statistic has no value in any head.");
  else parts.push(`Lowest: ${place(known[0])}. Highest: ${place(known[known.length - 1])}.`);
  const tested = known.filter(({ cell }) => verdict(item.name, cell).inside !== null).length;
  if (tested) {
    const control = CONTROL_WORDS[controlOf(item.name)];
    parts.push(`${tested - hatched.length} of ${tested} heads are outside their null (control: ${control}); ${hatched.length} are inside it.`);
  } else if (controlOf(item.name)) parts.push("It was not tested against its control.");
  else parts.push("It has no control: this is a description, not a finding.");
  byId("map-summary").textContent = parts.join(" ");
  const legend = tested ? [make("span", { className: "swatch", "aria-hidden": "true" }), "Hatched: inside its null (q ≥ 0.05). "] : [];
  byId("map-legend").replaceChildren(...legend, colours.notes.join(" "));
  byId("map").setAttribute("aria-label", `${item.title}, by layer and head. The select boxes below open any head.`);
}

function describeStatistic() {
  const item = statistics.get(state.statistic);
  byId("about-title").textContent = item.title;
  byId("about-question").textContent = item.question || "";
  byId("about-formula").textContent = item.formula || "";
  byId("about-formula").hidden = !item.formula;
  byId("about-caveat").textContent = item.caveat || "";
  byId("about-gauge").hidden = !item.gauge_dependent;
  const control = controlOf(state.statistic);
  byId("difference").disabled = !control;
  if (!control) state.mode = "value";
  for (const radio of document.querySelectorAll('input[name="mode"]')) radio.checked = radio.value === state.mode;
  byId("mode-note").textContent = control ? `Control: ${CONTROL_WORDS[control]}.` : "This statistic has no control.";
}
