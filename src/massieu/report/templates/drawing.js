// What every drawing shares: the theme's colours, plotly's settings, text that plotly may parse.

const PLOT_SETTINGS = { displayModeBar: false, responsive: true, displaylogo: false };

const isDark = () => document.documentElement.dataset.theme === "dark";
const isNarrow = () => window.innerWidth < 640;
const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function scaleOf(colours) {
  return colours.map((colour, place) => [place / (colours.length - 1), colour]);
}

// Plotly reads a few tags in text; the names of modules and statistics must not become tags.
function plotText(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// A title of an axis: cut where it would not fit.
function axisText(text) {
  return plotText(text && text.length > 32 ? `${text.slice(0, 31)}…` : text || "");
}

function layoutOf(extra) {
  const family = getComputedStyle(document.body).fontFamily;
  // The margin grows with the numbers along an axis, and the title keeps clear of them.
  const axis = {
    gridcolor: tone("line"), zerolinecolor: tone("muted"), linecolor: tone("line"), fixedrange: true, automargin: true,
    exponentformat: "power",
  };
  const clear = (given) => ({ ...axis, ...given, ...(given.title && { title: { standoff: 10, ...given.title } }) });
  const { xaxis = {}, yaxis = {}, yaxis2, ...rest } = extra;
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family, size: 12, color: tone("ink") },
    hoverlabel: {
      align: "left",
      bgcolor: tone("surface"),
      bordercolor: tone("muted"),
      font: { family, color: tone("ink"), size: 12 },
    },
    dragmode: false,
    showlegend: false,
    xaxis: clear(xaxis),
    yaxis: clear(yaxis),
    ...rest,
  };
  if (yaxis2) layout.yaxis2 = clear(yaxis2);
  return layout;
}

// Draws where there is room to measure: a part that is folded is drawn when it is opened.
function draw(element, traces, layout) {
  if (!element.getClientRects().length) return null;
  return Plotly.react(element, traces, layoutOf(layout), PLOT_SETTINGS);
}
