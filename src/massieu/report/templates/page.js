// Start: fill the selectors, listen to the controls, draw everything once, and again when theme or width change.

const state = { statistic: null, mode: "value", site: null, head: 0, example: 0, shade: null };

function drawEverything() {
  if (state.statistic) drawMap();
  if (state.site !== null) drawHeadPlots();
  drawSublayers();
}

function fillSelectors() {
  const titled = (item) => (item.gauge_dependent ? `${item.title} (depends on the key origin)` : item.title);
  const options = (items) => items.map((item) => make("option", { value: item.name }, titled(item)));
  const groups = [...groupedStatistics()].map(([group, items]) => make("optgroup", { label: group }, ...options(items)));
  byId("statistic").replaceChildren(...groups);
  const drawn = report.sites.filter((site) => site.heads > 0);
  byId("site").replaceChildren(...drawn.map((site) => make("option", { value: site.index }, site.label)));
  const titles = report.examples.map((example, place) => example.title || `example ${place + 1}`);
  byId("window").replaceChildren(...titles.map((title, place) => make("option", { value: place }, title)));
}

function showStatistic(name) {
  state.statistic = name;
  byId("statistic").value = name;
  describeStatistic();
  drawMap();
}

function listenToControls() {
  byId("statistic").addEventListener("change", (event) => showStatistic(event.target.value));
  byId("mode").addEventListener("change", (event) => {
    state.mode = event.target.value;
    drawMap();
  });
  byId("map").on("plotly_click", ({ points: [point] }) => {
    const site = report.sites[Math.round(point.y)];
    if (site && point.x < site.heads) openHead(site.index, Math.round(point.x), true);
  });
  byId("site").addEventListener("change", (event) => openHead(Number(event.target.value), state.head, false));
  byId("head").addEventListener("change", (event) => openHead(state.site, Number(event.target.value), false));
  byId("window").addEventListener("change", (event) => {
    state.example = Number(event.target.value);
    pinned = null;
    showExample();
  });
  byId("shade").addEventListener("change", (event) => {
    state.shade = event.target.value;
    showExample();
  });
  listenToTokens();
}

function linkFindings() {
  for (const card of document.querySelectorAll("[data-finding]")) {
    const finding = report.findings[Number(card.dataset.finding)];
    const links = card.querySelector(".links");
    if (statistics.has(finding.statistic)) {
      const button = make("button", { type: "button" }, "Show on the map");
      button.addEventListener("click", () => {
        showStatistic(finding.statistic);
        byId("map-section").scrollIntoView();
      });
      links.append(button);
    } else if (report.layers.statistics.some(({ name }) => name === finding.statistic)) {
      const button = make("button", { type: "button" }, "Show through the depth");
      button.addEventListener("click", () => byId("sublayers-section").scrollIntoView());
      links.append(button);
    }
    for (const { site, head } of finding.cells.slice(0, 4)) {
      const button = make("button", { type: "button" }, `layer ${sites.get(site).label}, head ${head}`);
      button.addEventListener("click", () => openHead(site, head, true));
      links.append(button);
    }
  }
}

function firstHead() {
  const named = report.findings.flatMap(({ cells }) => cells)[0];
  const fallback = report.sites.find((site) => site.heads > 0);
  return named || (fallback && { site: fallback.index, head: 0 });
}

function fail(sentence) {
  byId("failure").textContent = `${sentence} Findings and methods can be read without them.`;
  byId("failure").hidden = false;
}

async function start() {
  listenToTheme(drawEverything);
  if (typeof DecompressionStream === "undefined") {
    fail("This browser cannot unpack the numbers of this page: it is older than 2023.");
    return;
  }
  await unpack();
  fillSelectors();
  linkFindings();
  drawSublayers();
  const opened = firstHead();
  if (report.statistics.length && opened) {
    const wished = report.findings.map(({ statistic }) => statistic).find((name) => statistics.has(name));
    const first = [...groupedStatistics().values()][0][0].name;
    Object.assign(state, { statistic: wished || first, site: opened.site, head: opened.head });
    showStatistic(state.statistic);
    openHead(opened.site, opened.head, false);
    listenToControls();
  } else {
    byId("map-empty").hidden = false;
    byId("map-body").hidden = true;
    byId("head-section").hidden = true;
  }
  onResize(drawEverything);
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  fail(`The drawings could not be made: ${error.message}.`);
  throw error;
});
