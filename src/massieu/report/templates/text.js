// Example text of one head: tokens coloured by a number, and the keys that a token weighs most.

const SHADES = { selective_log_partition: "selective log Z", entropy: "entropy" };
const SHADE_WORDS = {
  selective_log_partition: "Selective log Z: how far a token's attention is from uniform over the keys it sees; 0 where it is uniform.",
  entropy: "Entropy: low where a token attends to few keys; at most the logarithm of the number of visible keys.",
};
let pinned = null; // the token that a click or a key press chose; hovering shows another for a moment

function exampleOf(place, siteIndex) {
  const example = report.examples[place];
  const site = sites.get(siteIndex);
  const data = example?.sites[siteIndex];
  if (!data) return null;
  // Without a text (an image's patches), a token is named by its position.
  const numbered = Array.from({ length: data.queries }, (_, position) => ({ text: `#${position}`, space: true, line_end: false }));
  return {
    data,
    queries: example.tokens[site.query_tokens] ?? numbered,
    keys: example.tokens[site.key_tokens] ?? [],
    rawQueries: example.raw[site.query_tokens] ?? [],
    rawKeys: example.raw[site.key_tokens] ?? [],
    twoTexts: site.query_tokens !== site.key_tokens,
  };
}

function fillText(container, tokens, raw, focusable) {
  container.replaceChildren();
  tokens.forEach((token, place) => {
    const span = make("span", { className: "token", title: JSON.stringify(raw[place] ?? token.text), "data-place": place }, token.text);
    if (focusable) {
      span.tabIndex = place === 0 ? 0 : -1;
      span.setAttribute("role", "button");
    }
    // A zero-width space lets a line break between tokens that no space separates.
    container.append(token.space && place ? " " : "\u200b", span);
    if (token.line_end) container.append(make("br"));
  });
}

function showExample() {
  const chosen = exampleOf(state.example, state.site);
  const empty = byId("example-empty");
  empty.hidden = Boolean(chosen);
  byId("example").hidden = !chosen;
  if (!chosen) {
    empty.textContent = report.examples.length
      ? "No example was kept for this attention site."
      : "No example text was kept in this run, so there are no tokens to show.";
    return;
  }
  fillText(byId("tokens"), chosen.queries, chosen.rawQueries, true);
  byId("keys-frame").hidden = !chosen.twoTexts;
  if (chosen.twoTexts) fillText(byId("keys"), chosen.keys, chosen.rawKeys, false);
  const kept = chosen.data.queries;
  const some = kept < chosen.queries.length ? ` Numbers were kept for the first ${plural(kept, "token")} of ${writeCount(chosen.queries.length)}.` : "";
  byId("text-hint").textContent = `Point at a token, tap it, or move with the arrow keys to see the keys with the largest weights.${some}`;
  shadeTokens(chosen);
  const start = Math.min(pinned ?? firstTelling(chosen), chosen.queries.length - 1);
  pinned = start;
  showStrongest(start);
}

// Open on a token in the middle, where a causal head already sees some keys.
function firstTelling(chosen) {
  return Math.floor((chosen.data.queries ?? chosen.queries.length) / 3);
}

function shadeTokens(chosen) {
  const available = Object.keys(SHADES).filter((name) => chosen.data[name]);
  const select = byId("shade");
  select.replaceChildren(...available.map((name) => make("option", { value: name }, SHADES[name])));
  if (!available.includes(state.shade)) state.shade = available[0] ?? null;
  select.value = state.shade ?? "";
  select.disabled = !available.length;
  byId("shade-note").textContent = SHADE_WORDS[state.shade] || "";
  const { queries } = chosen.data;
  const values = state.shade ? slice(chosen.data[state.shade], state.head * queries, queries) : [];
  const known = values.filter(Number.isFinite);
  const low = Math.min(...known);
  const high = Math.max(...known);
  byId("tokens").querySelectorAll(".token").forEach((span, place) => {
    const value = values[place];
    span.classList.toggle("blank", !Number.isFinite(value));
    span.style.setProperty("--shade", Number.isFinite(value) && high > low ? (value - low) / (high - low) : 0);
  });
  byId("shade-low").textContent = known.length ? `${write(low)}` : "no values";
  byId("shade-high").textContent = known.length ? `${write(high)} nats` : "";
}

function strongestKeys(chosen, place) {
  const { data } = chosen;
  if (!data.top_keys || place >= data.queries) return [];
  const from = (state.head * data.queries + place) * data.strongest;
  const keys = slice(data.top_keys, from, data.strongest);
  const weights = slice(data.top_weights, from, data.strongest).map((root) => (root / 255) ** 2);
  const pairs = keys.map((key, rank) => ({ key, weight: weights[rank] }));
  return pairs.filter(({ key, weight }) => key !== data.missing_key && weight > 0);
}

function showStrongest(place) {
  const chosen = exampleOf(state.example, state.site);
  const tokens = byId("tokens");
  const keyTokens = byId(chosen.twoTexts ? "keys" : "tokens");
  for (const span of document.querySelectorAll(".token.key, .token.query")) span.classList.remove("key", "query");
  const query = tokens.querySelector(`[data-place="${place}"]`);
  if (!query) return;
  query.classList.add("query");
  const strongest = strongestKeys(chosen, place);
  const { queries } = chosen.data;
  const value = state.shade && place < queries ? entry(chosen.data[state.shade], state.head * queries + place) : NaN;
  const shade = Number.isFinite(value) ? `, ${SHADES[state.shade]} ${write(value)} nats` : "";
  const total = strongest.reduce((sum, { weight }) => sum + weight, 0);
  byId("token-title").replaceChildren(
    "Token ", make("strong", {}, `“${chosen.queries[place].text}”`), ` at position ${place}${shade}. `,
    strongest.length ? `Its strongest keys hold ${writeShare(total)} of its weight:` : "Its strongest keys were not kept.",
  );
  byId("strongest").replaceChildren(
    ...strongest.map(({ key, weight }, rank) => {
      const span = keyTokens.querySelector(`[data-place="${key}"]`);
      span?.classList.add("key");
      span?.setAttribute("data-rank", rank + 1);
      const bar = make("span");
      bar.style.width = `${Math.min(100, 100 * weight)}%`;
      const name = make("bdi", {}, chosen.keys[key]?.text ?? `#${key}`);
      const label = make("span", { title: JSON.stringify(chosen.rawKeys[key] ?? "") }, name, make("span", { className: "note" }, ` at ${key}`));
      return make("li", {}, label, make("span", {}, writeShare(weight)), make("span", { className: "meter" }, bar));
    }),
  );
}

function pin(place) {
  const spans = byId("tokens").querySelectorAll(".token");
  pinned = Math.min(Math.max(place, 0), spans.length - 1);
  spans.forEach((span, index) => (span.tabIndex = index === pinned ? 0 : -1));
  showStrongest(pinned);
}

function listenToTokens() {
  const tokens = byId("tokens");
  const placeOf = (event) => event.target.closest(".token")?.dataset.place;
  tokens.addEventListener("pointerover", (event) => placeOf(event) !== undefined && showStrongest(Number(placeOf(event))));
  tokens.addEventListener("pointerleave", () => pinned !== null && showStrongest(pinned));
  tokens.addEventListener("click", (event) => placeOf(event) !== undefined && pin(Number(placeOf(event))));
  tokens.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    pin(pinned + steps[event.key]);
    tokens.querySelector(`[data-place="${pinned}"]`).focus();
  });
}
