// The site's search without a browser: node site_search.js WORKER INDEX < QUERIES, all JSON.
const { readFileSync } = require("fs");
const { runInThisContext } = require("vm");

const [worker, index] = process.argv.slice(2);
const replies = [];
let listener;
globalThis.self = globalThis;
globalThis.addEventListener = (kind, called) => { listener = called; };
globalThis.postMessage = (reply) => replies.push(reply);
runInThisContext(readFileSync(worker, "utf8"));

const ask = async (message) => {
  const count = replies.length;
  listener({ data: message });
  while (replies.length === count) await new Promise((next) => setTimeout(next, 1));
  return replies[count].data;
};

(async () => {
  const data = JSON.parse(readFileSync(index, "utf8"));
  await ask({ type: 0, data: { ...data, options: {} } }); // set up
  const places = [];
  for (const query of JSON.parse(readFileSync(0, "utf8"))) {
    const { items } = await ask({ type: 2, data: query });
    // An item is a page with its sections.
    places.push(items.filter((item) => item.length).map((item) => item[0].location));
  }
  console.log(JSON.stringify(places));
})();
