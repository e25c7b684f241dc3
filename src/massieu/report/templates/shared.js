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
