// What every page with a script shares: its elements, light and dark, a changed width.

// An element with properties and children; text is always set as text, never parsed as HTML.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^(data-|aria-)/.test(name) || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const words = (name) => String(name).replaceAll("_", " ");

// What an element holds as base64 of gzip.
async function inflate(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// The drawing library. The page's content security policy knows its hash, so that nothing else can run in its place.
async function loadPlotly() {
  const text = new TextDecoder().decode(await inflate(byId("plotly")));
  document.head.append(make("script", { textContent: text }));
  if (typeof Plotly === "undefined") throw new Error("the drawing library did not start");
}

// Run what draws the page; where it cannot, say so, and what can be read all the same.
function begin(start, without) {
  const fail = (sentence) => {
    byId("failure").textContent = `${sentence} ${without}`;
    byId("failure").hidden = false;
  };
  if (typeof DecompressionStream === "undefined") {
    fail("This browser cannot unpack the drawings and numbers of this page: it is older than 2023.");
    return;
  }
  start().catch((error) => {
    fail(`The drawings could not be made: ${error.message}.`);
    throw error;
  });
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
  byId("theme").setAttribute("aria-label", theme === "dark" ? "Use light colours" : "Use dark colours");
}

function listenToTheme(redraw) {
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  applyTheme(preference.matches ? "dark" : "light");
  const change = (theme) => {
    applyTheme(theme);
    redraw();
  };
  preference.addEventListener("change", () => change(preference.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () => change(isDark() ? "light" : "dark"));
}

function onResize(callback) {
  let width = window.innerWidth;
  let waiting;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(callback, 120);
  });
}
