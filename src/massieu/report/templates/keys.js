// The map by keyboard: it is one stop of the tab key, arrow keys move a frame from head to head, Enter opens the head.

let cursor = null; // row and head of the frame, while the map has the focus of the keyboard

const MOVES = {
  ArrowUp: ({ row, head }) => ({ row: row - 1, head }),
  ArrowDown: ({ row, head }) => ({ row: row + 1, head }),
  ArrowLeft: ({ row, head }) => ({ row, head: head - 1 }),
  ArrowRight: ({ row, head }) => ({ row, head: head + 1 }),
  Home: ({ row }) => ({ row, head: 0 }),
  End: ({ row }) => ({ row, head: Infinity }),
  PageUp: ({ head }) => ({ row: 0, head }),
  PageDown: ({ head }) => ({ row: Infinity, head }),
};

// A row without heads is passed over in the direction of the move; at the edge the frame stays.
function moveCursor(wished) {
  const within = (place, size) => Math.min(Math.max(place, 0), size - 1);
  let row = within(wished.row, mapRows.length);
  const step = row < (cursor?.row ?? 0) ? -1 : 1;
  while (mapRows[row] && !mapRows[row].site.heads) row += step;
  if (mapRows[row]) cursor = { row, head: within(wished.head, mapRows[row].site.heads) };
  showCursor();
}

function showCursor() {
  Plotly.relayout(byId("map"), { shapes: outlines() });
  const { site } = mapRows[cursor.row];
  const [where, , ...told] = cellLines(state.statistic, site, cursor.head);
  byId("map-cell").textContent = `${capital(where)}: ${told.join("; ")}.`;
}

function listenToMapKeys() {
  const map = byId("map");
  const chosen = () => ({ row: rowOf(state.site)?.place ?? 0, head: state.head });
  // A pointer's press gives focus too; drawing a frame then would undo the click.
  map.addEventListener("focus", () => map.matches(":focus-visible") && moveCursor(chosen()));
  map.addEventListener("blur", () => {
    if (!cursor) return;
    cursor = null;
    byId("map-cell").textContent = "";
    Plotly.relayout(map, { shapes: outlines() });
  });
  map.addEventListener("keydown", (event) => {
    const opens = event.key === "Enter" || event.key === " ";
    if (event.altKey || event.ctrlKey || event.metaKey || !(opens || event.key in MOVES)) return;
    event.preventDefault();
    const from = cursor || chosen();
    if (opens) chooseHead(mapRows[from.row].site.index, from.head, true);
    else moveCursor(MOVES[event.key](from));
  });
}
