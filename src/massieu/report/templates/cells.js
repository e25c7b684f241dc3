// What a cell of the map holds: its numbers, its colour, and how it is told in words.

const MANY_CELLS = 200;
const GAP = 1; // rows between two kinds of attention, where a title stands

// The map's rows from top to bottom: sites of one kind together, each kind with a title above it.
const mapGroups = [...new Set(report.sites.map((site) => site.group))];
const mapRows = mapGroups.flatMap((group, place) =>
  report.sites.filter((site) => site.group === group).map((site) => ({ site, group, gaps: mapGroups.length > 1 ? place + 1 : 0 })),
).map((row, place) => ({ ...row, place, y: place + GAP * row.gaps }));
const rowOf = (siteIndex) => mapRows.find(({ site }) => site.index === siteIndex);

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

function cellsOf(name) {
  return mapRows.flatMap(({ site, group, y }) =>
    Array.from({ length: site.heads }, (_, head) => ({
      y, head, site, group, cell: site.first + head, ...cellNumbers(name, state.mode, site.first + head),
    })),
  );
}

// A cell in words, line by line: where it is, its number with its error, its control, its test.
function cellLines(name, site, head) {
  const item = statistics.get(name);
  const cell = site.first + head;
  const { value, error, count, against, difference } = cellNumbers(name, "value", cell);
  const lines = [`layer ${site.label}, head ${head}`, site.name];
  if (!Number.isFinite(value)) {
    const reason = site.unavailable[name] || site.unavailable[item.group];
    return [...lines, `no value${reason ? `: ${reason}` : ""}`];
  }
  lines.push(`${writeWithError(value, error)} ${item.unit || ""}`.trim());
  if (against) {
    lines.push(`control (${CONTROL_WORDS[controlOf(name)]}): ${writeWithError(against.value, against.error)}`);
    lines.push(`difference: ${writeWithError(difference.value, difference.error)}`);
  } else lines.push("no control");
  lines.push(`n = ${writeCount(count)}${against ? `, control ${writeCount(against.count)}` : ""}`);
  if (against) lines.push(`${verdict(name, cell).text}${verdict(name, cell).inside ? ": hatched" : ""}`);
  return lines;
}

function hoverText(name, site, head) {
  const [first, ...others] = cellLines(name, site, head).map(plotText);
  return [`<b>${first}</b>`, ...others].join("<br>");
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

// Colours of cells: diverging and centred for signed numbers, sequential otherwise. Decimals tell cells apart.
function mapColours(name, mode, cells) {
  const shown = cells.map((cell) => cell.shown).filter(Number.isFinite).sort((a, b) => a - b);
  const cut = shown.length > MANY_CELLS ? Math.floor(shown.length / 100) : 0;
  const low = shown[cut] ?? 0;
  const high = shown[shown.length - 1 - cut] ?? 1;
  // Digits that tell most cells apart, where one cell is far from all others.
  const [lower, upper] = [0.1, 0.9].map((share) => shown[Math.round(share * (shown.length - 1))]);
  const decimals = Math.min(Math.max(decimalsApart(low, high), decimalsApart(lower, upper)), decimalsApart(low, high) + 2);
  const notes = cut ? ["Colours end at the 1st and 99th percentile."] : [];
  if (mode === "value" && !statistics.get(name).signed) {
    return { scale: report.scales.sequential, low, high: high > low ? high : low + (Math.abs(low) || 1), decimals, notes };
  }
  const controls = cells.map((cell) => cell.against?.value).filter(Number.isFinite);
  const centre = mode === "value" && controls.length ? median(controls) : 0;
  const reach = Math.max(high - centre, centre - low) || 1;
  notes.unshift(
    mode === "difference"
      ? "Blue: below the control. Orange: above it."
      : `Blue: below ${write(centre)}. Orange: above it.${controls.length ? ` ${write(centre)} is the median of the control.` : ""}`,
  );
  const scale = report.scales.diverging[isDark() ? "dark" : "light"];
  return { scale, low: centre - reach, high: centre + reach, decimals, notes };
}
