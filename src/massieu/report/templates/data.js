// The page's numbers: unpacking, look-up, and how a number is written.

const report = JSON.parse(document.getElementById("report-data").textContent);
const packed = new Map(); // block name -> DataView
const columnCache = new Map();
const INSIDE_NULL = 0.05;
const CONTROL_WORDS = report.controls;
const CONTROLS = Object.keys(CONTROL_WORDS);

async function unpack() {
  for (const element of document.querySelectorAll("script[data-block]")) {
    packed.set(element.dataset.block, new DataView(await inflate(element)));
  }
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

const READERS = {
  f4: [4, (view, at) => view.getFloat32(at, true)],
  f2: [2, (view, at) => half(view.getUint16(at, true))],
  u1: [1, (view, at) => view.getUint8(at)],
  u2: [2, (view, at) => view.getUint16(at, true)],
  u4: [4, (view, at) => view.getUint32(at, true)],
};

// One entry of a packed array, read where it lies.
function entry([block, offset, , kind], index) {
  const [size, read] = READERS[kind];
  return read(packed.get(block), offset + index * size);
}

function slice(reference, from, length) {
  return Array.from({ length }, (_, index) => entry(reference, from + index));
}

// One statistic over all heads: value(cell), error(cell), count(cell); null when the table does not have it.
function column(name) {
  if (!(name in report.columns)) return null;
  if (!columnCache.has(name)) {
    const { value, error, count } = report.columns[name];
    columnCache.set(name, {
      value: (cell) => entry(value, cell),
      error: (cell) => (error ? entry(error, cell) : NaN),
      count: (cell) => (Array.isArray(count) ? entry(count, cell) : count),
    });
  }
  return columnCache.get(name);
}

const statistics = new Map(report.statistics.map((item) => [item.name, item]));
const sites = new Map(report.sites.map((site) => [site.index, site]));

// The control that a statistic is compared with, if the table has it.
function controlOf(name) {
  const control = statistics.get(name)?.control;
  return control && column(`${name}/${control}`) ? control : null;
}

function write(value, error) {
  if (value === null || value === undefined || Number.isNaN(value)) return "undefined";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  let decimals;
  if (error > 0 && Number.isFinite(error)) {
    const power = Math.floor(Math.log10(error));
    decimals = (error < 3 * 10 ** power ? 1 : 0) - power;
  } else {
    value = Math.abs(value) < 1000 ? Number(value.toPrecision(3)) : Math.round(value);
    decimals = Number.isInteger(value) ? 0 : 2 - Math.floor(Math.log10(Math.abs(value)));
  }
  if (value !== 0 && Math.abs(value) < 1e-3 && decimals > 5) return value.toExponential(1).replaceAll("-", "−");
  if (decimals < 0) value = Math.round(value * 10 ** decimals) / 10 ** decimals;
  const places = Math.min(Math.max(decimals, 0), 12);
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places }).replaceAll("-", "−");
}

// As many decimals as tell two numbers apart, with two digits of their difference.
function decimalsApart(low, high) {
  return high > low ? Math.min(Math.max(2 - Math.ceil(Math.log10(high - low)), 0), 12) : 2;
}

function writeFixed(value, decimals) {
  const text = value.toFixed(decimals);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

// Two numbers with three digits each, or with more where these would look alike.
function writeApart(low, high) {
  const texts = [write(low), write(high)];
  if (texts[0] !== texts[1] || !(high > low)) return texts;
  const decimals = decimalsApart(low, high);
  return decimals < 12 ? [low, high].map((value) => writeFixed(value, decimals)) : [low, high].map((value) => value.toPrecision(6));
}

function writeWithError(value, error) {
  if (!(error > 0) || !Number.isFinite(error) || !Number.isFinite(value)) return write(value);
  return `${write(value, error)} ± ${write(error, error)}`;
}

const writeShare = (share) => `${share < 0.1 ? (100 * share).toFixed(1) : Math.round(100 * share)}\u00a0%`;
const plural = (count, word) => `${writeCount(count)} ${word}${count === 1 ? "" : "s"}`;
const writeCount = (count) => count.toLocaleString("en").replaceAll(",", "\u202f");
const writeQ = (q) => (q < 0.001 ? "q\u00a0<\u00a00.001" : `q\u00a0=\u00a0${q.toFixed(q < 0.1 ? 3 : 2)}`);

// "differs from its control (q = 0.003)", or why there is no verdict.
function verdict(name, cell) {
  if (!controlOf(name)) return { text: "no control", inside: null };
  const q = column(`${name}/q_value`)?.value(cell);
  if (!Number.isFinite(q)) return { text: "not tested", inside: null };
  const inside = q >= INSIDE_NULL;
  return { text: `${inside ? "does not differ" : "differs"} from its control (${writeQ(q)})`, inside, q: writeQ(q) };
}
