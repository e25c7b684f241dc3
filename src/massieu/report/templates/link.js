// What is shown, in the page's address: a link to a statistic, a layer and a head. The back button returns to the last one.

let initial = null; // what is shown where the address names nothing

function addressOf({ statistic, mode, site, head }) {
  const chosen = sites.get(site);
  const named = new URLSearchParams({ statistic, layer: chosen.layer, head });
  if (report.sites.filter(({ layer }) => layer === chosen.layer).length > 1) named.set("site", chosen.name);
  if (mode !== "value") named.set("show", mode);
  return `#${named}`;
}

function remember() {
  const address = addressOf(state);
  if (location.hash !== address) location.hash = address;
}

// The head that an address names; of what the page does not have, a sentence.
function headOf(named, missing) {
  if (!named.has("layer") && !named.has("site")) return { site: state.site, head: state.head };
  const [layer, name] = [named.get("layer"), named.get("site")];
  const fits = (site) => site.heads > 0 && (layer === null || String(site.layer) === layer) && (name === null || site.name === name);
  const site = report.sites.find(fits);
  if (!site) {
    missing.push(name === null ? `layer ${layer}` : `the site ${name}${layer === null ? "" : ` in layer ${layer}`}`);
    return { site: state.site, head: state.head };
  }
  const head = Number(named.get("head") ?? 0);
  if (Number.isInteger(head) && head >= 0 && head < site.heads) return { site: site.index, head };
  missing.push(`head ${named.get("head")} in layer ${layer ?? site.layer}`);
  return { site: site.index, head: 0 };
}

// Show what the address names. Returns the part of the page that it is about; null where it names nothing.
function followAddress() {
  const named = new URLSearchParams(location.hash.slice(1));
  const names = ["statistic", "layer", "site"].some((name) => named.has(name));
  byId("link-trouble").hidden = true;
  if (!names && location.hash) return null; // a part of the page
  if (!names) {
    showState(initial);
    return null;
  }
  const missing = [];
  const wished = { ...state, mode: named.get("show") === "difference" ? "difference" : "value" };
  const name = named.get("statistic");
  if (name !== null) {
    if (statistics.has(name)) wished.statistic = name;
    else missing.push(`the statistic ${name}`);
  }
  showState({ ...wished, ...headOf(named, missing) });
  byId("link-trouble").textContent = `The address of this page names something that is not in this result: ${missing.join("; ")}.`;
  byId("link-trouble").hidden = !missing.length;
  return byId(named.has("layer") || named.has("site") ? "head-section" : "map-section");
}

function showState({ statistic, mode, site, head }) {
  Object.assign(state, { mode });
  showStatistic(statistic);
  openHead(site, head, false);
}

function listenToAddress() {
  window.addEventListener("hashchange", () => {
    if (location.hash !== addressOf(state)) followAddress();
    else byId("link-trouble").hidden = true;
  });
  // The parts of the page are gone to without a change of the address, so that it keeps naming what is shown.
  for (const link of document.querySelectorAll('nav a[href^="#"]')) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      goTo(byId(link.getAttribute("href").slice(1)));
    });
  }
}

// Scroll to a part of the page; where it is folded, it opens.
function goTo(part) {
  for (const fold of [part.querySelector("details.part"), part.closest("details")]) if (fold) fold.open = true;
  part.tabIndex = -1;
  part.focus({ preventScroll: true });
  part.scrollIntoView();
}
