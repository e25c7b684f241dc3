// One layer × head map of a statistic, or of its difference from the control; each kind of attention has its own colours.

// Diagonal strokes in each hatched cell, as one broken line; where a number stands in the cell they keep to its corners.
function hatching(cells, numbered) {
  const x = [];
  const y = [];
  for (const cell of cells) {
    for (const shift of numbered ? [-0.75, -0.52, 0.52, 0.75] : [-0.6, 0, 0.6]) {
      const reach = 0.5 - Math.abs(shift) / 2;
      x.push(cell.head + shift / 2 - reach, cell.head + shift / 2 + reach, null);
      y.push(cell.y + shift / 2 + reach, cell.y + shift / 2 - reach, null);
    }
  }
  const line = (color, width) => ({ type: "scatter", mode: "lines", x, y, hoverinfo: "skip", line: { color, width }, cliponaxis: true });
  return [line("rgba(0,0,0,0.55)", 2.6), line("rgba(255,255,255,0.9)", 1.1)];
}

function outlines() {
  const outline = (y, head, color, width, dash = "solid") => ({
    type: "rect", x0: head - 0.5, x1: head + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color, width, dash },
  });
  const chosen = rowOf(state.site);
  const shapes = chosen ? [outline(chosen.y, state.head, "#000000", 5), outline(chosen.y, state.head, "#ffffff", 2.5)] : [];
  if (!cursor) return shapes;
  const { y } = mapRows[cursor.row];
  return [...shapes, outline(y, cursor.head, "#000000", 6), outline(y, cursor.head, "#ffb000", 3.5)];
}

// The drawing of one kind of attention: a heatmap over its rows alone.
function groupTrace(group, cells, colours, heads, bar) {
  const rows = mapRows.filter((row) => row.group === group);
  const grid = () => rows.map(() => Array(heads).fill(null));
  const z = grid();
  const text = grid();
  for (const { y, head, site, shown } of cells) {
    const row = rows.findIndex((each) => each.y === y);
    z[row][head] = Number.isFinite(shown) ? shown : null;
    text[row][head] = hoverText(state.statistic, site, head);
  }
  rows.forEach(({ site }, row) => text[row].fill(`layer ${plotText(site.label)} has ${plural(site.heads, "head")}`, site.heads));
  return {
    type: "heatmap", y: rows.map(({ y }) => y), z, text, hoverinfo: "text", hoverongaps: true, xgap: 1.5, ygap: 1.5,
    colorscale: scaleOf(colours.scale), zmin: colours.low, zmax: colours.high, showscale: Boolean(bar), colorbar: bar || {},
  };
}

function colourBar(item, height) {
  const unit = axisText([state.mode === "difference" ? "difference" : "", item.unit].filter(Boolean).join(", "));
  const place = isNarrow()
    ? { orientation: "h", thickness: 10, len: 1, x: 0.5, y: -58 / height, yanchor: "top" }
    : { thickness: 12 };
  return { ...place, title: { text: unit, side: isNarrow() ? "top" : "right" }, outlinewidth: 0, exponentformat: "power" };
}

function drawMap() {
  const name = state.statistic;
  const item = statistics.get(name);
  const heads = Math.max(...report.sites.map((site) => site.heads));
  const cells = cellsOf(name);
  const narrow = isNarrow();
  const several = mapGroups.length > 1;
  const span = mapRows[mapRows.length - 1].y + 1;
  const rowHeight = Math.max(18, Math.min(44, 560 / span));
  const height = Math.round(rowHeight * span);
  const drawn = mapGroups.map((group) => {
    const own = cells.filter((cell) => cell.group === group);
    return { group, cells: own, colours: mapColours(name, state.mode, own) };
  });
  const written = drawn.map(({ cells: own, colours }) => numbersInCells(own, colours));
  const longest = Math.max(...written.flatMap(({ text }) => text.map((one) => one.length)));
  const numbered = heads <= 16 && mapRows.length <= 16 && !narrow && longest * heads <= 96;
  const hatched = cells.filter(({ cell, shown }) => Number.isFinite(shown) && verdict(name, cell).inside);
  const traces = drawn.map(({ group, cells: own, colours }) =>
    groupTrace(group, own, colours, heads, several ? null : colourBar(item, height)),
  );
  traces.push(...hatching(hatched, numbered), ...(numbered ? written : []));
  const below = narrow && !several ? 108 : 48;
  const shownRows = mapRows.filter(({ place }) => ticks(mapRows.length, 34).tickvals.includes(place));
  draw(byId("map"), traces, {
    height: height + below + 16, margin: { l: 12, r: 8, t: 8, b: below },
    xaxis: { title: { text: "head" }, range: [-0.5, heads - 0.5], showgrid: false, zeroline: false, ...ticks(heads, narrow ? 8 : 32) },
    yaxis: {
      title: { text: narrow ? "" : "layer" }, range: [span - 0.5, -0.5], showgrid: false, zeroline: false,
      tickvals: shownRows.map(({ y }) => y), ticktext: shownRows.map(({ site }) => plotText(site.label)),
    },
    shapes: outlines(),
    annotations: several ? groupTitles() : [],
  });
  byId("map").style.minHeight = `${height + below + 16}px`;
  describeMap(item, cells, hatched, drawn);
}

function groupTitles() {
  return mapGroups.map((group) => ({
    xref: "paper", x: 0, xanchor: "left", yref: "y", y: mapRows.find((row) => row.group === group).y - 0.55, yanchor: "bottom",
    text: `<b>${plotText(capital(group))}</b>`, showarrow: false, font: { size: 12 },
  }));
}

function ticks(count, most) {
  const step = [1, 2, 4, 8, 16, 32].find((size) => count / size <= most) || 64;
  return { tickvals: Array.from({ length: Math.ceil(count / step) }, (_, place) => place * step) };
}

// The number in each cell, in black or white, whichever reads better on the cell's colour.
function numbersInCells(cells, colours) {
  const luminous = (value) => {
    const place = Math.min(Math.max((value - colours.low) / (colours.high - colours.low), 0), 1);
    const hex = colours.scale[Math.round(place * (colours.scale.length - 1))];
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return 0.299 * red + 0.587 * green + 0.114 * blue > 130;
  };
  return {
    type: "scatter", mode: "text", hoverinfo: "skip", x: cells.map(({ head }) => head), y: cells.map(({ y }) => y),
    text: cells.map(({ shown }) => (Number.isFinite(shown) ? writeFixed(shown, colours.decimals) : "–")),
    textfont: { size: 11, color: cells.map(({ shown }) => (!Number.isFinite(shown) ? tone("muted") : luminous(shown) ? "#000" : "#fff")) },
  };
}

function describeMap(item, cells, hatched, drawn) {
  const known = cells.filter(({ shown }) => Number.isFinite(shown)).sort((a, b) => a.shown - b.shown);
  const parts = [];
  if (!known.length) parts.push("This statistic has no value in any head.");
  else {
    const ends = [known[0], known[known.length - 1]];
    const [low, high] = writeApart(...ends.map(({ shown }) => shown));
    const [first, last] = ends.map(({ site, head }) => `layer ${site.label}, head ${head}`);
    parts.push(`Lowest: ${low} in ${first}. Highest: ${high} in ${last}.`);
  }
  const tested = known.filter(({ cell }) => verdict(item.name, cell).inside !== null).length;
  if (tested) {
    const inside = hatched.length ? `, ${hatched.length} ${hatched.length === 1 ? "does" : "do"} not` : "";
    const control = CONTROL_WORDS[controlOf(item.name)];
    const differ = tested - hatched.length;
    parts.push(`${differ} of ${plural(tested, "head")} ${differ === 1 ? "differs" : "differ"} from the control (${control})${inside}.`);
  } else if (controlOf(item.name)) parts.push("It was not tested against its control.");
  else parts.push("It has no control: this is a description, not a finding.");
  byId("map-summary").textContent = parts.join(" ");
  describeColours(drawn, tested);
  byId("map").setAttribute("aria-label", `${item.title}, by layer and head. Arrow keys move from head to head, Enter opens one.`);
}

// What colours and strokes mean; where several kinds of attention are drawn, the scale of each.
function describeColours(drawn, tested) {
  const lines = [];
  if (tested) {
    const swatch = make("span", { className: "swatch", "aria-hidden": "true" });
    lines.push(make("span", {}, swatch, "Hatched: no significant difference from the control (q ≥ 0.05)."));
  }
  for (const { group, colours } of drawn) {
    if (drawn.length === 1) {
      if (colours.notes.length) lines.push(colours.notes.join(" "));
      continue;
    }
    const ramp = make("span", { className: "ramp", "aria-hidden": "true" });
    ramp.style.background = `linear-gradient(to right, ${colours.scale.join(", ")})`;
    const [low, high] = writeApart(colours.low, colours.high);
    lines.push(make("span", { className: "scale" }, `${capital(group)}: `, make("b", {}, low), ramp, make("b", {}, high), colours.notes.join(" ")));
  }
  byId("map-legend").replaceChildren(...lines.flatMap((line, place) => (place ? [make("br"), line] : [line])));
}

function describeStatistic() {
  const item = statistics.get(state.statistic);
  byId("about-title").textContent = item.title;
  byId("about-question").textContent = item.question || "";
  byId("about-formula").textContent = item.formula || "";
  byId("about-formula").hidden = !item.formula;
  byId("about-caveat").textContent = item.caveat || "";
  byId("about-theory").hidden = !item.formula && !item.terms.length;
  byId("about-gauge").hidden = !item.gauge_dependent;
  byId("about-terms").replaceChildren(...item.terms.map(({ term, meaning }) => make("p", { className: "note" }, make("dfn", {}, capital(term)), `: ${meaning}.`)));
  const control = controlOf(state.statistic);
  byId("difference").disabled = !control;
  if (!control) state.mode = "value";
  for (const radio of document.querySelectorAll('input[name="mode"]')) radio.checked = radio.value === state.mode;
  byId("mode-note").textContent = control ? `Control: ${CONTROL_WORDS[control]}.` : "This statistic has no control.";
}
