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

function chooseStatistic(name) {
  showStatistic(name);
  remember();
}

function chooseHead(site, head, scroll) {
  openHead(site, head, scroll);
  remember();
}

function listenToControls() {
  byId("statistic").addEventListener("change", (event) => chooseStatistic(event.target.value));
  byId("mode").addEventListener("change", (event) => {
    state.mode = event.target.value;
    drawMap();
    remember();
  });
  byId("map").on("plotly_click", ({ points: [point] }) => {
    const row = mapRows.find(({ y }) => y === Math.round(point.y));
    if (row && point.x < row.site.heads) chooseHead(row.site.index, Math.round(point.x), true);
  });
  byId("site").addEventListener("change", (event) => chooseHead(Number(event.target.value), state.head, false));
  byId("head").addEventListener("change", (event) => chooseHead(state.site, Number(event.target.value), false));
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
  listenToMapKeys();
}

function linkFindings() {
  for (const card of document.querySelectorAll("[data-finding]")) {
    const finding = report.findings[Number(card.dataset.finding)];
    const links = card.querySelector(".links");
    if (statistics.has(finding.statistic)) {
      const button = make("button", { type: "button" }, "Show on the map");
      button.addEventListener("click", () => {
        chooseStatistic(finding.statistic);
        goTo(byId("map-section"));
      });
      links.append(button);
    } else if (report.layers.statistics.some(({ name }) => name === finding.statistic)) {
      const button = make("button", { type: "button" }, "Show through the depth");
      button.addEventListener("click", () => goTo(byId("sublayers-section")));
      links.append(button);
    }
    for (const { site, head } of finding.cells.slice(0, 4)) {
      const button = make("button", { type: "button" }, `layer ${sites.get(site).label}, head ${head}`);
      button.addEventListener("click", () => chooseHead(site, head, true));
      links.append(button);
    }
  }
}

function firstHead() {
  const named = report.findings.flatMap(({ cells }) => cells)[0];
  const fallback = report.sites.find((site) => site.heads > 0);
  return named || (fallback && { site: fallback.index, head: 0 });
}

// On a narrow page the long parts begin folded. A drawing is made when its part is opened: it measures its room.
function listenToFolds() {
  const folds = [...document.querySelectorAll("details[data-fold]")];
  let narrow = null;
  const arrange = () => {
    if (narrow !== isNarrow()) for (const fold of folds) fold.open = !isNarrow();
    narrow = isNarrow();
  };
  arrange();
  for (const fold of document.querySelectorAll("details.part, details[data-fold]")) {
    fold.addEventListener("toggle", () => fold.open && drawEverything());
  }
  onResize(() => {
    arrange();
    drawEverything();
  });
}

async function start() {
  listenToTheme(drawEverything);
  await Promise.all([loadPlotly(), unpack()]);
  fillSelectors();
  linkFindings();
  listenToFolds();
  drawSublayers();
  const opened = firstHead();
  if (report.statistics.length && opened) {
    const wished = report.findings.map(({ statistic }) => statistic).find((name) => statistics.has(name));
    const first = [...groupedStatistics().values()][0][0].name;
    initial = { statistic: wished || first, mode: "value", site: opened.site, head: opened.head };
    Object.assign(state, initial);
    showState(initial);
    listenToControls();
    const part = location.hash ? followAddress() : null;
    listenToAddress();
    if (part) goTo(part);
  } else {
    byId("map-empty").hidden = false;
    byId("map-body").hidden = true;
    byId("head-section").hidden = true;
  }
  document.documentElement.dataset.ready = "yes";
}

begin(start, "Findings and methods can be read without them.");
