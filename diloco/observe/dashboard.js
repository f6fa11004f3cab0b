"use strict";
// The parts that have changed come as events; where they stay away (a proxy may hold them back), the page asks.
const SILENT_MS = 6000, ASK_MS = 3000, KEPT = "details, summary, pre, .zoom input, .scroll";
const heard = document.getElementById("heard"), filter = document.getElementById("filter");
const [token, orders, done] = ["token", "orders", "done"].map((id) => document.getElementById(id));
let last = Date.now(), asking = false, log = "";

function show(parts) {
  last = Date.now();
  heard.textContent = "";
  for (const [id, html] of Object.entries(parts)) {
    const place = document.getElementById(id);
    if (place === null) { location.reload(); return; }
    const before = [...place.querySelectorAll(KEPT)].map((each) => [each.open, each.scrollLeft, each.scrollTop, each === document.activeElement, each.checked]);
    place.innerHTML = html;
    place.querySelectorAll(KEPT).forEach((each, index) => {  // What a reader has opened, moved to or chosen stays so.
      const [open, left, top, active, checked] = before[index] ?? [];
      if (open !== undefined) each.open = open;
      each.checked = checked;
      each.scrollTo(left ?? 0, top ?? 0);
      if (active) each.focus({ preventScroll: true });
    });
    if (place.querySelector("#log")) { log = document.getElementById("log").textContent; sift(); }
  }
}

function sift() {
  if (document.getElementById("log") === null) return;
  const wanted = filter.value.toLowerCase();
  const lines = log.split("\n").filter((line) => line.toLowerCase().includes(wanted));
  document.getElementById("log").textContent = lines.join("\n");
}

function silent() {
  const text = `No answer since ${new Date(last).toLocaleTimeString()}. Of a run that has ended, diloco dashboard shows the page again.`;
  if (Date.now() - last >= SILENT_MS && heard.textContent !== text) heard.textContent = text;  // A screen reader says it once.
}

async function ask() {
  if (asking || Date.now() - last < SILENT_MS) return;
  asking = true;
  try {
    const answer = await fetch("state", { cache: "no-store" });
    if (answer.ok) show(await answer.json());
  } catch { silent(); } finally { asking = false; }
}

if (document.getElementById("log") !== null) {  // Not on a page that could not be made.
  document.getElementById("log").parentElement.open = true;
  document.getElementById("log").closest("section").before(filter.closest("p"));
  log = document.getElementById("log").textContent;
}
async function operate(button) {
  if (!confirm(`${button.textContent}: do it?`)) return;
  done.textContent = `${button.textContent} ...`;
  const headers = { Authorization: `Bearer ${token.value}` };
  try {
    const answer = await fetch("operate", { method: "POST", headers, body: button.dataset.order });
    done.textContent = `${button.textContent}: ${await answer.text()}`;
  } catch { done.textContent = `${button.textContent}: no answer, or no token`; }
}

if (token !== null) {
  document.getElementById("s2")?.after(document.getElementById("operator"));
  token.addEventListener("input", () => { orders.hidden = token.value === ""; });
  orders.addEventListener("click", (event) => { if (event.target.dataset.order) operate(event.target); });
}
filter.addEventListener("input", sift);
new EventSource("events").addEventListener("message", (event) => show(JSON.parse(event.data)));
setInterval(ask, ASK_MS);
setInterval(silent, 1000);
